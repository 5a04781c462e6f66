package seal

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"
)

func newBox(t testing.TB) *Box {
	t.Helper()
	k, err := RandomBox()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestEnvelopesOfABox(t *testing.T) {
	service := newBox(t)
	client, err := NewKey(rand.Reader)
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
	in, err := SealTo(Public(service.Public()), []byte("request"), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := service.OpenEnvelope(in); err != nil || string(got) != "request" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestBoxesAreThoseOfNkeys(t *testing.T) {
	k := newBox(t)
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

func TestNoOtherBoxOpens(t *testing.T) {
	a, b, c := newBox(t), newBox(t), newBox(t)
	sealed, err := a.Seal(b.Public(), []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Open(a.Public(), sealed); !errors.Is(err, ErrOpen) {
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
		if _, err := a.Seal(peer, nil); !errors.Is(err, ErrKey) {
			t.Errorf("sealed to %q: %v", peer, err)
		}
	}
}

func TestBoxesPrintNoSecret(t *testing.T) {
	k, err := BoxOf([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(f, k); strings.Contains(s, "0123456789") || strings.Contains(s, "48 49 50") {
			t.Errorf("%s prints the secret: %s", f, s)
		}
	}
	if _, err := BoxOf([]byte("short")); err == nil {
		t.Error("a short secret was taken")
	}
}

func BenchmarkBoxSeal(b *testing.B) {
	k, to := newBox(b), newBox(b).Public()
	payload := make([]byte, 900)
	for b.Loop() {
		_, _ = k.Seal(to, payload)
	}
}

func BenchmarkBoxEnvelope(b *testing.B) {
	k, to := newBox(b), newBox(b).Public()
	payload := make([]byte, 900)
	for b.Loop() {
		_, _ = k.Envelope(to, payload)
	}
}

// TestSharedKeysAreForgottenNotMistaken: more peers than are remembered, each
// of them heard in turn.
func TestSharedKeysAreForgottenNotMistaken(t *testing.T) {
	service := newBox(t)
	var peers []*Box
	for range 8 {
		peers = append(peers, newBox(t))
	}
	for i := range maxShared + 10 {
		service.keep(Public(fmt.Sprint(i)), &[secretLen]byte{})
		if n := len(service.now) + len(service.last); n > maxShared {
			t.Fatalf("%d keys are remembered", n)
		}
		p := peers[i%len(peers)]
		out, err := service.Envelope(p.Public(), []byte{byte(i)})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := p.OpenEnvelope(out); err != nil || len(got) != 1 || got[0] != byte(i) {
			t.Fatalf("%v, %v", got, err)
		}
	}
}

// TestKeysOfLowOrderAreRefused: with such a key everybody would share the same.
func TestKeysOfLowOrderAreRefused(t *testing.T) {
	zero, err := nkeys.Encode(nkeys.PrefixByteCurve, make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t)
	if _, err := b.Envelope(string(zero), []byte("x")); !errors.Is(err, ErrKey) {
		t.Errorf("sealed for a key of low order: %v", err)
	}
	if _, err := b.Open(string(zero), make([]byte, 100)); !errors.Is(err, ErrOpen) {
		t.Errorf("opened from a key of low order: %v", err)
	}
}

// BenchmarkFirstSeal is what a client's one-time reply key costs.
func BenchmarkFirstSeal(b *testing.B) {
	box, peer := newBox(b), make([]string, 4096)
	for i := range peer {
		peer[i] = newBox(b).Public()
	}
	b.ResetTimer()
	for i := range b.N {
		if _, err := box.Envelope(peer[i%len(peer)], []byte("answer")); err != nil {
			b.Fatal(err)
		}
	}
}
