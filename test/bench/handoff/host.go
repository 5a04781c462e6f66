package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/residue"
)

// leaseEnd is when a host counts as lost: the lease and the drift, as configured by default.
const leaseEnd = 10 * time.Second

// small lets many sessions fit on a part of this machine.
const small = `
lifecycle:
  policy:
    templates:
      default:
        image: default
        tier: container
        limits: {cpu_millis: 50, memory_bytes: 67108864, pids: 128, disk_bytes: 67108864}
`

// host kills a whole host, hostagent, containerd and sandboxes, with awake
// sessions on it, and follows each of them until its user can work again.
func (b *bench) host(ctx context.Context) error {
	note("starting a cluster (containers)")
	policy, err := os.CreateTemp("", "berth-bench-*.yaml")
	if err != nil {
		return err
	}
	defer os.Remove(policy.Name())
	if _, err := policy.WriteString(small); err != nil {
		return err
	}
	policy.Close()
	store, err := os.MkdirTemp("", "berth-bench-store-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(store)
	c, err := b.start(ctx, "--config", policy.Name(), "--store", "file://"+store)
	if err != nil {
		return err
	}
	defer c.stop()
	cold, names, err := b.populate(ctx, c)
	if err != nil {
		return err
	}
	err = b.lose(ctx, c, names, cold)
	// A host that was killed cleans up after itself when it is back.
	return errors.Join(err, c.act(context.WithoutCancel(ctx), control.Restart, "host-1"))
}

// populate opens every session on host-1, writes to it and has it saved.
func (b *bench) populate(ctx context.Context, c *cell) (cold []time.Duration, names []string, err error) {
	for _, h := range []string{"host-2", "host-3"} {
		if err := c.berth(ctx, "host", "drain", h); err != nil {
			return nil, nil, err
		}
	}
	note("opening %d sessions on host-1", b.sessions)
	for i := range b.sessions {
		name := fmt.Sprintf("s%d", i)
		began := time.Now()
		s, err := c.client.Open(ctx, sdk.OpenOptions{Name: name, Risk: sdk.OwnCode()})
		if err == nil {
			_, err = s.Output(ctx, "sh", "-c", "echo "+name+" >mine; sync")
			cold = append(cold, time.Since(began))
		}
		if err == nil {
			_, err = s.Checkpoint(ctx)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("session %s: %w", name, err)
		}
		s.Detach()
		names = append(names, name)
	}
	for _, h := range []string{"host-2", "host-3"} {
		if err := c.berth(ctx, "host", "resume", h); err != nil {
			return nil, nil, err
		}
	}
	h, err := c.host(ctx, "host-1")
	if err == nil && int(h.GetActive()) != b.sessions {
		err = fmt.Errorf("%d of %d sessions are on host-1", h.GetActive(), b.sessions)
	}
	return cold, names, err
}

// moved is when what happened to one session.
type moved struct{ placed, active, usable time.Duration }

// lose kills host-1 and follows its sessions.
func (b *bench) lose(ctx context.Context, c *cell, names []string, cold []time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	events, err := c.operator.Events(ctx, sdk.EventFilter{})
	if err != nil {
		return err
	}
	hosts, err := c.operator.Events(ctx, sdk.EventFilter{Hosts: true, Event: "lost"})
	if err != nil {
		return err
	}
	lost := make(chan time.Time, 1)
	go func() {
		for e, err := range hosts {
			if h, ok := e.Body.(*schedulerv1.HostEvent); err == nil && ok && h.GetHost() == "host-1" {
				lost <- h.GetAt().AsTime()
				return
			}
		}
	}()
	note("killing host-1")
	began := time.Now()
	if err := c.killHost(ctx, "host-1"); err != nil {
		return err
	}
	f := &follower{c: c, began: began, want: len(names), sessions: map[string]moved{}}
	if err := f.follow(ctx, events); err != nil {
		return err
	}
	select {
	case at := <-lost:
		b.lossFigures(at.Sub(began), slices.Collect(values(f.sessions)), cold)
		return nil
	case <-ctx.Done():
		return errors.New("host-1 was never told lost")
	}
}

// killHost ends everything of a host at once; nothing of it is started again.
func (c *cell) killHost(ctx context.Context, name string) error {
	all, err := c.members.Members(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(m control.Member) bool { return m.Name == name })
	if i < 0 {
		return fmt.Errorf("there is no member %s", name)
	}
	if err := c.act(ctx, control.Hold, name); err != nil {
		return err
	}
	for range 3 { // what a shim starts while it is looked for
		for _, p := range residue.Take().About(all[i].Marks...).Processes { // "process 123 ..."
			if pid, err := strconv.Atoi(strings.Fields(p)[1]); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
			}
		}
	}
	return nil
}

