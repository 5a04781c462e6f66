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
	// stopping is no drain of a host: such a session is not to wake elsewhere.
	stopping = "stop"
)

// drain puts every awake session to sleep.
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
	awake, err := awakeSessions(ctx, conn)
	if err != nil {
		log.Warn("sessions stay awake", "error", err)
		return
	}
	work := make(chan *corev1.SessionRef, len(awake))
	for _, ref := range awake {
		work <- ref
	}
	close(work)
	var wg sync.WaitGroup
	for range drainers {
		wg.Go(func() {
			for ref := range work {
				_, err := bus.Invoke[*schedulerv1.SleepReply](ctx, conn, "scheduler", "sleep", &schedulerv1.SleepRequest{
					Tenant: ref.GetTenant(), Session: ref.GetSession(), Generation: ref.GetGeneration(), Epoch: ref.GetEpoch(), Reason: stopping})
				if err != nil {
					log.Warn("session stays awake", "session", ref.GetSession(), "error", err)
				}
			}
		})
	}
	wg.Wait()
}

func awakeSessions(ctx context.Context, conn *bus.Conn) (awake []*corev1.SessionRef, err error) {
	for after := ""; ; {
		page, err := bus.Invoke[*schedulerv1.ListReply](ctx, conn, "scheduler", "list", &schedulerv1.ListRequest{After: after, Limit: 500})
		if err != nil {
			return nil, err
		}
		for _, r := range page.GetRecords() {
			if r.GetState() == corev1.State_STATE_ACTIVE {
				awake = append(awake, r.GetSession())
			}
		}
		if after = page.GetNext(); after == "" {
			return awake, nil
		}
	}
}
