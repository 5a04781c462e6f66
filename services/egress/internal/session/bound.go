package session

import (
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

// New hosts that a session may reach: so many at once, and so many a second from then on. With a rule for all
// names below one, each new name is something that the sandbox tells to whoever serves that domain.
const (
	newHosts   = 1000
	newHostsPS = 2
	maxHosts   = 4096 // that are remembered
)

// What one session may begin, if the table's config does not say: no session pushes the records of the others
// out of what keeps them.
const (
	recordsPS     = 200
	recordsAtOnce = 5000
)

// Bound is one binding. It implements Session.
type Bound struct {
	t       *Table
	binding *egressv1.Binding
	addrs   []netip.Addr
	since   time.Duration // of Boot
	policy  atomic.Pointer[policy.Policy]
	names   names
	told    told

	mu    sync.Mutex
	ended bool
	live  map[*live]struct{}
	// hosts that it reached; fresh limits those that are new.
	hosts map[authority.Name]struct{}
	fresh *rate.Limiter
}

func newBound(t *Table, b *egressv1.Binding, addrs []netip.Addr) *Bound {
	s := &Bound{t: t, binding: b, addrs: addrs, since: t.cfg.Boot()}
	s.names.salt = b.GetSession().GetSession()
	s.policy.Store(t.cfg.Policies.Of(b))
	s.told.dirty.Store(true)
	return s
}

// Binding implements Session.
func (s *Bound) Binding() *egressv1.Binding { return s.binding }

// Policy implements Session.
func (s *Bound) Policy() *policy.Policy { return s.policy.Load() }

// NameOf implements Session.
func (s *Bound) NameOf(a netip.Addr) (authority.Name, bool) { return s.names.of(a) }

// Assign gives the synthetic addresses of a name in this session; false: there is no room for another one
// while all are in use.
func (s *Bound) Assign(n authority.Name) (four, six netip.Addr, ok bool) { return s.names.assign(n) }

// live implements Live.
type live struct {
	s     *Bound
	req   policy.Request
	dec   policy.Decision
	use   *use
	reset func()
	ended func()       // of the audit log
	state atomic.Int32 // 0 open, 1 reset, 2 closed
	keep  atomic.Bool  // it could not be recorded
	why   atomic.Pointer[Refusal]
}

// Open implements Session.
func (s *Bound) Open(req policy.Request, dec policy.Decision, reset func()) (Live, error) {
	l := &live{s: s, req: req, dec: dec, reset: reset}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.admits(req, dec); err != nil {
		return nil, err
	}
	if n := s.t.open.Add(1); n > int64(s.t.cfg.AllConnections) {
		s.t.open.Add(-1)
		return nil, &Refusal{policy.Rate, "the host has as many connections open as it may"}
	}
	use, err := s.t.uses.take(s.binding.GetSession(), dec, s.t.cfg.Now())
	if err != nil {
		s.t.open.Add(-1)
		return nil, err
	}
	if l.ended, err = s.t.cfg.Audit.Begin(s.unfinished(req, dec)); err != nil {
		use.release()
		s.t.open.Add(-1)
		return nil, &Refusal{policy.AuditAway, "it could not be recorded, so it is not let out"}
	}
	l.use = use
	if s.live == nil {
		s.live = map[*live]struct{}{}
	}
	s.live[l] = struct{}{}
	s.names.hold(req.Name, 1)
	return l, nil
}

// admits says whether something may be opened now; the lock is held.
func (s *Bound) admits(req policy.Request, dec policy.Decision) error {
	switch {
	case s.ended:
		return &Refusal{policy.NoIdentity, "the sandbox is not the session's any more"}
	case !s.t.cfg.Policies.Known():
		return &Refusal{policy.NoPolicy, "the policies are not known yet"}
	case s.t.leaseOver():
		return &Refusal{policy.NoLease, "the host's lease has ended"}
	}
	now := s.Policy().Judge(req)
	if !now.Allowed {
		return &Refusal{now.Reason, fmt.Sprintf("%s is not allowed", req.Name)}
	}
	if !dec.Allowed || !alike(now, dec) {
		return &Refusal{policy.Revoked, "the policy changed at this moment; try again"}
	}
	if err := s.t.cfg.Audit.Ready(s.binding.GetSession().GetSession()); err != nil {
		return &Refusal{policy.AuditAway, "it could not be recorded, so it is not let out"}
	}
	if len(s.live) >= s.t.cfg.MaxConnections {
		return &Refusal{policy.Rate, fmt.Sprintf("the session has %d connections open, as many as it may", len(s.live))}
	}
	if err := s.reaches(req.Name); err != nil {
		return err
	}
	if !s.t.uses.begin(s.binding.GetSession(), s.t.cfg) {
		return &Refusal{policy.Rate, fmt.Sprintf("the session begins more than %d connections and requests a second", s.t.cfg.RecordsPS)}
	}
	return nil
}

// reaches counts a host that is new; the lock is held.
func (s *Bound) reaches(n authority.Name) error {
	if _, ok := s.hosts[n]; ok {
		return nil
	}
	if s.fresh == nil {
		s.fresh, s.hosts = rate.NewLimiter(newHostsPS, newHosts), map[authority.Name]struct{}{}
	}
	if !s.fresh.AllowN(s.t.cfg.Now(), 1) {
		return &Refusal{policy.Rate, "the session reaches more new hosts than it may in a time"}
	}
	if len(s.hosts) < maxHosts {
		s.hosts[n] = struct{}{}
	}
	return nil
}

// alike reports whether two decisions let the same out in the same way.
func alike(a, b policy.Decision) bool {
	return a.Allowed == b.Allowed && a.RefuseCredentials == b.RefuseCredentials &&
		(len(a.Addresses) == 0 && len(b.Addresses) == 0 || reflect.DeepEqual(a.Addresses, b.Addresses)) &&
		(len(a.Inject) == 0 && len(b.Inject) == 0 || reflect.DeepEqual(a.Inject, b.Inject))
}

// refresh takes the policy that is in force and judges again what is open. The policy is asked for under the
// lock: of two at once, the later one stores what is not older.
func (s *Bound) refresh() {
	s.mu.Lock()
	p := s.t.cfg.Policies.Of(s.binding)
	if p == s.policy.Load() {
		s.mu.Unlock()
		return
	}
	s.policy.Store(p)
	var out []*live
	for l := range s.live {
		now := p.Judge(l.req)
		if !now.Allowed || !alike(now, l.dec) {
			out = append(out, l)
		} else {
			l.use.limits(now.Limit)
		}
	}
	s.mu.Unlock()
	s.told.dirty.Store(true)
	for _, l := range out {
		l.end(policy.Revoked)
	}
}

// resetAll ends all that is open.
func (s *Bound) resetAll(why policy.Reason) {
	s.mu.Lock()
	var out []*live
	for l := range s.live {
		out = append(out, l)
	}
	s.mu.Unlock()
	for _, l := range out {
		l.end(why)
	}
}

// end ends the binding.
func (s *Bound) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.resetAll(policy.Revoked)
	s.flush(true)
}

