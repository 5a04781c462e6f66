package stack

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
)

// TestTwoRotationsKeepOneSession: while everything runs, the session key is
// rotated twice; the session that was there is found awake and asleep, closed
// and deleted, by the keys of every version.
func TestTwoRotationsKeepOneSession(t *testing.T) {
	dir := t.TempDir()
	info, stop := start(t, dir)
	defer stop()
	c := connect(t, info, "acme", "ann")
	open := func() *sdk.Session {
		t.Helper()
		s, err := c.Open(t.Context(), sdk.OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := open()
	login, err := bus.ReadLogin(bus.LoginPath(dir, subjects.Operator()))
	if err != nil {
		t.Fatal(err)
	}
	op, err := bus.Connect(t.Context(), login)
	if err != nil {
		t.Fatal(err)
	}
	defer op.Close()
	resumed, err := op.NATS().SubscribeSync("berth.v1.session.acme.*.resume")
	if err != nil {
		t.Fatal(err)
	}
	audited, err := op.NATS().SubscribeSync("berth.v1.audit.identity.acme.*")
	if err != nil {
		t.Fatal(err)
	}
	for version := uint32(2); version <= 3; version++ {
		now := time.Now()
		keys, err := keyfile.Add(filepath.Join(dir, "keys", "identity-session.json"), 8, now.Add(4*time.Second), now)
		if err != nil {
			t.Fatal(err)
		}
		// Identity's audit is under the key that comes first.
		key := ids.DeriveSessionKey(keys.Newest().Secret, info.Issuer+"/acme", "acme", "ann", ids.DefaultSession)
		awaitAudit(t, audited, key, func() {
			if s := open(); s.Key() != first.Key() || s.Generation() != first.Generation() {
				t.Fatalf("version %d made another session: %s %s after %s %s", version, s.Key(), s.Generation(), first.Key(), first.Generation())
			}
		})
		if err := c.CloseSession(t.Context(), sdk.UserSession{}); err != nil {
			t.Fatalf("close under version %d: %v", version, err)
		}
		if s := open(); s.Generation() != first.Generation() || s.Origin() == sdk.Created {
			t.Fatalf("version %d woke another session: %s, %s", version, s.Generation(), s.Origin())
		}
	}
	onlyResumed(t, resumed, ids.SessionKey(first.Key()))
	if err := c.DeleteSession(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	if s := open(); s.Generation() == first.Generation() || s.Origin() != sdk.Created || s.Key() == first.Key() {
		t.Errorf("after the delete: %s %s, %s", s.Key(), s.Generation(), s.Origin())
	}
}

// awaitAudit does something again and again until identity records it under a key.
func awaitAudit(t *testing.T, records *nats.Subscription, key ids.SessionKey, do func()) {
	t.Helper()
	for end := time.Now().Add(40 * time.Second); time.Now().Before(end); {
		do()
		for {
			m, err := records.NextMsg(200 * time.Millisecond)
			if err != nil {
				break
			}
			if strings.HasSuffix(m.Subject, "."+string(key)) {
				return
			}
		}
	}
	t.Fatalf("nothing was recorded under %s", key)
}

// onlyResumed holds that sessions were resumed, all under one key.
func onlyResumed(t *testing.T, events *nats.Subscription, key ids.SessionKey) {
	t.Helper()
	n := 0
	for {
		m, err := events.NextMsg(time.Second)
		if err != nil {
			break
		}
		n++
		if on, err := subjects.ParseSession(m.Subject); err != nil || on.Session != key {
			t.Errorf("a resume of %s was told on %s", key, m.Subject)
		}
	}
	if n < 4 {
		t.Errorf("%d resumes were told", n)
	}
}
