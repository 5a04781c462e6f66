package sealbox

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/seal"
)

func key(t testing.TB) *Key {
	t.Helper()
	k, err := Random()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestEnvelopesAreThoseOfSchemasSeal(t *testing.T) {
	service := key(t)
	client, err := seal.NewKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	out, err := service.Envelope(string(client.Public()), []byte("answer"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := client.Open(out); err != nil || string(got) != "answer" {
		t.Fatalf("%q, %v", got, err)
	}
	in, err := seal.SealTo(seal.Public(service.Public()), []byte("request"), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := service.OpenEnvelope(in); err != nil || string(got) != "request" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestBoxesAreThoseOfNkeys(t *testing.T) {
	k := key(t)
	pair, err := nkeys.CreateCurveKeys()
	if err != nil {
		t.Fatal(err)
	}
	pub, _ := pair.PublicKey()
	out, err := k.Seal(pub, []byte("there"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := pair.Open(out, k.Public()); err != nil || string(got) != "there" {
		t.Fatalf("%q, %v", got, err)
	}
	in, _ := pair.Seal([]byte("back"), k.Public())
	for range 2 {
		if got, err := k.Open(pub, in); err != nil || string(got) != "back" {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

func TestNothingElseOpens(t *testing.T) {
	a, b, c := key(t), key(t), key(t)
	sealed, err := a.Seal(b.Public(), []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Open(a.Public(), sealed); errs.Kind(err) != errkind.Invalid {
		t.Errorf("a third party opened it: %v", err)
	}
	if _, err := b.Open(c.Public(), sealed); err == nil {
		t.Error("it opened as another sender's")
	}
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if _, err := b.Open(a.Public(), bad); err == nil {
			t.Fatalf("byte %d changed and it opened", i)
		}
	}
	for _, bad := range [][]byte{nil, []byte("xkv1"), sealed[:30]} {
		if _, err := b.Open(a.Public(), bad); err == nil {
			t.Errorf("%q opened", bad)
		}
	}
	for _, peer := range []string{"", "X", "XAAA", strings.Repeat("X", 56), "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"} {
		if _, err := a.Seal(peer, nil); errs.Kind(err) != errkind.Invalid {
			t.Errorf("sealed to %q: %v", peer, err)
		}
	}
}

func TestSecretsAreNotPrinted(t *testing.T) {
	k, err := New([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(f, k); strings.Contains(s, "0123456789") || strings.Contains(s, "48 49 50") {
			t.Errorf("%s prints the secret: %s", f, s)
		}
	}
	if _, err := New([]byte("short")); err == nil {
		t.Error("a short secret was taken")
	}
}

func BenchmarkSeal(b *testing.B) {
	k, to := key(b), key(b).Public()
	payload := make([]byte, 900)
	for b.Loop() {
		_, _ = k.Seal(to, payload)
	}
}

func BenchmarkEnvelope(b *testing.B) {
	k, to := key(b), key(b).Public()
	payload := make([]byte, 900)
	for b.Loop() {
		_, _ = k.Envelope(to, payload)
	}
}
