package scheduler

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"go.opentelemetry.io/otel/trace"
)

// works reports whether a loop has something to do for a session; one that
// waits for a place is the queue's.
func works(s *core.Session) bool { return len(core.Next(s)) > 0 && !waits(s) }

// driver runs one loop for each session that is not at rest. A loop looks at
// the stored session, does what follows from it, records the result, and looks
// again, so that it needs no memory of its own and a new leader goes on.
type driver struct {
	l    *leader
	ctx  context.Context
	end  context.CancelFunc
	work sync.WaitGroup

	mu    sync.Mutex
	loops map[ids.SessionKey]*loop
	begun map[ids.SessionKey]begin
}

// maxWhy bounds the reason that is kept of a failed try.
const maxWhy = 400

// begin is where and when an open that is under way came in.
type begin struct {
	span trace.SpanContext
	at   time.Time
	// When the pool was asked for a warm sandbox last, and had answered.
	asked, answered time.Time
}

type loop struct {
	key  ids.SessionKey
	poke chan struct{} // of size one
	// Tries of the same step of the same epoch.
	step  string
	tries int
	// Of the last try of this step, under the driver's mu: why it failed, and
	// whether the host then had no compute but could not save the disk.
	why     string
	unsaved bool
}

// note keeps why a try of a step failed.
func (d *driver) note(lp *loop, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lp.why, lp.unsaved = err.Error(), errs.Is(err, errkind.Unsaved)
	if lp.unsaved {
		lp.why = "the disk cannot be saved: " + lp.why
	}
	lp.why = cut(lp.why, maxWhy)
}

// trouble is what note keeps.
func (d *driver) trouble(lp *loop) (why string, unsaved bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return lp.why, lp.unsaved
}

// forget begins another step.
func (d *driver) forget(lp *loop, step string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lp.step, lp.tries, lp.why, lp.unsaved = step, 0, "", false
}

// asleepBut says why a session that is going to sleep does not get there.
func (d *driver) asleepBut(key ids.SessionKey) string {
	s := d.l.session(key)
	d.mu.Lock()
	defer d.mu.Unlock()
	if lp := d.loops[key]; lp != nil && s != nil && s.State == core.Sleeping {
		return lp.why
	}
	return ""
}

func newDriver(ctx context.Context, l *leader) *driver {
	d := &driver{l: l, loops: map[ids.SessionKey]*loop{}, begun: map[ids.SessionKey]begin{}}
	d.ctx, d.end = context.WithCancel(ctx)
	return d
}

// startAll starts what a previous leader, or a previous process, left.
func (d *driver) startAll() {
	var keys []ids.SessionKey
	d.l.rep.View(func(s *core.State) {
		for _, sess := range s.Sessions() {
			if works(sess) {
				keys = append(keys, sess.Key)
			}
		}
	})
	for _, k := range keys {
		d.touch(k)
	}
}

// touch tells that a session changed; it starts a loop if there is work.
func (d *driver) touch(key ids.SessionKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if lp := d.loops[key]; lp != nil {
		select {
		case lp.poke <- struct{}{}:
		default:
		}
		return
	}
	s := d.l.session(key)
	if d.ctx.Err() != nil || s == nil || !works(s) {
		return
	}
	lp := &loop{key: key, poke: make(chan struct{}, 1)}
	d.loops[key] = lp
	d.work.Go(func() { d.run(lp) })
}

// joined has the sessions of a host looked at now: it holds a lease again, or
// another process serves it.
func (d *driver) joined(h ids.Host) {
	d.mu.Lock()
	keys := slices.Collect(maps.Keys(d.loops))
	d.mu.Unlock()
	for _, k := range keys {
		if s := d.l.session(k); s != nil && s.Host == h {
			d.touch(k)
		}
	}
}

// begin notes where an open came in, for its trace and its timing. It returns
// how to forget it.
func (d *driver) begin(ctx context.Context, key ids.SessionKey) (time.Time, func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b, ok := d.begun[key]
	if !ok {
		b = begin{span: trace.SpanContextFromContext(ctx), at: time.Now()}
		d.begun[key] = b
	}
	return b.at, func() {
		if ok {
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.begun, key)
	}
}

// reserved notes when the pool was asked for an open that is under way.
func (d *driver) reserved(key ids.SessionKey, asked time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if b, ok := d.begun[key]; ok {
		b.asked, b.answered = asked, time.Now()
		d.begun[key] = b
	}
}

func (d *driver) beginning(key ids.SessionKey) (begin, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b, ok := d.begun[key]
	return b, ok
}

func (d *driver) stop() {
	d.end()
	d.work.Wait()
}

func (d *driver) run(lp *loop) {
	for d.ctx.Err() == nil {
		s := d.l.session(lp.key)
		if s == nil || !works(s) {
			if d.finish(lp) {
				return
			}
			continue
		}
		step := s.State.String() + s.Epoch.String()
		if step != lp.step {
			d.forget(lp, step)
		}
		wait := d.during(lp, s)
		if wait == 0 && d.l.session(lp.key) == s { // nothing came of it: never spin
			wait = d.l.backoff(lp.tries)
		}
		lp.tries++
		if wait <= 0 {
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-d.ctx.Done():
		case <-lp.poke:
		case <-t.C:
		}
		t.Stop()
	}
	d.mu.Lock()
	delete(d.loops, lp.key)
	d.mu.Unlock()
}

// finish ends a loop unless the session changed meanwhile.
func (d *driver) finish(lp *loop) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-lp.poke:
		return false
	default:
		delete(d.loops, lp.key)
		return true
	}
}

// during does the session's step, breaking it off when the session moves on,
// and recalls a sleep when an open comes in. It returns how long to wait before
// the next look.
func (d *driver) during(lp *loop, s *core.Session) time.Duration {
	ctx, cancel := context.WithCancel(d.context(lp.key))
	defer cancel()
	var wait time.Duration
	done, begun := make(chan struct{}), s
	go func() {
		defer close(done)
		wait = d.l.step(ctx, lp, begun)
	}()
	var recall sync.WaitGroup
	defer recall.Wait()
	recalled, moved := false, false
	for {
		if s.State == core.Sleeping && s.Wake != nil && !recalled && !(s.Sleep != nil && s.Sleep.Save) {
			recalled = true
			at := s
			recall.Go(func() { d.l.recall(ctx, at) })
		}
		select {
		case <-done:
			cancel()
			if moved {
				return 0
			}
			return wait
		case <-lp.poke:
			now := d.l.session(lp.key)
			if now == nil || now.State != s.State || now.Epoch != s.Epoch || now.Generation != s.Generation {
				moved = true
				cancel()
				continue
			}
			s = now
			if _, unsaved := d.trouble(lp); unsaved && s.State == core.Sleeping && s.Wake != nil {
				moved = true // an open does not wait for another try to save the disk
				cancel()
			}
		}
	}
}

// context carries the trace of the open that is under way, if there is one.
func (d *driver) context(key ids.SessionKey) context.Context {
	if b, ok := d.beginning(key); ok && b.span.IsValid() {
		return trace.ContextWithRemoteSpanContext(d.ctx, b.span)
	}
	return d.ctx
}
