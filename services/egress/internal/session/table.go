package session

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Policies says what is in force.
type Policies interface {
	// Known is false while the policies could not be read yet: then nothing leaves.
	Known() bool
	// Of is the policy of a session, and never nil. It is the same value while nothing of it changed.
	Of(*egressv1.Binding) *policy.Policy
}

// Audit keeps records. Its methods are safe for concurrent use.
type Audit interface {
	// Record keeps a record or says that it is not kept.
	Record(*egressv1.Record) error
	// Ready says why a record of a session might not be kept now.
	Ready(session string) error
	// Begin notes that something is open, until end is called: if the gate dies before, r is its record.
	Begin(r *egressv1.Record) (end func(), err error)
}

// Outlet tells others. Its methods are safe for concurrent use.
type Outlet interface {
	// Event publishes "denied" or "allowed"; it does not wait.
	Event(name string, e *egressv1.Event)
	// Notice gives a sandbox its /run/berth/egress.json. An error: it is tried again, unless it is StaleEpoch.
	Notice(ctx context.Context, b *egressv1.Binding, notice []byte) error
}

// Config of a table.
type Config struct {
	Host     string
	Policies Policies
	Audit    Audit
	Outlet   Outlet
	// Boot is the time since the machine started, also while it slept; Now the time of day.
	Boot func() time.Duration
	Now  func() time.Time
	// MaxConnections of one session, AllConnections of all.
	MaxConnections, AllConnections int
	Log                            *slog.Logger
	// RecordsPS is how many connections and requests, each of which is a record, one session may begin a
	// second, and RecordsAtOnce how many at once; 0: 200 and 5000.
	RecordsPS, RecordsAtOnce int
	// Kept is a file that keeps the bytes of the day over a restart; empty: none does.
	Kept string
	// Noted, if set, is told each record that is noted.
	Noted func(*egressv1.Record)
}

// freshTime is how long a sync that does not name a new binding leaves it: it may be older than the binding.
const freshTime = 3 * time.Second

// Table is the bindings of one host. It implements Finder.
type Table struct {
	cfg   Config
	lease atomic.Int64 // nanoseconds of Boot
	open  atomic.Int64

	// BytesOut and BytesIn count all that went through.
	bytesOut, bytesIn atomic.Uint64

	mu        sync.RWMutex
	boot      string
	byAddress map[netip.Addr]*Bound
	bySandbox map[string]*Bound

	uses  uses
	lists lists
	pushs chan struct{} // slots of notices under way
}

// NewTable makes a table without bindings and without a lease.
func NewTable(cfg Config) *Table {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.RecordsPS == 0 {
		cfg.RecordsPS, cfg.RecordsAtOnce = recordsPS, recordsAtOnce
	}
	t := &Table{cfg: cfg, byAddress: map[netip.Addr]*Bound{}, bySandbox: map[string]*Bound{},
		uses: uses{by: map[useKey]*use{}, begun: map[sessionKey]*rate.Limiter{}}, pushs: make(chan struct{}, 4)}
	if cfg.Kept != "" {
		t.uses.load(cfg.Kept)
	}
	return t
}

// ByAddress implements Finder.
func (t *Table) ByAddress(a netip.Addr) (Session, bool) {
	if b, ok := t.Bound(a); ok {
		return b, true
	}
	return nil, false
}

// Bound is ByAddress with all that a binding can do.
func (t *Table) Bound(a netip.Addr) (*Bound, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	b, ok := t.byAddress[a.Unmap().WithZone("")]
	return b, ok
}

// Sessions are all bindings.
func (t *Table) Sessions() []*Bound {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]*Bound, 0, len(t.bySandbox))
	for _, b := range t.bySandbox {
		out = append(out, b)
	}
	return out
}

// Figures of a table.
type Figures struct {
	Sessions, Open    int64
	BytesOut, BytesIn uint64
}

// Figures are those of now.
func (t *Table) Figures() Figures {
	t.mu.RLock()
	n := len(t.bySandbox)
	t.mu.RUnlock()
	return Figures{Sessions: int64(n), Open: t.open.Load(), BytesOut: t.bytesOut.Load(), BytesIn: t.bytesIn.Load()}
}

// Lease sets when the host's lease ends.
func (t *Table) Lease(until time.Duration) { t.lease.Store(int64(until)) }

// Closed says why nothing leaves now; empty: traffic is judged.
func (t *Table) Closed() string {
	if !t.cfg.Policies.Known() {
		return "the policies are not known yet"
	}
	if t.leaseOver() {
		return "the host's lease has ended"
	}
	return ""
}

func (t *Table) leaseOver() bool { return int64(t.cfg.Boot()) >= t.lease.Load() }

// addressesOf are the addresses of a binding.
func addressesOf(b *egressv1.Binding) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range []string{b.GetAddress4(), b.GetAddress6()} {
		if s == "" {
			continue
		}
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" || a.Is4In6() {
			return nil, errors.New("a binding's address cannot be read")
		}
		out = append(out, a)
	}
	if len(out) == 0 || b.GetSandbox() == "" || b.GetSession().GetSession() == "" || b.GetSession().GetTenant() == "" {
		return nil, errors.New("a binding needs a session, a sandbox and an address")
	}
	return out, nil
}

