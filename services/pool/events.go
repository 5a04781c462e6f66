package pool

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

const (
	eventQueue    = 4096
	eventPatience = time.Minute
	eventAgain    = 200 * time.Millisecond
	// tellEvery is how often the same is told of one pool at most.
	tellEvery = 10 * time.Second
)

// event is told once: its id is the same when it is published again.
type event struct {
	id   string
	body *poolv1.Event
	sent bus.Future
	err  error
}

// events publishes in order, beside everything else. When its queue is full, after minutes without a
// bus that can be written, an event is logged and lost.
type events struct {
	conn *bus.Conn
	log  *slog.Logger
	in   chan event
	done chan struct{}
	ctx  context.Context
	stop context.CancelFunc
	next atomic.Uint64 // makes ids differ within a term

	mu    sync.RWMutex
	ended bool // in is closed
}

func newEvents(conn *bus.Conn, log *slog.Logger) *events {
	ctx, stop := context.WithCancel(context.Background())
	x := &events{conn: conn, log: log, in: make(chan event, eventQueue), done: make(chan struct{}), ctx: ctx, stop: stop}
	sent := make(chan event, eventQueue)
	go func() {
		defer close(sent)
		for e := range x.in {
			x.send(&e)
			sent <- e
		}
	}()
	go func() {
		defer close(x.done)
		for e := range sent {
			x.settle(e)
		}
	}()
	return x
}

func (x *events) send(e *event) {
	e.sent, e.err = x.conn.PublishAsync(x.ctx, subjects.PoolEvent(ids.Template(e.body.GetTemplate()), e.body.GetWhat()), e.body,
		bus.WithID(e.id), bus.WithTime(e.body.GetAt().AsTime()))
}

// settle waits for the acknowledgement and tries again for a while.
func (x *events) settle(e event) {
	ctx, cancel := context.WithDeadline(x.ctx, e.body.GetAt().AsTime().Add(eventPatience))
	defer cancel()
	for wait := time.Duration(0); ; wait = eventAgain {
		if e.err == nil {
			_, e.err = e.sent.Wait(ctx)
		}
		if e.err == nil {
			return
		}
		if !sleep(ctx, wait) {
			x.log.Error("an event of a pool was not published", "id", e.id, "error", e.err)
			return
		}
		x.send(&e)
	}
}

// offer queues an event. False: it is lost. A request that outlives its leader may still have one.
func (x *events) offer(e event) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.ended {
		return false
	}
	select {
	case x.in <- e:
		return true
	default:
		return false
	}
}

// close writes what is queued for a few seconds.
func (x *events) close() {
	x.mu.Lock()
	x.ended = true
	close(x.in)
	x.mu.Unlock()
	select {
	case <-x.done:
	case <-time.After(5 * time.Second):
		x.stop()
		<-x.done
	}
	x.stop()
}

func (l *leader) publish(all ...event) {
	for _, e := range all {
		if !l.events.offer(e) {
			l.log.Warn("an event of a pool is lost: too many wait for a bus that can be written, or this process ends", "id", e.id)
		}
	}
}

// said is what was told of a pool last.
type said struct {
	filled    bool
	filledAt  time.Time
	unhealthy string
	sickAt    time.Time
	emptyAt   time.Time
}

// event is one of this pool; the lock is held.
func (e *entry) event(what, why string, now time.Time) event {
	return event{id: fmt.Sprintf("pool-%s-%d-%s-%d", e.name, e.l.t.term, what, e.l.events.next.Add(1)), body: &poolv1.Event{Template: e.name, Tier: e.tier,
		At: timestamppb.New(now), What: what, Reason: why, Warm: uint32(e.warm), Goal: uint32(e.goal)}}
}

// counted has an event say how many wait, those included that no list of a host has yet; the lock is
// held.
func (e *entry) counted(x event, now time.Time) event {
	st := e.core.Status(now)
	x.body.Warm, x.body.Goal = st.GetWarm(), st.GetGoal()
	return x
}

// news is what a plan has to tell; the lock is held.
func (e *entry) news(p core.Plan, now time.Time) (out []event) {
	if figureless(p.Unhealthy) != figureless(e.said.unhealthy) && (p.Unhealthy == "" || now.Sub(e.said.sickAt) >= tellEvery) {
		e.said.unhealthy, e.said.sickAt = p.Unhealthy, now
		why := p.Unhealthy
		if why == "" {
			why = "sandboxes can be prepared again"
		}
		out = append(out, e.counted(e.event("unhealthy", why, now), now))
	}
	if p.Filled && !e.said.filled && !e.removed && now.Sub(e.said.filledAt) >= tellEvery {
		e.said.filledAt = now
		out = append(out, e.counted(e.event("filled", "as many wait as are wanted: "+p.Goal.Reason, now), now))
	}
	e.said.filled = p.Filled
	return out
}

// figureless is a reason without its figures: free memory changes all the time, and is no news.
func figureless(why string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, why)
}

// exhaustion tells that an ask got none; the lock is held.
func (e *entry) exhaustion(a core.Answer, now time.Time) []event {
	if a.Verdict != core.Exhausted || now.Sub(e.said.emptyAt) < tellEvery {
		return nil
	}
	e.said.emptyAt = now
	return []event{e.event("exhausted", "none is left that this session could have: it starts cold", now)}
}

// claimed tells that a warm one became a session's; the lock is held.
func (e *entry) claimed(req *poolv1.SettleRequest, now time.Time) event {
	out := e.event("claimed", fmt.Sprintf("%s on %s became session %s of %s", req.GetWarm(), req.GetHost(), req.GetSession(), req.GetTenant()), now)
	out.id = "pool-claimed-" + req.GetWarm()
	out.body.Host, out.body.Sandbox, out.body.Tenant, out.body.Session = req.GetHost(), req.GetWarm(), req.GetTenant(), req.GetSession()
	return out
}
