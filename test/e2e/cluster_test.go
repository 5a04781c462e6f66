package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestAClusterOfProcessesIsTheSamePlatform opens sessions of three users on a cluster: they spread over
// hosts, work, sleep, wake with their files, and are deleted; then an orderly stop and another start
// find what was left. What remains on the machine at the end is checked by testenv.
func TestAClusterOfProcessesIsTheSamePlatform(t *testing.T) {
	e := testenv.Cluster(t, "--tiers", "container")
	users := []string{"ann", "bob", "cleo"}
	sessions := map[string]*sdk.Session{}
	hosts := map[string]bool{}
	for _, u := range users {
		s := open(t, e.Client("acme", u), sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
		sessions[u] = s
		hosts[e.HostOf(s.Key())] = true
		put(t, s, "/root/f", u+"'s")
	}
	if len(hosts) != 3 {
		t.Errorf("three sessions are on the hosts %v", hosts)
	}
	for _, u := range users {
		if got := sh(t, sessions[u], "hostname; cat /root/f"); !strings.HasSuffix(got, u+"'s") {
			t.Errorf("%s reads %q", u, got)
		}
	}
	epochs := map[string]string{}
	for _, u := range users {
		epochs[u] = sessions[u].Epoch()
		if err := sessions[u].Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s := open(t, e.Client("acme", u), sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
		if got := content(t, s, "/root/f"); got != u+"'s" || s.Epoch() == epochs[u] {
			t.Errorf("after a sleep %s has %q (%s, epoch %s)", u, got, s.Origin(), s.Epoch())
		}
		sessions[u] = s
	}
	if err := e.Client("acme", "bob").DeleteSession(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	e.Up()
	for _, u := range users {
		s := open(t, e.Client("acme", u), sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
		got, want := content(t, s, "/root/f"), u+"'s"
		if u == "bob" {
			want = "-"
		}
		if got != want {
			t.Errorf("after another start %s has %q, want %q (%s)", u, got, want, s.Origin())
		}
	}
}

// TestKillNineOfAClusterAdoptsLiveSandboxes: the supervisor is killed, and with it every member; the
// next start takes over what runs.
func TestKillNineOfAClusterAdoptsLiveSandboxes(t *testing.T) {
	e := testenv.Cluster(t, "--tiers", "container", "--hosts", "2", "--schedulers", "3", "--nats", "1")
	o := sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()}
	s := open(t, e.Client("acme", "ann"), o)
	put(t, s, "/root/f", "before")
	before := e.Info().Members
	e.Kill()
	e.Up()
	for _, m := range e.Info().Members {
		for _, old := range before {
			if m.Name == old.Name && m.PID == old.PID {
				t.Errorf("%s has the process %d that should be dead", m.Name, m.PID)
			}
		}
	}
	again := open(t, e.Client("acme", "ann"), o)
	if got := content(t, again, "/root/f"); got != "before" {
		t.Errorf("after the kill the file says %q (%s)", got, again.Origin())
	}
}

// TestAMemberThatDiesIsStartedAgain kills one of each kind while a session is in use.
func TestAMemberThatDiesIsStartedAgain(t *testing.T) {
	e := testenv.Cluster(t, "--tiers", "container")
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
	put(t, s, "/root/f", "kept")
	for _, name := range []string{"identity", "lifecycle", "credentials", e.Leader(), "nats-2", e.HostOf(s.Key())} {
		old := e.Member(name).Show()
		e.Member(name).Kill()
		eventually(t, time.Minute, func() error {
			m := e.Member(name).Show()
			if m.PID == 0 || m.PID == old.PID || m.State != "ready" && m.Service != "scheduler" {
				return fmt.Errorf("%s is %s with process %d, before it was %d", name, m.State, m.PID, old.PID)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		s, err := c.Open(ctx, sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()})
		cancel()
		if err != nil {
			t.Fatalf("after the end of %s: %v", name, err)
		}
		if got := content(t, s, "/root/f"); got != "kept" {
			t.Errorf("after the end of %s the file says %q", name, got)
		}
	}
}

// TestACutSchedulerDoesNotStopOpens: the leader cannot be reached by anybody; another one leads, and
// after healing there is one leader again.
func TestACutSchedulerDoesNotStopOpens(t *testing.T) {
	e := testenv.Cluster(t, "--driver", "null")
	c := e.Client("acme", "ann")
	open(t, c, sdk.OpenOptions{})
	old := e.Leader()
	e.Cut(old, "*")
	s := open(t, e.Client("acme", "bob"), sdk.OpenOptions{})
	if now := e.Leader(); now == old {
		t.Errorf("%s leads although nobody reaches it", old)
	}
	e.Heal("*", "*")
	if rec := e.Record(s.Key()); rec.GetHost() == "" {
		t.Errorf("the session that was opened meanwhile has no host: %v", rec)
	}
}
