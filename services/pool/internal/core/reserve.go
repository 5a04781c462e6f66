package core

import (
	"slices"
	"time"
)

// desk hands out what waits.
type desk struct {
	// held by reservation, also those that ended a while ago: an ask that comes again gets the same answer.
	held    map[string]*held
	tenants map[string]*tenant
	// turn is the order in which tenants that wait are served.
	turn    []string
	waiting map[string]*waiter
	// line of all who ever waited, in order of arrival; those who wait no more are dropped from its head.
	line []*waiter
	done []Answer
	// reserved by host.
	reserved  map[string]int
	forgotten time.Time
	waits     []time.Duration
	next      int
	// ends of reservations, in order, for none to be looked for.
	ends []ending
}

type ending struct {
	at          time.Time
	reservation string
}

// held is one decided ask. open: it keeps one on the host; claimed: that was claimed.
type held struct {
	answer        Answer
	tenant        string
	open, claimed bool
}

type waiter struct {
	ask   Ask
	name  string
	since time.Time
}

func newDesk() desk {
	return desk{held: map[string]*held{}, tenants: map[string]*tenant{}, waiting: map[string]*waiter{}, reserved: map[string]int{}}
}

func (d *desk) tenant(name string) *tenant {
	t := d.tenants[name]
	if t == nil {
		t = &tenant{}
		d.tenants[name] = t
	}
	return t
}

// free are those on the hosts that can be claimed and are reserved for nobody.
func (p *Pool) free(now time.Time) map[string]int {
	out := map[string]int{}
	for id, m := range p.members {
		if m.answers(now) && p.fits(m) == "" {
			out[id] = max(0, p.claimable(m)-p.desk.reserved[id])
		}
	}
	return out
}

// claimable are those that a session would get.
func (p *Pool) claimable(m *member) int {
	if m.claimable < 0 {
		m.claimable = 0
		for _, s := range m.seen {
			if s.State == Ready && p.useless(m, s) == "" {
				m.claimable++
			}
		}
	}
	return m.claimable
}

// Reserve decides an ask, or lets it wait. Idempotent by session and attempt.
func (p *Pool) Reserve(a Ask, now time.Time) Answer {
	d := &p.desk
	p.expire(now)
	name := a.Session + "." + a.Attempt
	if h := d.held[name]; h != nil {
		return h.answer
	}
	if d.waiting[name] != nil {
		return Answer{Verdict: Waiting, Reservation: name}
	}
	t := d.tenant(a.Tenant)
	t.asked = now
	w := &waiter{ask: a, name: name, since: now}
	d.enqueue(w)
	p.dispatch(now)
	if h := d.held[name]; h != nil {
		d.done = slices.DeleteFunc(d.done, func(x Answer) bool { return x.Reservation == name })
		return h.answer
	}
	if p.spec.Wait <= 0 || len(d.waiting) > MaxWaiting || len(t.queue) > MaxWaitingOfOne || p.removed {
		return d.decide(w, Exhausted, "", now)
	}
	return Answer{Verdict: Waiting, Reservation: name}
}

func (d *desk) enqueue(w *waiter) {
	t := d.tenant(w.ask.Tenant)
	if len(t.queue) == 0 {
		d.turn = append(d.turn, w.ask.Tenant)
	}
	t.queue = append(t.queue, w)
	d.waiting[w.name] = w
	d.line = append(d.line, w)
}

// decide ends the wait of an ask.
func (d *desk) decide(w *waiter, v Verdict, host string, now time.Time) Answer {
	t := d.tenant(w.ask.Tenant)
	t.queue = slices.DeleteFunc(t.queue, func(x *waiter) bool { return x == w })
	if len(t.queue) == 0 {
		d.turn = slices.DeleteFunc(d.turn, func(n string) bool { return n == w.ask.Tenant })
	}
	delete(d.waiting, w.name)
	h := &held{tenant: w.ask.Tenant, answer: Answer{Verdict: v, Reservation: w.name, Host: host, Waited: now.Sub(w.since)}}
	d.held[w.name] = h
	d.ends = append(d.ends, ending{now.Add(ReservedFor), w.name})
	if v == Reserved {
		h.open = true
		t.reserved++
		d.reserved[host]++
		d.waited(h.answer.Waited)
	}
	return h.answer
}

