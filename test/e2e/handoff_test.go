package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// handoffTime is enough for a lease to end and for a disk to come from the store on a busy machine.
const handoffTime = 90 * time.Second

// TestHandoff breaks one cluster in every way that has an owner change, one after the other; after
// each, all hosts are there again.
func TestHandoff(t *testing.T) {
	_, url := fileStore(t)
	e := testenv.Cluster(t, "--tiers", "container", "--config", diskFile(t, diskTerms{Store: url, CPU: fewCPU}))
	for _, s := range []struct {
		name string
		run  func(*testing.T, *testenv.Env)
	}{
		{"a leader killed in the middle of opens", leaderKilledWhileOpening},
		{"a cut shorter than the lease", shortCut},
		{"a machine ends", machineEnds},
		{"a cut longer than the lease", longCut},
		{"back before another host is active", backInTime},
		{"a drain", drained},
		{"a host is removed", removed}, // for good, so it is the last
	} {
		if !t.Run(s.name, func(t *testing.T) {
			shared := e.For(t)
			t.Cleanup(func() { told(t, shared) })
			s.run(t, shared)
		}) {
			return // what follows needs whole hosts
		}
	}
}

// told prints, after a failure, what happened as an operator sees it.
func told(t *testing.T, e *testenv.Env) {
	if !t.Failed() {
		return
	}
	for _, args := range [][]string{{"host", "list"}, {"scheduler", "peers"}, {"session", "list"}, {"tail", "--since", "3m", "--no-follow"}} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		cmd := exec.CommandContext(ctx, e.Bin, append(args, "--dir", e.Dir)...)
		out, err := cmd.CombinedOutput()
		cancel()
		t.Logf("berth %s (%v):\n%s", strings.Join(args, " "), err, out)
	}
}

// user is a session with somebody who listens.
type user struct {
	t        *testing.T
	e        *testenv.Env
	c        *sdk.Client
	s        *sdk.Session
	heard    *listener
	mu       sync.Mutex
	handoffs []sdk.Handoff
}

// newUser opens a session of its own, with a file that is saved and a newer one that is not.
func newUser(t *testing.T, e *testenv.Env, name string) (*user, sdk.Manifest) {
	t.Helper()
	u := &user{t: t, e: e, c: e.Client("acme", name)}
	u.s = open(t, u.c, sdk.OpenOptions{OnHandoff: func(h sdk.Handoff) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.handoffs = append(u.handoffs, h)
	}})
	t.Cleanup(func() { // the next scenario finds room
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := u.s.Delete(ctx); err != nil && !errors.Is(err, sdk.ErrNotFound) {
			t.Errorf("delete %s: %v", name, err)
		}
	})
	put(t, u.s, "/root/saved", name)
	m, err := u.s.Checkpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	put(t, u.s, "/root/newer", name)
	u.heard = listen(t, u.c, u.s.Key())
	return u, m
}

// beats starts a process that writes a line every 100 ms, and returns when it runs.
func (u *user) beats() *sdk.Process {
	u.t.Helper()
	p, err := u.s.Exec(u.t.Context(), sdk.Cmd{Args: []string{"sh", "-c", "while :; do echo x >> /root/beats; sleep 0.1; done"}})
	if err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(p.Detach)
	return p
}

// handedOver waits for the session to be awake again, from a host if it is known, and reads the event.
func (u *user) handedOver(from string) *schedulerv1.Active {
	u.t.Helper()
	var a *schedulerv1.Active
	eventually(u.t, handoffTime, func() error {
		if all := u.actives(); len(all) > 0 {
			a = all[0]
			return nil
		}
		return fmt.Errorf("no handoff was told; the events are %v", u.heard.names())
	})
	if from != "" && a.GetHost() != from && a.GetFromHost() != from {
		u.t.Errorf("handed over from %q, it was on %s", a.GetFromHost(), from)
	}
	return a
}

// actives are the events that tell a handoff.
func (u *user) actives() (all []*schedulerv1.Active) {
	u.heard.mu.Lock()
	defer u.heard.mu.Unlock()
	for _, ev := range u.heard.seen {
		if b, ok := ev.Body.(*schedulerv1.Event); ok && b.GetActive().GetCause() == corev1.Cause_CAUSE_HANDOFF {
			all = append(all, b.GetActive())
		}
	}
	return all
}