// follower has each session used as soon as it is active again.
type follower struct {
	c     *cell
	began time.Time
	want  int

	mu       sync.Mutex
	sessions map[string]moved
	first    error
}

func (f *follower) follow(ctx context.Context, events func(func(sdk.Event, error) bool)) error {
	names, err := f.c.keys(ctx)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	active := 0
	for e, err := range events {
		if err != nil {
			return err
		}
		body, ok := e.Body.(*schedulerv1.Event)
		if !ok || names[e.Session] == "" {
			continue
		}
		at := body.GetAt().AsTime().Sub(f.began)
		switch {
		case body.GetPlaced() != nil:
			f.note(e.Session, func(m *moved) { m.placed = at })
		case body.GetActive() != nil && body.GetActive().GetCause() == corev1.Cause_CAUSE_HANDOFF:
			f.note(e.Session, func(m *moved) { m.active = at })
			wg.Go(func() { f.use(ctx, e.Session, names[e.Session]) })
			active++
		}
		if active == f.want {
			break
		}
	}
	wg.Wait()
	if active < f.want {
		return fmt.Errorf("%d of %d sessions came back", active, f.want)
	}
	return f.first
}

func (f *follower) note(key string, set func(*moved)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.sessions[key]
	set(&m)
	f.sessions[key] = m
}

// use joins the session and looks whether the user's file is there.
func (f *follower) use(ctx context.Context, key, name string) {
	s, err := f.c.client.Open(ctx, sdk.OpenOptions{Name: name, Risk: sdk.OwnCode()})
	if err == nil {
		var out []byte
		if out, err = s.Output(ctx, "cat", "mine"); err == nil && string(out) != name+"\n" {
			err = fmt.Errorf("session %s has %q in its file", name, out)
		}
		s.Detach()
	}
	at := time.Since(f.began)
	f.note(key, func(m *moved) { m.usable = at })
	if err != nil {
		f.mu.Lock()
		f.first = errors.Join(f.first, err)
		f.mu.Unlock()
	}
}

// keys are the names of sessions by their keys.
func (c *cell) keys(ctx context.Context) (map[string]string, error) {
	out := map[string]string{}
	for after := ""; ; {
		var page schedulerv1.ListReply
		if err := c.operator.Call(ctx, "scheduler", "list", &schedulerv1.ListRequest{After: after}, &page); err != nil {
			return nil, err
		}
		for _, r := range page.GetRecords() {
			out[r.GetSession().GetSession()] = r.GetSessionName()
		}
		if after = page.GetNext(); after == "" {
			return out, nil
		}
	}
}

func values(m map[string]moved) func(func(moved) bool) {
	return func(yield func(moved) bool) {
		for _, v := range m {
			if !yield(v) {
				return
			}
		}
	}
}

func (b *bench) lossFigures(detected time.Duration, all []moved, cold []time.Duration) {
	part := func(of func(moved) time.Duration) (d []time.Duration) {
		for _, m := range all {
			d = append(d, of(m))
		}
		slices.Sort(d)
		return d
	}
	usable := part(func(m moved) time.Duration { return m.usable })
	decided := part(func(m moved) time.Duration { return m.placed - detected })
	restored := part(func(m moved) time.Duration { return m.active - m.placed })
	open := figures.Quantile(cold, 0.5)
	add := func(name string, d time.Duration, floor float64, of string) {
		b.set.Add(figures.Result{Name: fmt.Sprintf("host killed, %d awake: %s", len(all), name), Value: ms(d), Unit: "ms", Floor: floor, FloorOf: of}, figures.None)
	}
	const lease, one = "the end of the lease: 9 s, and 1 s for drift", "cold open to first output of one session, p50 of this run"
	add("detection", detected, ms(leaseEnd), lease)
	add("decision, first session", decided[0], 0, "")
	add("decision, last session (at most 8 at once)", decided[len(decided)-1], open*float64(len(all)), "as many cold opens one after the other")
	add("restore, p50", restored[len(restored)/2], open, one)
	add("restore, worst", restored[len(restored)-1], open, one)
	add("first session usable again", usable[0], ms(leaseEnd), lease)
	add("last session usable again", usable[len(usable)-1], ms(leaseEnd)+open*float64(len(all)), "the end of the lease and as many cold opens one after the other")
}
