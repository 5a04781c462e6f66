package seal

import (
	"bytes"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
)

// FuzzParsePublic: what is taken for a key has one form, and can be sealed to
// or is refused; nothing else happens.
func FuzzParsePublic(f *testing.F) {
	k := newKey(f)
	f.Add(string(k.Public()))
	f.Add("")
	f.Add(strings.Repeat("X", 56))
	f.Add("UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePublic(s)
		if err != nil {
			if !errors.Is(err, ErrKey) || len(s) > 20 && strings.Contains(err.Error(), s[:20]) { // it may be the seed
				t.Fatalf("%q", err)
			}
			return
		}
		if string(p) != s {
			t.Fatalf("%q became %q", s, p)
		}
		if _, err := SealTo(p, []byte("x"), rand.Reader); err != nil && !errors.Is(err, ErrKey) {
			t.Fatal(err)
		}
	})
}

// FuzzParseSeed: a seed that is taken gives itself back; one that is refused
// is not in the error.
func FuzzParseSeed(f *testing.F) {
	seed, err := newKey(f).Seed()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add(seed[:57])
	f.Add("SX" + strings.Repeat("A", 56))
	f.Fuzz(func(t *testing.T, s string) {
		k, err := ParseSeed(s)
		if err != nil {
			if !errors.Is(err, ErrKey) || len(s) > 20 && strings.Contains(err.Error(), s) {
				t.Fatalf("%q", err)
			}
			return
		}
		if again, err := k.Seed(); err != nil || again != s {
			t.Fatalf("the seed is another one afterwards: %v", err)
		}
	})
}

// FuzzBoxOpen: nothing but what was sealed by that sender opens.
func FuzzBoxOpen(f *testing.F) {
	a, b := newBox(f), newBox(f)
	sealed, err := b.Seal(a.Public(), []byte("hello"))
	if err != nil {
		f.Fatal(err)
	}
	env, err := b.Envelope(a.Public(), []byte("hello"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b.Public(), sealed)
	f.Add(a.Public(), sealed)
	f.Add("", env)
	f.Fuzz(func(t *testing.T, from string, raw []byte) {
		if p, err := a.Open(from, raw); err == nil && (from != b.Public() || !bytes.Equal(raw, sealed)) {
			t.Fatalf("opened %q", p)
		} else if err != nil && p != nil {
			t.Fatal("bytes of what did not open")
		}
		if p, err := a.OpenEnvelope(raw); err == nil && !bytes.Equal(raw, env) {
			t.Fatalf("opened %q", p)
		}
	})
}