// endedByHandoff waits for a process of the old placement: its end is unknown, and why is said.
func endedByHandoff(t *testing.T, p *sdk.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(handoffTime):
		t.Fatal("the stream of a placement that is over does not end")
	}
	err := p.Wait()
	var unknown *sdk.UnknownExitError
	var ended *sdk.EndedError
	if !errors.As(err, &unknown) || !errors.As(err, &ended) {
		t.Errorf("the process ended with %v, want an unknown exit with the handoff as its cause", err)
		return
	}
	sentenceOf := ended.Reason
	if !ended.Handoff || !strings.Contains(sentenceOf, "handed over") {
		t.Errorf("the cause is %+v", ended)
	}
}

// processesOf are the processes in the sandboxes of one host.
func processesOf(e *testenv.Env, host string) []int {
	one := *e
	p := *e.Process
	p.Marks = e.Member(host).Show().Marks
	one.Process = &p
	return sandboxed(&one)
}

// alive waits until these hosts hold a lease.
func alive(t *testing.T, e *testenv.Env, hosts ...string) {
	t.Helper()
	eventually(t, handoffTime, func() error {
		text, err := e.CLI("host", "list")
		if err != nil {
			return err
		}
		for _, h := range hosts {
			if !strings.Contains(text, "\n"+h+"  alive") {
				return fmt.Errorf("%s is not alive:\n%s", h, text)
			}
		}
		return nil
	})
}

// others are the hosts but one.
func others(host string) []string {
	return slices.DeleteFunc([]string{"host-1", "host-2", "host-3"}, func(h string) bool { return h == host })
}

// only lets sessions be placed on one host.
func only(t *testing.T, e *testenv.Env, host string) (again func()) {
	t.Helper()
	for _, h := range others(host) {
		cli(t, e, "host", "drain", h)
	}
	return func() {
		t.Helper()
		for _, h := range others(host) {
			cli(t, e, "host", "resume", h)
		}
		alive(t, e, others(host)...)
	}
}

