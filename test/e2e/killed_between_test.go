package e2e

import (
	"context"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestStuckBetweenStatesAfterKillNine kills everything in the middle of a
// sleep, a wake and a delete. With no further request, every session comes to
// rest; the delete that is asked for again by its id is done, and nothing of
// that session is left.
func TestStuckBetweenStatesAfterKillNine(t *testing.T) {
	e := common.For(t)
	eachTier(t, e, func(t *testing.T, tier, template string) {
		o := sdk.OpenOptions{Template: template, Name: tier}
		u := sdk.UserSession{Name: tier}
		s := open(t, e.Client("acme", "ann"), o)
		sh(t, s, "echo precious > /root/f; sync")
		key := s.Key()

		killDuring(t, e, 250*time.Millisecond, func(ctx context.Context, c *sdk.Client) { _ = c.CloseSession(ctx, u) })
		atRest(t, e, tier, sdk.Active, sdk.Asleep)
		if err := e.Client("acme", "ann").CloseSession(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		atRest(t, e, tier, sdk.Asleep)

		killDuring(t, e, 500*time.Millisecond, func(ctx context.Context, c *sdk.Client) { _, _ = c.Open(ctx, o) })
		atRest(t, e, tier, sdk.Active, sdk.Asleep)
		if got := sh(t, open(t, e.Client("acme", "ann"), o), "cat /root/f"); got != "precious" {
			t.Fatalf("the file says %q", got)
		}

		u.RequestID = "delete-" + tier
		killDuring(t, e, 250*time.Millisecond, func(ctx context.Context, c *sdk.Client) { _ = c.DeleteSession(ctx, u) })
		atRest(t, e, tier, sdk.Active, sdk.Asleep, sdk.Deleted)
		if err := e.Client("acme", "ann").DeleteSession(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		atRest(t, e, tier, sdk.Deleted)
		if left, err := exec.CommandContext(t.Context(), "find", e.Dir, "-path", "*"+key+"*").Output(); err != nil || len(left) > 0 {
			t.Errorf("of the deleted session is left: %s %v", left, err)
		}
		if loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file"); len(loops) > 0 {
			if out, _ := exec.CommandContext(t.Context(), "cat", loops...).Output(); strings.Contains(string(out), key) {
				t.Errorf("a loop device holds the deleted disk:\n%s", out)
			}
		}
		if s := open(t, e.Client("acme", "ann"), o); s.Origin() != sdk.Created || sh(t, s, "cat /root/f 2>/dev/null || true") != "" {
			t.Errorf("after the delete the session is %s", s.Origin())
		} else if err := s.Delete(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// killDuring kills everything at a random moment of do, and starts it again.
func killDuring(t *testing.T, e *testenv.Env, most time.Duration, do func(context.Context, *sdk.Client)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := e.Client("acme", "ann")
	done := make(chan struct{})
	go func() { do(ctx, c); close(done) }()
	time.Sleep(time.Duration(rand.Int64N(int64(most)))) // the fault itself: any moment
	<-killed(e)
	cancel()
	<-done
	e.Up()
}

// atRest waits until a session is in one of these states; one that is not
// listed is deleted.
func atRest(t *testing.T, e *testenv.Env, name string, states ...sdk.State) {
	t.Helper()
	c := e.Client("acme", "ann")
	var now sdk.State
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		list, err := c.Status(t.Context(), sdk.UserSession{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		now = sdk.Deleted
		if len(list) > 0 {
			now = list[0].State
		}
		for _, s := range states {
			if now == s {
				return
			}
		}
	}
	t.Fatalf("the session is stuck: %s, want one of %v", now, states)
}
