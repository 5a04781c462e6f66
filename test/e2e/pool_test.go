package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/first"
	"github.com/berth-dev/berth/test/testenv"
)

// pool declares a pool of one template and waits until n of it wait.
func pool(t *testing.T, e *testenv.Env, template string, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := e.RemovePool(ctx, template); err != nil {
			t.Errorf("remove the pool of %s: %v", template, err)
		}
	})
	if err := e.ApplyPools(ctx, fmt.Sprintf("pools:\n  - {template: %s, minimum: %d, ceiling: %d, share: 1}\n", template, n, n)); err != nil {
		t.Fatal(err)
	}
	if err := e.AwaitWarm(ctx, template, uint32(n)); err != nil {
		t.Fatal(err)
	}
}

// TestAWarmSandboxIsOneSessionsAlone: what waited becomes a session's with its own files and nothing of
// anybody else, the session wakes in another one with them, and the next tenant finds no trace.
func TestAWarmSandboxIsOneSessionsAlone(t *testing.T) {
	e := common.For(t)
	eachTier(t, e, func(t *testing.T, tier, template string) {
		const word = "only-ann-knows-this"
		pool(t, e, template, 2)
		o := sdk.OpenOptions{Template: template, Name: tier}
		s := open(t, e.Client("acme", "ann"), o)
		claimed(t, s)
		sh(t, s, "echo "+word+" > /root/f; echo "+word+" > /opt/f; echo "+word+" > /tmp/f; rm -f /etc/issue; sync")
		if got := sh(t, s, "hostname; id -u; cat /run/berth/session.json"); !strings.HasPrefix(got, "berth\n0\n") || !strings.Contains(got, s.Key()) {
			t.Errorf("the place says %q", got)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := e.AwaitWarm(t.Context(), template, 2); err != nil {
			t.Fatal(err)
		}
		s = open(t, e.Client("acme", "ann"), o)
		claimed(t, s)
		if got := sh(t, s, "cat /root/f /opt/f; test ! -e /etc/issue && test ! -e /tmp/f && echo gone"); got != word+"\n"+word+"\ngone" || s.Origin() != sdk.Resumed {
			t.Errorf("after the sleep (%s): %q", s.Origin(), got)
		}
		other := open(t, e.Client("globex", "gus"), o)
		claimed(t, other)
		if got := sh(t, other, "cat /root/f /opt/f /tmp/f 2>/dev/null; grep -rlI "+word+" /root /opt /tmp /run /etc /home 2>/dev/null; ls /etc/issue"); got != "/etc/issue" {
			t.Errorf("another tenant's sandbox has %q", got)
		}
		for _, s := range []*sdk.Session{s, other} {
			if err := s.Delete(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

func claimed(t *testing.T, s *sdk.Session) {
	t.Helper()
	if !first.Claimed(s) {
		t.Errorf("it started cold: %v", s.Timing().Steps)
	}
}

// TestPoolsOutliveKills: everything is killed; what was claimed goes on under its session, what waited is
// made anew, and there are no more than the ceiling.
func TestPoolsOutliveKills(t *testing.T) {
	e := common.For(t)
	pool(t, e, "container", 3)
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{Template: "container"})
	claimed(t, s)
	sh(t, s, "echo kept > /root/f; sync")
	p, err := s.Exec(t.Context(), sdk.Cmd{Key: "xsurvivor", Args: []string{"sh", "-c", "sleep 2; exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	p.Detach()
	epoch := s.Epoch()
	e.Kill()
	e.Up()
	s = open(t, e.Client("acme", "ann"), sdk.OpenOptions{Template: "container"})
	if s.Epoch() != epoch {
		t.Errorf("the claimed sandbox was not adopted: epoch %s became %s", epoch, s.Epoch())
	}
	if p, err = s.Attach(t.Context(), "xsurvivor", sdk.AttachOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err == nil || !strings.Contains(err.Error(), "7") {
		t.Errorf("the process ended with %v, want its own code 7", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := e.AwaitWarm(ctx, "container", 3); err != nil {
		t.Fatal(err)
	}
	inv := &hostv1.InventoryReply{}
	if err := e.Operator().CallHost(ctx, "local", "inventory", &hostv1.InventoryRequest{}, inv); err != nil {
		t.Fatal(err)
	}
	if len(inv.GetWarm()) != 3 || len(inv.GetSandboxes()) != 1 || !inv.GetSandboxes()[0].GetClaimed() || len(inv.GetStrays()) > 0 {
		t.Errorf("the host has %v", inv)
	}
	again := open(t, e.Client("globex", "gus"), sdk.OpenOptions{Template: "container"})
	claimed(t, again)
}
