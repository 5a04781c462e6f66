package sdktest

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

// Fault, exec: a lost host says nothing, so a stream hangs for ever, or an exit code is invented.
func (c *check) handoffEndsStreams() {
	told := make(chan sdk.Handoff, 16)
	s := c.open(sdk.OpenOptions{OnHandoff: func(h sdk.Handoff) { told <- h }})
	_, err := s.Files().Write(c.ctx, c.Dir+"/saved", strings.NewReader("saved"), sdk.WriteOptions{})
	c.must(err)
	m, err := s.Checkpoint(c.ctx)
	c.must(err)
	in, feed := io.Pipe()
	defer feed.Close()
	var out lockedBuffer
	p, err := s.Exec(c.ctx, sdk.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: &out, Key: "lost-with-its-host"})
	c.must(err)
	_, err = io.WriteString(feed, "here\n")
	c.must(err)
	c.await(&out, "here\n")
	host, epoch := s.Host(), s.Epoch()
	handOver := c.LoseHost(s.Key())

	err = p.Wait()
	unknown, end := (*sdk.UnknownExitError)(nil), (*sdk.EndedError)(nil)
	if !errors.As(err, &unknown) || !errors.As(err, &end) || !errors.Is(err, sdk.ErrStaleEpoch) {
		c.Fatalf("the process ended with %v", err)
	}
	if end.Epoch != epoch || !strings.Contains(unknown.Reason, end.Reason) || end.Reason == "" {
		c.Fatalf("the cause is %+v, the reason %q", end, unknown.Reason)
	}
	if end.Event == "displaced" && (end.Host != host || !end.Handoff) {
		c.Fatalf("the cause is %+v", end)
	}
	c.is(s.Run(c.ctx, sdk.Command("true")), sdk.ErrStaleEpoch)
	handOver()
	select {
	case h := <-told:
		if h.From != host || h.To == host || h.To == "" || h.Epoch == epoch || h.Origin != sdk.Restored || h.RestoredAsOf.Before(m.TakenAt.Add(-time.Second)) {
			c.Fatalf("the handoff is told as %+v; the snapshot was taken at %s", h, m.TakenAt)
		}
	case <-c.ctx.Done():
		c.Fatal("nobody told of the handoff")
	}
	c.must(s.Reopen(c.ctx))
	b, err := s.Files().ReadAll(c.ctx, c.Dir+"/saved")
	c.must(err)
	c.equal(string(b), "saved")
	_, err = s.Attach(c.ctx, "lost-with-its-host", sdk.AttachOptions{})
	c.is(err, sdk.ErrNotFound) // no process came along
}

// Fault, files: a watch, a read or a write on a lost host hangs.
func (c *check) handoffEndsTransfers() {
	s := c.open(sdk.OpenOptions{})
	_, err := s.Checkpoint(c.ctx)
	c.must(err)
	src, feed := io.Pipe()
	defer feed.Close()
	written := make(chan error, 1)
	go func() {
		_, err := s.Files().Write(c.ctx, c.Dir+"/half", src, sdk.WriteOptions{})
		written <- err
	}()
	_, err = feed.Write(make([]byte, 200<<10)) // more than a frame: the stream is open
	c.must(err)
	watched := make(chan error, 1)
	if !c.Lacks["watch"] {
		seq, err := s.Files().Watch(c.ctx, c.Dir, false)
		c.must(err)
		go func() {
			for _, err := range seq {
				if err != nil {
					watched <- err
				}
			}
		}()
	} else {
		watched <- sdk.ErrStaleEpoch
	}
	handOver := c.LoseHost(s.Key())
	defer handOver()
	for _, ch := range []chan error{written, watched} {
		select {
		case err := <-ch:
			c.is(err, sdk.ErrStaleEpoch)
		case <-c.ctx.Done():
			c.Fatal("a transfer hangs after its host was lost")
		}
	}
}

// Fault, handoff: an open meanwhile makes a second wake, or is refused.
func (c *check) openDuringHandoffJoinsIt() {
	u := c.User("ann")
	s := c.open(sdk.OpenOptions{User: u})
	m, err := s.Checkpoint(c.ctx)
	c.must(err)
	host := s.Host()
	next, stop := c.follow(sdk.EventFilter{Session: s.Key()})
	defer stop()
	handOver := c.LoseHost(s.Key())
	defer handOver()
	for next().Name != "displaced" {
	}
	again, err := c.Client.Open(c.ctx, sdk.OpenOptions{User: u, Wait: time.Minute})
	c.must(err)
	defer again.Detach()
	c.must(again.Run(c.ctx, sdk.Command("true")))
	if again.Host() == host || again.Generation() != s.Generation() {
		c.Fatalf("it was opened on %s in generation %s", again.Host(), again.Generation())
	}
	switch again.Origin() {
	case sdk.Restored:
		if again.RestoredAsOf().Before(m.TakenAt.Add(-time.Second)) {
			c.Fatalf("restored as of %s; the snapshot was taken at %s", again.RestoredAsOf(), m.TakenAt)
		}
	case sdk.Joined: // the handoff was quicker
	default:
		c.Fatalf("the open found the session %s", again.Origin())
	}
	handOver() // nothing is left to hand over
	c.must(again.Run(c.ctx, sdk.Command("true")))
	third, err := c.Client.Open(c.ctx, sdk.OpenOptions{User: u})
	c.must(err)
	defer third.Detach()
	c.equal(third.Origin(), sdk.Joined)
	c.equal(third.Epoch(), again.Epoch())
}

// Fault, sleep: a stream hangs when its session fell asleep under it.
func (c *check) sleepEndsStreams() {
	u := c.User("ann")
	s := c.open(sdk.OpenOptions{User: u})
	p, err := s.Exec(c.ctx, sdk.Command("sleep", "100"))
	c.must(err)
	c.must(c.Client.CloseSession(c.ctx, sdk.UserSession{User: u}))
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	select {
	case err := <-ended:
		exit, unknown := (*sdk.ExitError)(nil), (*sdk.UnknownExitError)(nil)
		if !errors.As(err, &unknown) && (!errors.As(err, &exit) || exit.Signal == "") {
			c.Fatalf("it ended with %v", err)
		}
	case <-c.ctx.Done():
		c.Fatal("the stream hangs after the session fell asleep")
	}
}

// Fault, operations: what a host has, and how long it is safe, cannot be seen.
func (c *check) hostsSayWhatTheyHave() {
	s := c.open(sdk.OpenOptions{})
	out := &schedulerv1.HostsReply{}
	ctx, cancel := context.WithTimeout(c.ctx, 20*time.Second)
	defer cancel()
	c.must(c.Operator.Call(ctx, "scheduler", "hosts", &schedulerv1.HostsRequest{}, out))
	for _, h := range out.GetHosts() {
		if h.GetHost() != s.Host() {
			continue
		}
		if !h.GetAlive() || h.GetLost() || h.GetDraining() || h.GetSessions() == 0 || h.GetActive() == 0 ||
			h.GetUsed().GetMemoryBytes() == 0 || h.GetCapacity().GetMemoryBytes() < h.GetUsed().GetMemoryBytes() || h.GetLeaseLeft().AsDuration() <= 0 {
			c.Fatalf("the host of an awake session says %v", h)
		}
		return
	}
	c.Fatalf("the host %s is not listed", s.Host())
}
