package sdk_test

import (
	"errors"
	"io"
	"testing"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

// hasty logs in with attempts that are shorter than the fault.
func hasty(t *testing.T, srv *sdktest.Server, file string, attempt time.Duration) *sdk.Client {
	t.Helper()
	c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: file, Timeout: attempt, User: sdk.Token(srv.Token("acme", "ann"))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// admitted counts how often the session was asked for, as the platform saw it.
func admitted(t *testing.T, srv *sdktest.Server, key string) (n int) {
	t.Helper()
	op := hasty(t, srv, srv.OperatorFile(), 0)
	seq, err := op.Events(t.Context(), sdk.EventFilter{Session: key, Event: "admitted", Since: time.Hour, Stop: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range seq {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// Bus: an open fails because nobody answered for longer than one attempt takes.
func TestOpenOutlivesAServiceThatIsAway(t *testing.T) {
	srv := sdktest.Start(t)
	c := hasty(t, srv, srv.ClientFile("acme"), 50*time.Millisecond)
	if _, err := c.Status(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	back, err := srv.Away()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	var s *sdk.Session
	go func() {
		var err error
		s, err = c.Open(t.Context(), sdk.OpenOptions{})
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("it ended while nobody could answer: %v", err)
	case <-time.After(300 * time.Millisecond): // several attempts
	}
	if err := back(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if n := admitted(t, srv, s.Key()); n != 1 {
		t.Fatalf("the open was handled %d times", n)
	}
}

// Bus: an answer that was lost on the way makes a second session, or a failure.
func TestOpenIsHandledOnceWhenItsAnswerIsLost(t *testing.T) {
	srv := sdktest.Start(t)
	c := hasty(t, srv, srv.ClientFile("acme"), 200*time.Millisecond)
	if _, err := c.Status(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	srv.LoseAnswers(2)
	s, err := c.Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := admitted(t, srv, s.Key()); n != 1 || s.Origin() != sdk.Created {
		t.Fatalf("the open was handled %d times and found the session %s", n, s.Origin())
	}
}

// Scheduler: an operator's command fails while the leader is replaced.
func TestCallOutlivesAChangeOfLeader(t *testing.T) {
	srv := sdktest.Start(t)
	op := hasty(t, srv, srv.OperatorFile(), 0)
	srv.NotLeader(3)
	if err := op.Call(t.Context(), "scheduler", "hosts", &schedulerv1.HostsRequest{}, &schedulerv1.HostsReply{}); err != nil {
		t.Fatal(err)
	}
	srv.NotLeader(1000)
	impatient := hasty(t, srv, srv.OperatorFile(), 200*time.Millisecond)
	err := impatient.Call(t.Context(), "scheduler", "hosts", &schedulerv1.HostsRequest{}, &schedulerv1.HostsReply{})
	if err == nil || err.Error() != "scheduler hosts: this replica is not the leader" {
		t.Fatalf("got %v", err)
	}
}

// Bus: the node that is named first is gone.
func TestConnectTakesTheNodeThatLives(t *testing.T) {
	srv := sdktest.Start(t)
	f, err := sdk.ReadClientFile(srv.ClientFile("acme"))
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{"nats://127.0.0.1:1," + f.URL, f.URL + ", nats://127.0.0.1:1"} {
		c, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: srv.ClientFile("acme"), URL: url})
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
}

// Host lost: a call that a silent host never answers waits for its whole time, and says nothing.
func TestCallUnderWayEndsWhenTheHostIsLost(t *testing.T) {
	srv := sdktest.Start(t)
	c := hasty(t, srv, srv.ClientFile("acme"), time.Hour)
	s, err := c.Open(t.Context(), sdk.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	srv.Mute()
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context(), sdk.Command("true")) }()
	select {
	case err := <-ended:
		t.Fatalf("it ended before the host was lost: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	srv.LoseHost(s.Key())
	end := (*sdk.EndedError)(nil)
	if err := <-ended; !errors.As(err, &end) || !errors.Is(err, sdk.ErrStaleEpoch) || end.Event != "displaced" {
		t.Fatalf("it ended with %v", err)
	}
}

// Handoff: the end of an old placement ends what runs in the new one; the handoff is told twice.
func TestAnOldEndDoesNotEndANewPlacement(t *testing.T) {
	srv := sdktest.Start(t)
	c := srv.Client(t, "acme")
	told := make(chan sdk.Handoff, 16)
	s, err := c.Open(t.Context(), sdk.OpenOptions{User: sdk.Token(srv.Token("acme", "ann")), OnHandoff: func(h sdk.Handoff) { told <- h }})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		srv.LoseHost(s.Key())
		if err := s.Reopen(t.Context()); err != nil { // its event may come before or after
			t.Fatal(err)
		}
		in, feed := io.Pipe()
		out := make(chan string, 16)
		p, err := s.Exec(t.Context(), sdk.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: writer(func(b []byte) { out <- string(b) })})
		if err != nil {
			t.Fatal(err)
		}
		h := <-told // all events of the old placement have come
		if h.Epoch != s.Epoch() || h.To != s.Host() {
			t.Fatalf("told of %+v, at %s on %s", h, s.Epoch(), s.Host())
		}
		go func() { _, _ = io.WriteString(feed, "still here"); feed.Close() }()
		if got := <-out; got != "still here" {
			t.Fatalf("got %q", got)
		}
		if err := p.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if len(told) != 0 {
		t.Fatalf("a handoff was told twice: %+v", <-told)
	}
}

// Sleep: an event that overtakes the host's last frames hides what the host says of the end.
func TestTheHostsOwnWordComesFirst(t *testing.T) {
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	p, err := s.Exec(t.Context(), sdk.Command("sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	srv.Overtake()
	srv.Sleep(s.Key())
	unknown, end := (*sdk.UnknownExitError)(nil), (*sdk.EndedError)(nil)
	if err := p.Wait(); !errors.As(err, &unknown) || errors.As(err, &end) || unknown.Reason != "the session went to sleep" {
		t.Fatalf("it ended with %v", err)
	}
}

// Operations: the events of hosts, and the last placement of a session, cannot be read back.
func TestOperatorReadsWhatHappened(t *testing.T) {
	srv := sdktest.Start(t)
	c, s := open(t, srv)
	if _, err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	host := s.Host()
	srv.LoseHost(s.Key())
	srv.HandOver(s.Key())
	op := hasty(t, srv, srv.OperatorFile(), 0)
	var names []string
	for end := time.Now().Add(10 * time.Second); len(names) == 0 && time.Now().Before(end); { // it is stored a moment later
		seq, err := op.Events(t.Context(), sdk.EventFilter{Hosts: true, Since: time.Hour, Stop: true})
		if err != nil {
			t.Fatal(err)
		}
		for e, err := range seq {
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := e.Body.(*schedulerv1.HostEvent); !ok || e.Host != host || e.Time.IsZero() {
				t.Fatalf("the event is %+v", e)
			}
			names = append(names, e.Name)
		}
	}
	if len(names) != 1 || names[0] != "lost" {
		t.Fatalf("the events are %v", names)
	}
	last, err := op.LastEvent(t.Context(), "acme", s.Key(), "placed")
	if err != nil {
		t.Fatal(err)
	}
	if p := last.Body.(*schedulerv1.Event).GetPlaced(); p.GetHost() == host || p.GetPlan().GetHost() != p.GetHost() {
		t.Fatalf("the last placement is %v", p)
	}
	if _, err := op.LastEvent(t.Context(), "acme", s.Key(), "failed"); !errors.Is(err, sdk.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	if _, err := c.Events(t.Context(), sdk.EventFilter{Hosts: true}); !errors.Is(err, sdk.ErrDenied) {
		t.Fatalf("got %v", err)
	}
}
