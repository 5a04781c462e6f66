package scheduler

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

const (
	tidyEvery = 10 * time.Second
	// tidyParallel hosts are asked at once.
	tidyParallel = 8
	// tidyTime bounds the tries of one round, so that one host does not hold up the others.
	tidyTime = 30 * time.Second
)

// tidyUp removes what is where it does not belong any more: deleted sessions
// on hosts that had them before or were away at the time, and compute of
// earlier epochs that a host may still run and that takes room there until it
// says that it does not.
func (l *leader) tidyUp(ctx context.Context) error {
	for {
		l.tidyOnce(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tidyEvery):
		case <-l.tidy:
		}
	}
}

// tidyOnce asks every host that is there, several at once but each one thing at a time.
func (l *leader) tidyOnce(ctx context.Context) {
	todo := map[ids.Host][]func(context.Context){}
	l.rep.View(func(s *core.State) {
		for _, t := range s.Tombstones() {
			for _, e := range t.Erase {
				if !e.Done && l.leases.alive(e.Host) {
					todo[e.Host] = append(todo[e.Host], func(ctx context.Context) { l.eraseOne(ctx, t, e) })
				}
			}
		}
		for _, p := range s.Lefts() {
			if l.leases.alive(p.Left.Host) {
				todo[p.Left.Host] = append(todo[p.Left.Host], func(ctx context.Context) { l.clearOne(ctx, p) })
			}
		}
	})
	var work sync.WaitGroup
	slots := make(chan struct{}, tidyParallel)
	for _, jobs := range todo {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			inTurn(ctx, tidyTime, jobs)
		})
	}
	work.Wait()
}

// inTurn does jobs one after the other, as many as there is time for, so that a
// host which does not answer holds up no other one. Their order is another one
// each time, so that one job which hangs keeps no other from its turn for ever.
func inTurn(ctx context.Context, within time.Duration, jobs []func(context.Context)) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	rand.Shuffle(len(jobs), func(i, j int) { jobs[i], jobs[j] = jobs[j], jobs[i] })
	for _, job := range jobs {
		if ctx.Err() != nil {
			return
		}
		job(ctx)
	}
}

func (l *leader) eraseOne(ctx context.Context, t *core.Tombstone, e core.Erasure) {
	ctx, cancel := context.WithTimeout(ctx, tidyTime)
	defer cancel()
	ref := e.Ref(t)
	erased, err := l.hostDelete(ctx, e.Host, t.Tenant, ref)
	if err != nil {
		l.log.Warn("cannot erase a deleted session yet", "session", t.Key, "host", e.Host, "error", err)
		return
	}
	if !erased {
		l.log.Debug("the store is not clean of a deleted session yet", "session", t.Key, "host", e.Host)
		return
	}
	if _, err := l.apply(ctx, core.Entry{Removed: &core.Removed{Ref: ref, Erased: true, Hosts: []ids.Host{e.Host}}}); err != nil {
		l.log.Warn("cannot record an erased session", "session", t.Key, "error", err)
		return
	}
	l.drains.now()
}

// reasonLeft is why a host is told to end an epoch that it does not own any more.
const reasonLeft = "superseded"

// clearOne has a host end what it may still run of an earlier epoch. Nothing
// of it is saved: another epoch owns the session.
func (l *leader) clearOne(ctx context.Context, p core.Pair) {
	hctx, cancel := context.WithTimeout(ctx, tidyTime)
	defer cancel()
	ref := refOf(p.Session)
	ref.Epoch = p.Left.Epoch
	err := l.forceSleep(hctx, p.Left.Host, protoRef(p.Session.Tenant, ref), p.Session.Manifest, reasonLeft)
	a := core.Answer{Kind: core.HostClear, Session: p.Session, Left: p.Left, NotFound: gone(err) || errs.Is(err, errkind.Unsaved)}
	if err != nil {
		f := failureOf(err)
		a.Err = &f
	}
	e, ok := core.After(l.session(p.Session.Key), a, 0, nil)
	if !ok {
		l.log.Warn("cannot end an earlier epoch yet", "session", p.Session.Key, "epoch", p.Left.Epoch, "host", p.Left.Host, "error", err)
		return
	}
	if _, err := l.apply(ctx, e); err != nil {
		l.log.Warn("cannot record the end of an earlier epoch", "session", p.Session.Key, "error", err)
		return
	}
	l.queue.room()
	l.drains.now()
}
