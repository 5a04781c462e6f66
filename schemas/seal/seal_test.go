package seal

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func newKey(t testing.TB) XKey {
	t.Helper()
	k, err := NewKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestSealedOpensForTheRecipientAlone(t *testing.T) {
	k, other := newKey(t), newKey(t)
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.SliceOfN(rapid.Byte(), 0, 4096).Draw(t, "payload")
		env, err := SealTo(k.Public(), payload, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if len(env) != len(payload)+Overhead {
			t.Fatalf("overhead is %d, want %d", len(env)-len(payload), Overhead)
		}
		got, err := k.Open(env)
		if err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("got %q, %v", got, err)
		}
		if _, err := other.Open(env); !errors.Is(err, ErrOpen) {
			t.Fatalf("a foreign key: %v", err)
		}
		i := rapid.IntRange(0, len(env)-1).Draw(t, "i")
		env[i] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if _, err := k.Open(env); !errors.Is(err, ErrOpen) {
			t.Fatalf("a changed envelope opened: %v", err)
		}
	})
}

func TestSizesAreBounded(t *testing.T) {
	k := newKey(t)
	if _, err := SealTo(k.Public(), make([]byte, MaxPayload+1), rand.Reader); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("got %v", err)
	}
	env, err := SealTo(k.Public(), make([]byte, MaxPayload), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Open(env); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Open(append(env, 0)); !errors.Is(err, ErrOpen) {
		t.Fatalf("got %v", err)
	}
}

func TestKeysKeepTheirSecret(t *testing.T) {
	k := newKey(t)
	seed, err := k.Seed()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(f, k); strings.Contains(s, seed) || !strings.Contains(s, string(k.Public())) {
			t.Errorf("%s prints %q", f, s)
		}
	}
	again, err := ParseSeed(seed)
	if err != nil || again.Public() != k.Public() {
		t.Fatalf("got %v, %v", again, err)
	}
	if _, err := ParsePublic(seed[:56]); !errors.Is(err, ErrKey) {
		t.Fatalf("a seed is no public key: %v", err)
	}
	var zero XKey
	if _, err := zero.Open(nil); !errors.Is(err, ErrKey) {
		t.Fatalf("got %v", err)
	}
}

func FuzzOpen(f *testing.F) {
	k := newKey(f)
	env, err := SealTo(k.Public(), []byte("hello"), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(env)
	f.Add([]byte{version})
	f.Add(append([]byte{version}, k.Public()...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := k.Open(b); err == nil && !bytes.Equal(b, env) {
			t.Fatalf("opened %q", p)
		}
	})
}