// dispatch serves tenants in turn, each one's asks in order of arrival, until nobody who waits can have
// any of what is free.
func (p *Pool) dispatch(now time.Time) {
	d := &p.desk
	if len(d.waiting) == 0 {
		return
	}
	free := p.free(now)
	total := 0
	for _, n := range free {
		total += n
	}
	goal := p.goal(now).N
	for served := true; served && len(d.turn) > 0; {
		served = false
		for _, name := range slices.Clone(d.turn) {
			t := d.tenants[name]
			if !d.mayTake(name, p.spec, total, goal, now) {
				for _, w := range slices.Clone(t.queue) {
					d.done = append(d.done, d.decide(w, OverShare, "", now))
				}
				continue
			}
			w, host := t.first(free)
			if w == nil {
				continue
			}
			d.done = append(d.done, d.decide(w, Reserved, host, now))
			d.last(name)
			free[host]--
			total--
			served = true
		}
	}
}

// last puts a tenant that was served behind the others.
func (d *desk) last(name string) {
	if i := slices.Index(d.turn, name); i >= 0 {
		d.turn = append(slices.Delete(d.turn, i, i+1), name)
	}
}

// first of a tenant's asks that one of its hosts can serve.
func (t *tenant) first(free map[string]int) (*waiter, string) {
	for _, w := range t.queue {
		for _, host := range w.ask.Hosts {
			if free[host] > 0 {
				return w, host
			}
		}
	}
	return nil, ""
}

// Settle ends a reservation, or the wait for one, and notes a claim. Idempotent.
func (p *Pool) Settle(s Settled, now time.Time) {
	d := &p.desk
	h := d.held[s.Reservation]
	if h != nil {
		s.Tenant = h.tenant
		d.close(h)
	}
	if w := d.waiting[s.Reservation]; w != nil {
		d.decide(w, Exhausted, "", now)
	}
	m := p.members[s.Host]
	if s.Warm == "" || m == nil {
		return
	}
	if _, again := m.removed[s.Warm]; again || h != nil && h.claimed {
		return
	}
	if h != nil {
		h.claimed = true
	}
	m.gone(s.Warm, now)
	d.tenant(s.Tenant).claimed(now)
}

func (d *desk) close(h *held) {
	if h.open {
		h.open = false
		d.tenant(h.tenant).reserved--
		if host := h.answer.Host; d.reserved[host] > 1 {
			d.reserved[host]--
		} else {
			delete(d.reserved, host)
		}
	}
}

// Granted returns the answers of asks that waited and wait no more, and ends what is over. next is when
// to call it again if nothing else happens; zero: no ask waits and nothing is reserved. Call it after
// Observe, End, Retired, Settle and at next.
func (p *Pool) Granted(now time.Time) (answers []Answer, next time.Time) {
	d := &p.desk
	p.expire(now)
	p.dispatch(now)
	answers, d.done = d.done, nil
	if w := d.head(); w != nil {
		next = w.since.Add(p.spec.Wait)
	}
	if len(d.ends) > 0 && (next.IsZero() || d.ends[0].at.Before(next)) {
		next = d.ends[0].at
	}
	return answers, next
}

// expire ends reservations that nobody settled, forgets answers of as long ago, and sends away those who
// waited as long as they may.
func (p *Pool) expire(now time.Time) {
	d := &p.desk
	for len(d.ends) > 0 && !d.ends[0].at.After(now) {
		if h := d.held[d.ends[0].reservation]; h != nil {
			d.close(h)
			delete(d.held, d.ends[0].reservation)
		}
		d.ends = d.ends[1:]
	}
	p.dispatch(now)
	for w := d.head(); w != nil && (p.removed || now.Sub(w.since) >= p.spec.Wait); w = d.head() {
		d.done = append(d.done, d.decide(w, Exhausted, "", now))
	}
	d.forget(now)
}

// head is who waits longest.
func (d *desk) head() *waiter {
	for len(d.line) > 0 {
		if w := d.line[0]; d.waiting[w.name] == w {
			return w
		}
		d.line = d.line[1:]
	}
	return nil
}

const keptWaits = 1000

// waited notes how long a reservation waited.
func (d *desk) waited(t time.Duration) {
	if len(d.waits) < keptWaits {
		d.waits = append(d.waits, t)
		return
	}
	d.waits[d.next] = t
	d.next = (d.next + 1) % keptWaits
}

// quantile of the waits.
func (d *desk) quantile(q float64) time.Duration {
	if len(d.waits) == 0 {
		return 0
	}
	all := slices.Sorted(slices.Values(d.waits))
	return all[min(len(all)-1, int(q*float64(len(all))))]
}
