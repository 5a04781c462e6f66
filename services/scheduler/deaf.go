package scheduler

import (
	"context"
	"sync/atomic"
	"time"
)

// A leader whose connection to the bus is away, while the other replicas hear
// it, would lead on for ever: nobody could renew a lease or ask for anything,
// and it would declare every host lost.

const (
	hearEvery = 100 * time.Millisecond
	// yieldTime bounds one attempt to hand leadership over.
	yieldTime = 2 * time.Second
)

// hear hands leadership over while the bus is away. Until somebody takes it,
// or the bus is back, no lease runs out: nobody could renew, so that silence
// says nothing of a host. A new leader, which may be as deaf, keeps it for a
// while, so that it does not go in circles when the whole bus is away.
func (s *server) hear(ctx context.Context, now *atomic.Pointer[leader]) {
	tick := time.NewTicker(hearEvery)
	defer tick.Stop()
	began, last := time.Now(), time.Now()
	var deaf, tried time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		passed := time.Since(last)
		last = last.Add(passed)
		l := now.Load()
		if s.conn.Connected() {
			if !deaf.IsZero() && l != nil {
				l.leases.extend(l.leases.term) // also for the time until the loss was noticed
			}
			deaf = time.Time{}
			continue
		}
		if deaf.IsZero() {
			deaf = last
		}
		if l != nil {
			l.leases.extend(passed)
		}
		if last.Sub(deaf) < s.cfg.times.deafAfter || last.Sub(began) < s.cfg.times.newLeadership || last.Sub(tried) < s.cfg.times.newLeadership {
			continue
		}
		tried = last
		s.yield(ctx)
	}
}

func (s *server) yield(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, yieldTime)
	defer cancel()
	s.cfg.Log.Warn("this leader does not reach the bus and hands leadership over")
	if err := s.rep.Transfer(ctx, ""); err != nil {
		s.cfg.Log.Warn("nobody takes leadership over", "error", err)
	}
}
