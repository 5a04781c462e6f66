package scheduler

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

const (
	// poolRest is how long a pool that did not answer, or has none of a
	// template, is not asked again.
	poolRest = time.Second
	// settleWait is how many outcomes wait to be told; settleTime bounds telling one.
	settleWait    = 4096
	settleWorkers = 2
	settleTime    = 5 * time.Second
)

// poolTimes is how patient a placement is with the pool.
type poolTimes struct {
	// soon is how long it waits for a pool of which nothing is heard.
	soon time.Duration
	// most is how long it waits for a pool that has one made for it.
	most time.Duration
	// look is how often such a wait makes sure that the pool still answers.
	look time.Duration
}

func newPoolTimes() poolTimes {
	return poolTimes{soon: 20 * time.Millisecond, most: 2 * time.Second, look: 100 * time.Millisecond}
}

// pools asks the service pool for warm sandboxes before sessions are placed,
// and tells it what became of them. All of it is advice: without an answer in
// time a session is placed as if there were no pool, and a reservation that is
// lost on the way ends by itself.
type pools struct {
	l       *leader
	times   poolTimes
	attempt atomic.Uint64
	settles chan *poolv1.SettleRequest

	mu      sync.Mutex
	heard   time.Time // when the pool answered last
	rest    time.Time // it is not asked before
	probing bool
	none    map[string]time.Time // by WarmName, when there may be a pool for it
}

func newPools(l *leader) *pools {
	p := &pools{l: l, times: l.cfg.pool, settles: make(chan *poolv1.SettleRequest, settleWait), none: map[string]time.Time{}}
	p.attempt.Store(uint64(time.Now().UnixNano())) // of no other leader
	return p
}

// wanted is one placement that is about to be proposed.
type wanted struct {
	session  *core.Session // as it is, or would be
	terms    core.Terms
	request  ids.RequestID
	deadline core.Time
	not      ids.Host // has just said that it is full
	// brief: others wait behind it, so that it does not wait for one to be made.
	brief bool
}

// key is that of may: a brief one has its own.
func (w *wanted) key(name string) string {
	if w.brief {
		return name + " brief"
	}
	return name
}

// reserve asks for a warm sandbox for a placement. It returns the candidates
// as the answer leaves them, and what to call with the placement's outcome.
func (p *pools) reserve(ctx context.Context, w wanted, c []core.Candidate) ([]core.Candidate, func(core.Outcome, error)) {
	kept := func(core.Outcome, error) {}
	terms := w.session.Raised(w.terms)
	name := core.WarmName(&terms)
	if !p.l.leases.pooled(name) || !p.may(name) || !p.may(w.key(name)) {
		return c, kept
	}
	hosts := p.hosts(c, w.not)
	if len(hosts) == 0 || !p.placeable(w, c) {
		return c, kept
	}
	start := time.Now()
	req := p.request(w, terms, hosts)
	r := p.ask(ctx, req, start.Add(p.most(w)))
	p.l.m.reserved(ctx, time.Since(start), r.GetVerdict())
	p.l.driver.reserved(w.session.Key, start)
	switch r.GetVerdict() {
	case poolv1.Verdict_VERDICT_RESERVED:
		h, err := ids.ParseHost(r.GetHost())
		if err != nil || !slices.Contains(hosts, h) {
			return c, kept
		}
		return core.Reserved(c, h, r.GetReservation()), func(out core.Outcome, err error) { p.unused(r, req, out, err) }
	case poolv1.Verdict_VERDICT_OVER_SHARE:
		return core.Cold(c), kept
	case poolv1.Verdict_VERDICT_NO_POOL:
		p.later(name)
	default:
		if w.brief {
			p.later(w.key(name))
		}
	}
	return c, kept
}

// later has nobody ask under a key of may for a while.
func (p *pools) later(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.none[key] = time.Now().Add(poolRest)
}

