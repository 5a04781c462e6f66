package platformtest

import (
	"bytes"
	"context"
	"testing"
)

// Key is a platform key that Records has opened.
type Key struct {
	Wrapped func(context.Context) (key, wrapped []byte, err error)
	Unwrap  func(context.Context, []byte) ([]byte, error)
	Close   func() error
}

// Records checks that every record has a key of its own, that a wrapped key is
// unwrapped after a restart, and that a changed wrapped key is rejected. Each
// call of open opens the same platform key.
func Records(t *testing.T, length int, open func() (Key, error)) {
	t.Helper()
	k, err := open()
	if err != nil {
		t.Fatal(err)
	}
	a, wrapped, err := k.Wrapped(t.Context())
	if err != nil || len(a) != length {
		t.Fatal(len(a), err)
	}
	if bytes.Contains(wrapped, a) {
		t.Error("the wrapped key contains the key")
	}
	b, _, err := k.Wrapped(t.Context())
	if err != nil || bytes.Equal(a, b) {
		t.Error("two records share a key", err)
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	if k, err = open(); err != nil {
		t.Fatal(err)
	}
	back, err := k.Unwrap(t.Context(), wrapped)
	if err != nil || !bytes.Equal(a, back) {
		t.Error("another key came back", err)
	}
	wrapped[len(wrapped)-1] ^= 1
	if _, err := k.Unwrap(t.Context(), wrapped); err == nil {
		t.Error("a changed wrapped key was unwrapped")
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
}