// Bind makes a link a session's. The same binding again changes nothing; another one of the sandbox or of an
// address ends the earlier, unless the earlier is of a later epoch.
func (t *Table) Bind(b *egressv1.Binding) (*Bound, error) {
	addrs, err := addressesOf(b)
	if err != nil {
		return nil, errs.E("bind", errkind.Invalid, b.GetSandbox(), err)
	}
	b = proto.CloneOf(b)
	t.mu.Lock()
	if old := t.bySandbox[b.GetSandbox()]; old != nil && proto.Equal(old.binding, b) {
		t.mu.Unlock()
		return old, nil
	}
	var ended []*Bound
	for _, old := range t.bySandbox {
		if !old.collides(b, addrs) {
			continue
		}
		if same(old.binding, b) && later(old.binding.GetSession().GetEpoch(), b.GetSession().GetEpoch()) {
			t.mu.Unlock()
			return nil, errs.E("bind", errkind.StaleEpoch, b.GetSession().GetSession(), "a later epoch of the session is bound")
		}
		ended = append(ended, old)
	}
	for _, old := range ended {
		t.forget(old)
	}
	n := newBound(t, b, addrs)
	t.bySandbox[b.GetSandbox()] = n
	for _, a := range addrs {
		t.byAddress[a] = n
	}
	t.mu.Unlock()
	for _, old := range ended {
		old.end()
	}
	n.refresh() // the policy may have changed since it was read
	return n, nil
}

// same reports whether two bindings are of one generation of one session.
func same(a, b *egressv1.Binding) bool {
	return a.GetSession().GetSession() == b.GetSession().GetSession() && proto.Equal(a.GetSession().GetGeneration(), b.GetSession().GetGeneration())
}

func later(a, b *corev1.Stamp) bool {
	if a.GetIncarnation() != b.GetIncarnation() {
		return a.GetIncarnation() > b.GetIncarnation()
	}
	return a.GetIndex() > b.GetIndex()
}

// collides reports whether both cannot be at once.
func (s *Bound) collides(b *egressv1.Binding, addrs []netip.Addr) bool {
	if s.binding.GetSandbox() == b.GetSandbox() || same(s.binding, b) {
		return true
	}
	for _, a := range s.addrs {
		for _, x := range addrs {
			if a == x {
				return true
			}
		}
	}
	return false
}

// forget takes a binding out of the maps; the lock is held.
func (t *Table) forget(s *Bound) {
	if t.bySandbox[s.binding.GetSandbox()] == s {
		delete(t.bySandbox, s.binding.GetSandbox())
	}
	for _, a := range s.addrs {
		if t.byAddress[a] == s {
			delete(t.byAddress, a)
		}
	}
}

// Unbind ends the binding of a sandbox, if it is that session's at that epoch. What is not there is no error.
func (t *Table) Unbind(ref *corev1.SessionRef, sandbox string) {
	t.mu.Lock()
	s := t.bySandbox[sandbox]
	if s == nil || !proto.Equal(s.binding.GetSession(), ref) {
		t.mu.Unlock()
		return
	}
	t.forget(s)
	t.mu.Unlock()
	s.end()
}

// Sync makes the bindings those of a complete list. A list of another boot of the host ends all others at
// once; else one that is newer than the list may be stays for a moment.
func (t *Table) Sync(boot string, list []*egressv1.Binding) error {
	named := map[string]bool{}
	var failed []error
	for _, b := range list {
		named[b.GetSandbox()] = true
		if _, err := t.Bind(b); err != nil {
			failed = append(failed, err)
		}
	}
	t.mu.Lock()
	anew := t.boot != "" && t.boot != boot
	t.boot = boot
	var ended []*Bound
	for _, s := range t.bySandbox {
		if !named[s.binding.GetSandbox()] && (anew || t.cfg.Boot()-s.since > freshTime) {
			t.forget(s)
			ended = append(ended, s)
		}
	}
	t.mu.Unlock()
	for _, s := range ended {
		s.end()
	}
	return errors.Join(failed...)
}

// Refresh has every session take the policy that is in force now; what is open is judged again and reset if
// it is not allowed any more.
func (t *Table) Refresh() {
	t.lists.forget()
	for _, s := range t.Sessions() {
		s.refresh()
	}
}

// tickEvery is how often a lease that ended, and what is to be told, is looked for.
const tickEvery = 100 * time.Millisecond

// Run resets what is open when the lease ends, and tells what is to be told later, until ctx ends.
func (t *Table) Run(ctx context.Context) {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	closed := t.Closed()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			for _, s := range t.Sessions() {
				s.flush(true)
			}
			t.keep()
			return
		case <-tick.C:
		}
		over, was := t.leaseOver(), closed
		closed = t.Closed()
		for _, s := range t.Sessions() {
			if was != closed {
				s.told.dirty.Store(true)
			}
			if over {
				s.resetAll(policy.NoLease)
			}
			s.push(ctx)
			if n%10 == 0 {
				s.flush(false)
			}
		}
		if n%100 == 99 {
			t.keep()
		}
		if n%600 == 0 {
			t.uses.clean(t.cfg.Now())
		}
	}
}

// keep writes what a restart is to find.
func (t *Table) keep() {
	if t.cfg.Kept == "" {
		return
	}
	if err := t.uses.save(t.cfg.Kept, t.cfg.Now()); err != nil {
		t.cfg.Log.Warn("the bytes of the day are not kept: a restart begins them anew", "error", err)
	}
}
