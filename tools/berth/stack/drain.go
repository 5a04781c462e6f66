package stack

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

const (
	drainTime = 45 * time.Second
	drainers  = 4
	// drainPause is between two rounds of a drain.
	drainPause = 250 * time.Millisecond
	// stopping is no drain of a host: such a session is not to wake elsewhere.
	stopping = "stop"
)

// drain puts sessions to sleep until none is awake.
func (s *stack) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	conn, err := s.bus.Connect(ctx, subjects.Service("lifecycle"))
	if err != nil {
		s.log.Warn("sessions stay awake", "error", err)
		return
	}
	defer conn.Close()
	Drain(ctx, conn, s.log)
}

// Drain puts every awake session to sleep, as lifecycle would and with its login, so that an
// orderly stop leaves no compute. What does not sleep in time is adopted, or
// woken with its newest files, at the next start.
func Drain(ctx context.Context, conn *bus.Conn, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	d := drainer{log: log, pause: drainPause, warned: map[string]bool{},
		list: func(ctx context.Context) ([]*schedulerv1.SessionRecord, error) { return listed(ctx, conn) },
		sleep: func(ctx context.Context, ref *corev1.SessionRef) error {
			_, err := bus.Invoke[*schedulerv1.SleepReply](ctx, conn, "scheduler", "sleep", &schedulerv1.SleepRequest{
				Tenant: ref.GetTenant(), Session: ref.GetSession(), Generation: ref.GetGeneration(), Epoch: ref.GetEpoch(), Reason: stopping})
			return err
		}}
	d.run(ctx)
}

// drainer goes in rounds: what comes free when a session sleeps is given at once to an open or a
// handoff that waits, and that one is to sleep too.
type drainer struct {
	log    *slog.Logger
	pause  time.Duration
	list   func(context.Context) ([]*schedulerv1.SessionRecord, error)
	sleep  func(context.Context, *corev1.SessionRef) error
	warned map[string]bool // sessions whose failure was said
}

// run returns when nothing was awake or on the way in two looks one after the other, or ctx ends: a
// handoff that waits is placed a moment after there is room.
func (d *drainer) run(ctx context.Context) {
	for calm := 0; ; {
		active, moving, err := d.look(ctx)
		switch {
		case ctx.Err() != nil:
			d.log.Warn("sessions stay awake: the time for putting them to sleep is over")
			return
		case err != nil:
			d.log.Warn("sessions stay awake", "error", err)
			return
		case len(active)+moving > 0:
			calm = 0
		default:
			if calm++; calm >= 2 {
				return
			}
		}
		d.round(ctx, active)
		select {
		case <-ctx.Done():
		case <-time.After(d.pause):
		}
	}
}

// look lists the sessions that can be put to sleep, and counts those that wake or go to sleep.
func (d *drainer) look(ctx context.Context) (active []*corev1.SessionRef, moving int, err error) {
	all, err := d.list(ctx)
	for _, r := range all {
		switch r.GetState() {
		case corev1.State_STATE_ACTIVE:
			active = append(active, r.GetSession())
		case corev1.State_STATE_WAKING, corev1.State_STATE_SLEEPING:
			if r.GetHost() != "" { // else there is no room for it, and nothing of it is anywhere
				moving++
			}
		}
	}
	return active, moving, err
}

// round puts sessions to sleep, a few at a time.
func (d *drainer) round(ctx context.Context, active []*corev1.SessionRef) {
	work := make(chan *corev1.SessionRef, len(active))
	for _, ref := range active {
		work <- ref
	}
	close(work)
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range drainers {
		wg.Go(func() {
			for ref := range work {
				err := d.sleep(ctx, ref)
				mu.Lock()
				if err != nil && !d.warned[ref.GetSession()] {
					d.warned[ref.GetSession()] = true
					d.log.Warn("session stays awake", "session", ref.GetSession(), "error", err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func listed(ctx context.Context, conn *bus.Conn) (all []*schedulerv1.SessionRecord, err error) {
	for after := ""; ; {
		page, err := bus.Invoke[*schedulerv1.ListReply](ctx, conn, "scheduler", "list", &schedulerv1.ListRequest{After: after, Limit: 500})
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetRecords()...)
		if after = page.GetNext(); after == "" {
			return all, nil
		}
	}
}