func cli(t *testing.T, e *testenv.Env, args ...string) string {
	t.Helper()
	out, err := e.CLI(args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// noDisk waits until a host has nothing of a session.
func noDisk(t *testing.T, e *testenv.Env, host, key string) {
	t.Helper()
	dir := e.Member(host).Dir()
	eventually(t, handoffTime, func() error {
		out, err := exec.CommandContext(t.Context(), "find", filepath.Join(dir, "disks", "sessions"), "-name", key+"*").CombinedOutput()
		if err != nil || len(out) > 0 {
			return fmt.Errorf("%s still has %s (%v)", host, out, err)
		}
		return nil
	})
}

// machineEnds: what was acknowledged as saved is awake elsewhere, everybody is told as of when, once,
// and the machine that comes back has nothing of it.
func machineEnds(t *testing.T, e *testenv.Env) {
	u, m := newUser(t, e, "ends")
	lost := e.HostOf(u.s.Key())
	p := u.beats()
	e.Member(lost).Crash()
	a := u.handedOver(lost)
	endedByHandoff(t, p)
	if off := a.GetRestoredAsOf().AsTime().Sub(m.TakenAt); a.GetHost() == lost || off < -time.Second || off > time.Second {
		t.Errorf("active on %s as of %s; the checkpoint is of %s", a.GetHost(), a.GetRestoredAsOf().AsTime(), m.TakenAt)
	}
	s := open(t, u.c, sdk.OpenOptions{})
	if saved, newer := content(t, s, "/root/saved"), content(t, s, "/root/newer"); saved != "ends" || newer != "-" {
		t.Errorf("saved %q, newer %q, want only what was saved", saved, newer)
	}
	if in := placeInside(t, s); in.Origin != "restored" || in.AsOf == nil || !in.AsOf.Equal(a.GetRestoredAsOf().AsTime()) {
		t.Errorf("session.json says %+v", in)
	}
	out := cli(t, e, "session", "explain", u.s.Key())
	for _, want := range []string{"why " + a.GetHost(), lost + "  may not", "It was last placed on " + a.GetHost()} {
		if !strings.Contains(out, want) {
			t.Errorf("explain does not say %q:\n%s", want, out)
		}
	}
	put(t, s, "/root/after", "ends")
	e.Member(lost).Restart()
	alive(t, e, lost)
	noDisk(t, e, lost, u.s.Key())
	if now := e.HostOf(u.s.Key()); now != a.GetHost() || content(t, s, "/root/after") != "ends" {
		t.Errorf("after the old host is back it is on %s, after: %q", now, content(t, s, "/root/after"))
	}
	if all := u.actives(); len(all) != 1 {
		t.Errorf("the handoff was told %d times: %v", len(all), u.heard.names())
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.handoffs) != 1 || u.handoffs[0].From != lost || u.handoffs[0].Origin != sdk.Restored {
		t.Errorf("the handle was told %+v", u.handoffs)
	}
}

// longCut: a host that nobody reaches has stopped its sandboxes before the session is placed elsewhere,
// and finds out when it is back.
func longCut(t *testing.T, e *testenv.Env) {
	u, _ := newUser(t, e, "cut")
	from := e.HostOf(u.s.Key())
	p := u.beats()
	if len(processesOf(e, from)) == 0 {
		t.Fatal("no process of the sandbox was found")
	}
	e.Cut(from, "*")
	u.heard.await(t, "displaced", nil)
	if left := processesOf(e, from); len(left) > 0 {
		t.Errorf("the session is given away while %v run on %s", left, from)
	}
	a := u.handedOver(from)
	endedByHandoff(t, p)
	if a.GetHost() == from || a.GetRestoredAsOf() == nil {
		t.Errorf("active on %s, restored as of %v", a.GetHost(), a.GetRestoredAsOf())
	}
	if err := u.s.Reopen(t.Context()); err != nil {
		t.Fatal(err)
	}
	put(t, u.s, "/root/after", "cut")
	e.Heal(from, "*")
	alive(t, e, from)
	noDisk(t, e, from, u.s.Key())
	if got := sh(t, u.s, "cat /root/saved /root/after; cat /root/newer 2>/dev/null || echo -"); got != "cutcut-" {
		t.Errorf("the files say %q", got)
	}
}

// shortCut: nothing happens to who is away for less than the lease.
func shortCut(t *testing.T, e *testenv.Env) {
	u, _ := newUser(t, e, "short")
	from, epoch := e.HostOf(u.s.Key()), u.s.Epoch()
	p := u.beats()
	e.Cut(from, "*")
	time.Sleep(time.Second) // its last renewal may be 3 s old, and it needs time to connect again
	e.Heal(from, "*")
	if got := sh(t, u.s, "a=$(wc -l < /root/beats); sleep 1; b=$(wc -l < /root/beats); test $b -gt $a && echo goes on"); got != "goes on" {
		t.Error("what ran before does not go on")
	}
	s := open(t, u.c, sdk.OpenOptions{})
	if names := u.heard.names(); s.Epoch() != epoch || slices.Contains(names, "displaced") {
		t.Errorf("epoch %s became %s; the events are %v", epoch, s.Epoch(), names)
	}
	select {
	case <-p.Done():
		t.Errorf("the stream ended with %v", p.Wait())
	default:
	}
}

// backInTime: no host can take what was awake on a lost one, until that one is back; the session wakes
// there with its newest files, also those that were never saved.
func backInTime(t *testing.T, e *testenv.Env) {
	u, _ := newUser(t, e, "back")
	from := e.HostOf(u.s.Key())
	again := only(t, e, from)
	e.Cut(from, "*")
	u.heard.await(t, "displaced", nil)
	if state := show(t, e, u.s.Key()).State; state == string(sdk.Active) {
		t.Errorf("with nobody to take it, it is %s", state)
	}
	e.Heal(from, "*")
	a := u.handedOver(from)
	if a.GetHost() != from || a.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
		t.Errorf("active on %s, %s", a.GetHost(), a.GetOrigin())
	}
	s := open(t, u.c, sdk.OpenOptions{})
	if got := sh(t, s, "cat /root/saved /root/newer"); got != "backback" {
		t.Errorf("the files say %q", got)
	}
	again()
}

// drained: a sleeping session moves at once, an idle one at once with all of its files, a busy one at
// the deadline with all of its files.
func drained(t *testing.T, e *testenv.Env) {
	const host = "host-2"
	again := only(t, e, host)
	all := map[string]*user{}
	for _, name := range []string{"sleeping", "idle", "busy"} {
		all[name], _ = newUser(t, e, name)
		if on := e.HostOf(all[name].s.Key()); on != host {
			t.Fatalf("%s is on %s, while only %s takes any", name, on, host)
		}
	}
	if err := all["sleeping"].s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	p := all["busy"].beats()
	again()
	out := cli(t, e, "host", "drain", host, "--within", "15s", "--wait")
	if !strings.Contains(out, "is drained") {
		t.Errorf("drain says:\n%s", out)
	}
	for _, name := range []string{"idle", "busy"} {
		if a := all[name].handedOver(host); a.GetHost() == host || a.GetOrigin() != corev1.Origin_ORIGIN_RESUMED {
			t.Errorf("%s: active on %s, %s", name, a.GetHost(), a.GetOrigin())
		}
	}
	endedByHandoff(t, p)
	for name, u := range all {
		s := open(t, u.c, sdk.OpenOptions{})
		if on := e.HostOf(u.s.Key()); on == host {
			t.Errorf("%s is on the host that is drained", name)
		}
		if got := sh(t, s, "cat /root/saved /root/newer"); got != name+name {
			t.Errorf("%s: the files say %q", name, got)
		}
		u.s = s
	}
	if got := sh(t, all["busy"].s, "wc -l < /root/beats"); len(got) < 2 {
		t.Errorf("busy wrote %s lines until the deadline", got)
	}
	cli(t, e, "host", "resume", host)
	alive(t, e, host)
}

// removed: refused while it is there with sessions; refused for files that only it has; then they are
// given up, and the host never joins again.
func removed(t *testing.T, e *testenv.Env) {
	const host = "host-3"
	again := only(t, e, host)
	saved, _ := newUser(t, e, "kept")
	never := open(t, e.Client("acme", "never"), sdk.OpenOptions{})
	put(t, never, "/root/f", "x")
	if out, err := e.CLI("host", "remove", host, "--yes", "--lose-unsaved"); err == nil || !strings.Contains(err.Error(), "drain") {
		t.Errorf("a host with awake sessions is removed: %v\n%s", err, out)
	}
	e.Member(host).Crash()
	saved.heard.await(t, "displaced", nil)
	out, err := e.CLI("host", "remove", host, "--yes")
	if err == nil || !strings.Contains(err.Error()+out, "lose-unsaved") {
		t.Errorf("a host that alone has files is removed: %v\n%s", err, out)
	}
	cli(t, e, "host", "remove", host, "--yes", "--lose-unsaved")
	e.Member(host).Gone()
	again()
	saved.handedOver("") // the host is known to nobody any more
	s := open(t, saved.c, sdk.OpenOptions{})
	if got := content(t, s, "/root/saved"); got != "kept" {
		t.Errorf("saved says %q", got)
	}
	if now := show(t, e, never.Key()); now.State != string(sdk.Failed) || now.Failure.Kind != "data_loss" {
		t.Errorf("what was never saved is %+v", now)
	}
	if out := cli(t, e, "host", "list"); strings.Contains(out, host) {
		t.Errorf("it is still listed:\n%s", out)
	}
}

// leaderKilledWhileOpening: whoever opens waits for the next leader and knows nothing of it.
func leaderKilledWhileOpening(t *testing.T, e *testenv.Env) {
	for i := range 3 {
		c := e.Client("acme", fmt.Sprintf("opener-%d", i))
		t.Cleanup(func() { e.ForgetAll(t) })
		leader := e.Member(e.Leader())
		kill := time.AfterFunc(time.Duration(rand.IntN(600))*time.Millisecond, leader.Kill)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		s, err := c.Open(ctx, sdk.OpenOptions{Risk: sdk.OwnCode()})
		cancel()
		kill.Stop()
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		put(t, s, "/root/f", "x")
		if got := content(t, s, "/root/f"); got != "x" {
			t.Errorf("round %d: the file says %q", i, got)
		}
	}
	eventually(t, time.Minute, func() error {
		for _, m := range e.Members() {
			if m.PID == 0 {
				return fmt.Errorf("%s does not run", m.Name)
			}
		}
		return nil
	})
}
