package identity_test

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/keyfile"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// keysOf opens alice's session and returns the keys that identity sent with it.
func (w *world) keysOf(t *testing.T) []string {
	t.Helper()
	w.seen()
	if f := w.direct(t, w.front, w.request(t, "open", &identityv1.OpenRequest{})).GetFailure(); f != nil {
		t.Fatalf("open: %v", f)
	}
	for _, m := range w.seen() {
		if o, ok := m.(*lifecyclev1.OpenRequest); ok {
			return o.GetVerified().GetKeys()
		}
	}
	t.Fatal("lifecycle was not asked")
	return nil
}

// await opens until the keys are as wanted.
func (w *world) await(t *testing.T, what string, want func([]string) bool) []string {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		keys := w.keysOf(t)
		if want(keys) {
			return keys
		}
		if time.Now().After(end) {
			t.Fatalf("%s: the keys are %v", what, keys)
		}
	}
}

// TestARotationIsSeenWhileIdentityRuns: a new version is sent with the old one
// before anything is made with it, then comes first; no answer in between is
// another session or a refusal.
func TestARotationIsSeenWhileIdentityRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path := filepath.Join(w.dir, "identity-session.json")
	first := w.keysOf(t)
	if len(first) != 1 {
		t.Fatalf("%v", first)
	}
	now := time.Now()
	keys, err := keyfile.Add(path, 8, now.Add(8*time.Second), now)
	if err != nil {
		t.Fatal(err)
	}
	known := w.await(t, "the new version is known", func(k []string) bool { return len(k) == 2 })
	if time.Now().Before(keys.Newest().From) && known[0] != first[0] {
		t.Errorf("the new version came first before it began")
	}
	last := w.await(t, "the new version has begun", func(k []string) bool { return len(k) == 2 && k[0] != first[0] })
	if last[1] != first[0] || !slices.Contains(known, last[0]) {
		t.Errorf("first %v, then %v", first, last)
	}
	derived := ids.DeriveSessionKey(keys.Newest().Secret, w.issuerOf(t), "acme", "alice", ids.DefaultSession)
	if last[0] != string(derived) {
		t.Errorf("the new key is %s, by the formula %s", last[0], derived)
	}
}

// issuerOf is the issuer of the tokens, as lifecycle hears of it.
func (w *world) issuerOf(t *testing.T) string {
	t.Helper()
	w.seen()
	w.direct(t, w.front, w.request(t, "close", &identityv1.CloseRequest{}))
	for _, m := range w.seen() {
		if c, ok := m.(*lifecyclev1.CloseRequest); ok {
			return c.GetVerified().GetActor().GetIssuer()
		}
	}
	t.Fatal("lifecycle was not asked")
	return ""
}