func (p *pools) request(w wanted, terms core.Terms, hosts []ids.Host) *poolv1.ReserveRequest {
	attempt := 1
	if w.session.Wake != nil {
		attempt += w.session.Wake.Attempt
	}
	req := &poolv1.ReserveRequest{Tenant: w.session.Tenant.String(), Session: w.session.Key.String(), Template: terms.Template, Tier: terms.Tier,
		Attempt: fmt.Sprintf("%s-%d-%x", w.request, attempt, p.attempt.Add(1))}
	for _, h := range hosts {
		req.Hosts = append(req.Hosts, h.String())
	}
	return req
}

// may reports whether the pool is to be asked under a name now.
func (p *pools) may(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	return now.After(p.rest) && now.After(p.none[name])
}

// hosts are those that may give a warm sandbox: not one whose wakes fail, nor
// one that has just said that it is full.
func (p *pools) hosts(c []core.Candidate, not ids.Host) []ids.Host {
	return slices.DeleteFunc(core.Reservable(c), func(h ids.Host) bool { return h == not || p.l.leases.sick(h) != "" })
}

func (p *pools) placeable(w wanted, c []core.Candidate) (yes bool) {
	p.l.rep.View(func(st *core.State) { yes = st.Placeable(w.session, w.terms, c) })
	return yes
}

// most is how long a placement may wait for a warm sandbox.
func (p *pools) most(w wanted) time.Duration {
	most := p.times.most
	if w.brief {
		most = p.times.soon
	}
	if w.deadline == 0 {
		return most
	}
	return min(most, time.Until(w.deadline.Std())/4)
}

// unused gives a reservation back that was not committed with a placement. Of
// an entry whose outcome is not known it keeps silent: it may have been.
func (p *pools) unused(r *poolv1.ReserveReply, req *poolv1.ReserveRequest, out core.Outcome, err error) {
	if err != nil || out.Session != nil && out.Session.Wake != nil && out.Session.Wake.Reservation == r.GetReservation() {
		return
	}
	p.release(r.GetReservation(), req)
}

// release gives a reservation back: no wake uses it.
func (p *pools) release(reservation string, req *poolv1.ReserveRequest) {
	if reservation != "" {
		p.tell(&poolv1.SettleRequest{Reservation: reservation, Tenant: req.GetTenant(), Session: req.GetSession(),
			Template: req.GetTemplate(), Tier: req.GetTier(), Failed: true})
	}
}

// settle tells the pool what became of a wake for which it was, or could have
// been, asked.
func (p *pools) settle(s *core.Session, woke *hostv1.WakeReply, err error) {
	if s.Wake == nil || s.Wake.Reservation == "" && !s.Wake.Cold && !p.l.leases.pooled(core.WarmName(s.Terms)) {
		return
	}
	p.tell(&poolv1.SettleRequest{Reservation: s.Wake.Reservation, Tenant: s.Tenant.String(), Session: s.Key.String(),
		Template: s.Terms.Template, Tier: s.Terms.Tier, Host: s.Host.String(), Warm: woke.GetWarm(), Failed: err != nil})
}

// tell never blocks: what nobody takes in time is dropped.
func (p *pools) tell(req *poolv1.SettleRequest) {
	select {
	case p.settles <- req:
	default:
		p.l.m.settleDropped()
	}
}

// run tells what is to be settled until ctx ends.
func (p *pools) run(ctx context.Context) error {
	var work sync.WaitGroup
	for range settleWorkers {
		work.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case req := <-p.settles:
					p.settleOne(ctx, req)
				}
			}
		})
	}
	work.Wait()
	return nil
}

func (p *pools) settleOne(ctx context.Context, req *poolv1.SettleRequest) {
	sctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	_, err := bus.Invoke[*poolv1.SettleReply](sctx, p.l.conn, "pool", "settle", req)
	p.hear(err)
	if err != nil && ctx.Err() == nil {
		p.l.m.settleDropped()
		p.l.log.Debug("the pool was not told what became of a wake", "session", req.GetSession(), "error", err)
	}
}