// end resets one, once.
func (l *live) end(why policy.Reason) {
	r := &Refusal{why, "it is not allowed any more"}
	if why == policy.NoLease {
		r.Text = "the host's lease has ended"
	}
	l.why.CompareAndSwap(nil, r)
	if l.state.CompareAndSwap(0, 1) && l.reset != nil {
		go l.reset()
	}
}

// Bytes implements Live.
func (l *live) Bytes(out, in int) error {
	l.s.t.bytesOut.Add(uint64(out))
	l.s.t.bytesIn.Add(uint64(in))
	if r := l.why.Load(); r != nil {
		return r
	}
	if l.use == nil || l.use.spend(uint64(out)+uint64(in), l.s.t.cfg.Now) {
		return nil
	}
	return &Refusal{policy.Bytes, "more bytes went through today than the rule allows"}
}

// Unrecorded implements Live.
func (l *live) Unrecorded() { l.keep.Store(true) }

// Close implements Live.
func (l *live) Close() {
	if l.state.Swap(2) == 2 {
		return
	}
	l.s.mu.Lock()
	delete(l.s.live, l)
	l.s.mu.Unlock()
	l.s.names.hold(l.req.Name, -1)
	l.use.release()
	l.s.t.open.Add(-1)
	if !l.keep.Load() {
		l.ended()
	}
}
