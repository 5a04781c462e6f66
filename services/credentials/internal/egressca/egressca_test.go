package egressca

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)

func root(t testing.TB) Root {
	t.Helper()
	r, err := NewRoot(1, now, now)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func public(t testing.TB, key any) []byte {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestARootIsForAuthoritiesOfGatesOnly(t *testing.T) {
	c := root(t).Cert
	if c.Subject.CommonName != "Berth egress root" || !c.IsCA || c.MaxPathLen != 1 || c.KeyUsage != x509.KeyUsageCertSign {
		t.Errorf("%s, CA %v, path %d, usage %v", c.Subject, c.IsCA, c.MaxPathLen, c.KeyUsage)
	}
	if years := c.NotAfter.Sub(now).Hours() / 24 / 365; years != 10 {
		t.Errorf("%f years", years)
	}
	if len(c.PermittedDNSDomains)+len(c.ExcludedDNSDomains)+len(c.PermittedIPRanges) > 0 {
		t.Error("it has name constraints")
	}
}

func TestAGatesAuthorityIssuesNoOther(t *testing.T) {
	r := root(t)
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	c, err := r.Issue(public(t, &key.PublicKey), "h1", now)
	if err != nil {
		t.Fatal(err)
	}
	if !c.IsCA || c.MaxPathLen != 0 || !c.MaxPathLenZero || c.KeyUsage != x509.KeyUsageCertSign || c.NotAfter.Sub(now) != gateLife ||
		len(c.ExtKeyUsage) != 1 || c.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth || !strings.HasSuffix(c.Subject.CommonName, " h1") {
		t.Errorf("%+v", c)
	}
	if err := c.CheckSignatureFrom(r.Cert); err != nil {
		t.Error(err)
	}
	late := r.Cert.NotAfter.Add(-time.Hour)
	if c, err := r.Issue(public(t, &key.PublicKey), "h1", late); err != nil || c.NotAfter.After(r.Cert.NotAfter) {
		t.Error("it outlives its root", err)
	}
}

func TestOtherKeysGetNoAuthority(t *testing.T) {
	r := root(t)
	p384, _ := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	small, _ := rsa.GenerateKey(rand.Reader, 2048)
	ed, _, _ := ed25519.GenerateKey(rand.Reader)
	for name, der := range map[string][]byte{"nothing": nil, "text": []byte("key"), "P-384": public(t, &p384.PublicKey), "RSA": public(t, &small.PublicKey),
		"Ed25519": public(t, ed), "the root's own": public(t, &r.key.PublicKey), "long": make([]byte, 1<<20)} {
		if _, err := r.Issue(der, "h1", now); !errors.Is(err, ErrKey) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestARootComesBackAsItWasAndPrintsNoKey(t *testing.T) {
	r := root(t)
	raw, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := Decode(raw)
	if err != nil || !back.key.Equal(r.key) || !back.Cert.Equal(r.Cert) || !back.From.Equal(r.From) {
		t.Error(err)
	}
	secret, _ := r.key.Bytes()
	for _, text := range []string{fmt.Sprint(r), fmt.Sprintf("%+v", r), fmt.Sprintf("%#v", r)} {
		if strings.Contains(text, base64.StdEncoding.EncodeToString(secret)) || len(text) > 100 {
			t.Errorf("it prints %s", text)
		}
	}
	for _, bad := range [][]byte{nil, []byte("{}"), raw[:len(raw)/2]} {
		if _, err := Decode(bad); err == nil {
			t.Errorf("%d bytes were taken", len(bad))
		}
	}
	other := root(t)
	otherRaw, _ := Root{Cert: r.Cert, From: r.From, key: other.key}.Encode()
	if _, err := Decode(otherRaw); err == nil {
		t.Error("a certificate with another key was taken")
	}
}

// A root is known for a month before it signs, and is told until it ends.
func TestANextRootIsToldBeforeItSigns(t *testing.T) {
	if from, needed := Next(nil, now); !needed || !from.Equal(now) {
		t.Error("the first one waits")
	}
	first := root(t)
	if _, needed := Next([]Root{first}, now.Add(8*365*24*time.Hour)); needed {
		t.Error("another one with two years left")
	}
	late := first.Cert.NotAfter.Add(-renewAhead + time.Hour)
	from, needed := Next([]Root{first}, late)
	if !needed || from.Sub(late) != tellAhead {
		t.Error(from, needed)
	}
	second, err := NewRoot(2, late, from)
	if err != nil {
		t.Fatal(err)
	}
	if _, needed := Next([]Root{first, second}, late); needed {
		t.Error("a third one")
	}
	both := []Root{first, second}
	for at, want := range map[time.Time]string{
		late:                "Berth egress root, Berth egress root 2",
		from:                "Berth egress root 2, Berth egress root",
		first.Cert.NotAfter: "Berth egress root 2",
	} {
		var names []string
		for _, r := range Live(both, at) {
			names = append(names, r.String())
		}
		if got := strings.Join(names, ", "); got != want {
			t.Errorf("at %s: %s, want %s", at, got, want)
		}
	}
	if len(Live(both, second.Cert.NotAfter)) != 0 {
		t.Error("an expired root signs")
	}
}

func FuzzIssue(f *testing.F) {
	r := root(f)
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	f.Add(public(f, &key.PublicKey))
	f.Add([]byte("key"))
	f.Fuzz(func(t *testing.T, der []byte) {
		c, err := r.Issue(der, "h1", now)
		if err != nil && !errors.Is(err, ErrKey) {
			t.Error(err)
		}
		if err == nil && (c.MaxPathLen != 0 || !c.MaxPathLenZero) {
			t.Error("it may issue authorities")
		}
	})
}
