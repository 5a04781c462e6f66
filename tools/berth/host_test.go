package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// awake opens the user's default session and saves it.
func (w *world) awake() openOut {
	w.t.Helper()
	var open openOut
	w.json(&open, "session", "open")
	s, err := w.srv.Client(w.t, "acme").Open(w.t.Context(), sdk.OpenOptions{User: sdk.Token(w.token)})
	if err != nil {
		w.t.Fatal(err)
	}
	defer s.Detach()
	if _, err := s.Checkpoint(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	return open
}

// told calls then once something was said.
type told struct {
	bytes.Buffer
	then func()
}

func (w *told) Write(b []byte) (int, error) {
	defer w.then()
	return w.Buffer.Write(b)
}

// Drain: an operator cannot tell how far it is, or waits for ever.
func TestDrainSaysHowFarItIs(t *testing.T) {
	w := start(t)
	open := w.awake()
	began, end := make(chan struct{}), make(chan struct{})
	w.srv.Register("busy", func(ctx context.Context, p *sdktest.Proc) int {
		close(began)
		<-ctx.Done()
		return 0
	})
	go func() { defer close(end); w.berth("", "exec", "--", "busy") }()
	<-began
	out := w.ok("host", "drain", open.Host, "--within", "5m")
	if !strings.Contains(out, "0 sleeping to move, 1 awake") || !strings.Contains(out, "at the latest until") {
		t.Errorf("%s", out)
	}
	if out := w.ok("host", "list"); !strings.Contains(out, "draining") {
		t.Errorf("%s", out)
	}
	var drained bytes.Buffer
	say := &told{then: func() { w.srv.Sleep(open.Session) }}
	code := run(&app{ctx: t.Context(), stdin: strings.NewReader(""), stdout: &drained, stderr: say}, []string{"host", "drain", open.Host, "--wait"})
	if code != 0 || !strings.Contains(drained.String(), "is drained") || !strings.Contains(say.String(), "1 awake") {
		t.Errorf("exit %d, %s, %s", code, &drained, say)
	}
	<-end
	var show showOut
	w.json(&show, "session", "show")
	if show.Host == open.Host || show.State != "active" {
		t.Errorf("%+v", show)
	}
	var h hostOut
	w.json(&h, "host", "resume", open.Host)
	if h.State != "alive" || h.Draining {
		t.Errorf("%+v", h)
	}
	w.json(&h, "host", "show", open.Host)
	if h.State != "alive" || h.LeaseLeftMS <= 0 || h.Capacity.MemoryBytes == 0 {
		t.Errorf("%+v", h)
	}
	if out := w.ok("tail", "--hosts", "--since", "1h", "--no-follow"); !strings.Contains(out, "drained") || !strings.Contains(out, "takes sessions again") {
		t.Errorf("%s", out)
	}
}

// Remove: what is on the host alone is lost without a word.
func TestRemoveSaysWhatIsLost(t *testing.T) {
	w := start(t)
	open := w.awake()
	if _, say, code := w.berth("", "host", "remove", open.Host, "--yes"); code != 1 || !strings.Contains(say, "drain it first") {
		t.Errorf("exit %d, %q", code, say)
	}
	w.srv.LoseHost(open.Session)
	_, say, code := w.berth("", "host", "remove", open.Host, "--yes")
	if code != 1 || !strings.Contains(say, "--lose-unsaved") || !strings.Contains(say, open.Session) || !strings.Contains(say, "goes back to its last snapshot") {
		t.Errorf("exit %d, %q", code, say)
	}
	if _, say, code = w.berth(open.Host+"\n", "host", "remove", open.Host, "--lose-unsaved"); code != 2 || !strings.Contains(say, "--yes") {
		t.Errorf("exit %d, %q", code, say) // no terminal: nobody is asked
	}
	out, say, code := w.berth("", "host", "remove", open.Host, "--lose-unsaved", "--yes")
	if code != 0 || !strings.Contains(out, "removed for good") || !strings.Contains(out, open.Session) {
		t.Errorf("exit %d, %s, %s", code, out, say)
	}
	for _, args := range [][]string{{"host", "show", open.Host}, {"host", "drain", open.Host}, {"host", "remove", open.Host}, {"host", "show", "no-such"}} {
		if _, say, code := w.berth("", args...); code != 1 || strings.Count(say, "\n") != 1 {
			t.Errorf("%v: exit %d, %q", args, code, say)
		}
	}
	for _, verb := range []string{"show", "drain", "resume", "remove"} {
		if _, say, code := w.berth("", "host", verb, "nosuch"); code != 1 || say != "berth: there is no host nosuch\n" {
			t.Errorf("host %s of a host that is not there: exit %d, %q", verb, code, say)
		}
	}
	for _, args := range [][]string{{"host", "drain", "A.B"}, {"host", "drain", "h1", "--within", "-1s"}, {"host", "drain"}, {"tail", "--hosts", "--tenant", "acme"}} {
		if _, say, code := w.berth("", args...); code != 2 || strings.Count(say, "\n") != 1 {
			t.Errorf("%v: exit %d, %q", args, code, say)
		}
	}
}

// Explain: why one session is where it is, and waits, cannot be found out.
func TestExplainTellsTheHandoff(t *testing.T) {
	w := start(t)
	open := w.awake()
	if out := w.ok("session", "explain"); !strings.Contains(out, "It is awake on "+open.Host) || !strings.Contains(out, "its disk is here") || !strings.Contains(out, "the longest step was") {
		t.Errorf("%s", out)
	}
	w.srv.LoseHost(open.Session)
	var x explainOut
	w.json(&x, "session", "explain", open.Session)
	if x.HandoffFrom != open.Host || x.NewestHost != open.Host || !x.Unsaved || x.Waiting == "" {
		t.Errorf("%+v", x)
	}
	if x.Placed == nil || x.Placed.Host != open.Host || x.Now == nil || x.Now.Host == open.Host || x.Now.Rows[1].Refused == "" {
		t.Errorf("%+v, %+v", x.Placed, x.Now)
	}
	if out := w.ok("session", "list"); !strings.Contains(out, "handed over from "+open.Host) {
		t.Errorf("%s", out)
	}
	w.srv.HandOver(open.Session)
	if out := w.ok("tail", "--since", "1h", "--no-follow"); !strings.Contains(out, "handed over from "+open.Host+": restored as of") {
		t.Errorf("%s", out)
	}
	if out := w.ok("session", "explain"); !strings.Contains(out, "brought back its files as of") {
		t.Errorf("%s", out)
	}
	if _, say, code := w.berth("", "session", "explain", "nosuch"); code != 1 || strings.Count(say, "\n") != 1 {
		t.Errorf("exit %d, %q", code, say)
	}
}

// Explain: a session that cannot wake is said to wake, and a host that is about to be lost looks well.
func TestExplainTellsOfTheHostThatIsNeeded(t *testing.T) {
	x := func(state, manifest string, h hostOut) string {
		o := explainOut{showOut: showOut{sessionOut: sessionOut{State: state, Host: "h1", Unsaved: true, NewestHost: "h1"}, Manifest: manifest}, at: &h}
		return strings.Join(summary(o), "\n")
	}
	lost := hostOut{Host: "h1", State: "lost", Lost: true}
	low, well := hostOut{Host: "h1", State: "alive", Alive: true, LeaseLeftMS: 3200}, hostOut{Host: "h1", State: "alive", Alive: true, LeaseLeftMS: 6100}
	for _, c := range []struct{ got, want, not string }{
		{x("asleep", "", lost), "it can wake only once h1 is back", "its next open wakes it"},
		{x("asleep", "m1", lost), "its next open wakes it", "only once"},
		{x("asleep", "", lost), "Host h1 is lost", "runs down"},
		{x("active", "m1", low), "The lease of host h1 runs down: 3.2 s", "is lost:"},
		{x("active", "m1", well), "It is awake on h1", "lease"},
	} {
		if !strings.Contains(c.got, c.want) || strings.Contains(c.got, c.not) {
			t.Errorf("%q is missing or %q is there:\n%s", c.want, c.not, c.got)
		}
	}
}

// Scheduler: replicas cannot be added, or a slip removes the last one.
func TestReplicas(t *testing.T) {
	w := start(t)
	var p peersOut
	w.json(&p, "scheduler", "peers")
	if len(p.Peers) != 1 || !p.Peers[0].Leader {
		t.Fatalf("%+v", p)
	}
	if _, say, code := w.berth("", "scheduler", "leave", p.Peers[0].ID); code != 1 || !strings.Contains(say, "last replica") {
		t.Errorf("exit %d, %q", code, say)
	}
	w.json(&p, "scheduler", "join", "scheduler-2", "127.0.0.1:7802")
	if len(p.Peers) != 2 {
		t.Errorf("%+v", p)
	}
	if out := w.ok("scheduler", "transfer", "scheduler-2"); !strings.Contains(out, "scheduler-2  leader") {
		t.Errorf("%s", out)
	}
	w.ok("scheduler", "transfer")
	w.ok("scheduler", "leave", "scheduler-1")
	if _, say, code := w.berth("", "scheduler", "leave", "nosuch"); code != 1 || say != "berth: there is no replica nosuch in the group\n" {
		t.Errorf("a replica that is not there: exit %d, %q", code, say)
	}
	for _, args := range [][]string{{"join", "scheduler-3"}, {"join", "scheduler-3", "here"}, {"join", "A B", "h:1"}, {"join", "x", "h:0"}, {"leave"}, {"transfer", "A.B"}} {
		if _, say, code := w.berth("", append([]string{"scheduler"}, args...)...); code != 2 || strings.Count(say, "\n") != 1 {
			t.Errorf("%v: exit %d, %q", args, code, say)
		}
	}
}
