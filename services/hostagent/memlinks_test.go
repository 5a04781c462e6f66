package hostagent

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// memLinks are links in memory. They outlive a hostagent as the kernel's do, and so does the time that was
// lent.
type memLinks struct {
	mu      sync.Mutex
	all     map[string]network.Link
	bound   map[string]bool
	until   time.Duration
	lent    int
	made    int
	flushed bool // the rules were taken away
	drops   map[string]uint64
	// fails makes the next calls of a method fail.
	fails map[string]int
}

func newMemLinks() *memLinks {
	return &memLinks{all: map[string]network.Link{}, bound: map[string]bool{}, fails: map[string]int{}}
}

var _ links = (*memLinks)(nil)

func (m *memLinks) with(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

// failing reports whether a call is to fail. mu is held.
func (m *memLinks) failing(method string) error {
	if m.fails[method] == 0 {
		return nil
	}
	m.fails[method]--
	return fmt.Errorf("%s was asked to fail", method)
}

func (m *memLinks) Make(_ context.Context, sandbox string, tap bool) (network.Link, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.failing("Make"); err != nil {
		return network.Link{}, err
	}
	if l, ok := m.all[sandbox]; ok {
		return l, nil
	}
	m.made++
	a4, a6 := network.Sandboxes4.Addr().As4(), network.Sandboxes6.Addr().As16()
	a4[2], a4[3], a6[14], a6[15] = 1, byte(m.made), 1, byte(m.made)
	l := network.Link{
		Sandbox: sandbox, Router: "/nowhere", Name: fmt.Sprintf("b%d", m.made), Peer: fmt.Sprintf("p%d", m.made), Tap: tap,
		Address4: netip.PrefixFrom(netip.AddrFrom4(a4), 32), Address6: netip.PrefixFrom(netip.AddrFrom16(a6), 128), MTU: 1500,
	}
	m.all[sandbox] = l
	return l, nil
}

func (m *memLinks) Remove(_ context.Context, sandbox string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.failing("Remove"); err != nil {
		return err
	}
	delete(m.all, sandbox)
	delete(m.bound, sandbox)
	return nil
}

func (m *memLinks) List(context.Context) (out []network.Found, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, l := range m.all {
		out = append(out, network.Found{Link: l, Bound: m.bound[name]})
	}
	return out, m.failing("List")
}

func (m *memLinks) Close() error { return nil }

func (m *memLinks) Destroy(context.Context) error {
	m.with(func() { clear(m.all); clear(m.bound) })
	return nil
}

func (m *memLinks) Bind(_ context.Context, l network.Link) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.failing("Bind"); err != nil {
		return err
	}
	if m.all[l.Sandbox] != l {
		return fmt.Errorf("%s: %w", l.Sandbox, network.ErrNoLink)
	}
	m.bound[l.Sandbox] = true
	return nil
}

func (m *memLinks) Unbind(_ context.Context, l network.Link) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.failing("Unbind"); err != nil {
		return err
	}
	delete(m.bound, l.Sandbox)
	return nil
}

// names are whose links are bound.
func (m *memLinks) names() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.bound))
}

func (m *memLinks) Lease(left time.Duration) error {
	m.with(func() { m.until = watchdog.Now() + left; m.lent++ })
	return nil
}

func (m *memLinks) Check(context.Context) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.flushed
	if was {
		m.flushed = false
		clear(m.bound)
		m.until = 0
	}
	return was, m.failing("Check")
}

func (m *memLinks) Drops() (map[string]uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.drops), nil
}

// through reports whether the kernel lets out what a sandbox sends.
func (m *memLinks) through(id ids.SandboxID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bound[string(id)] && watchdog.Now() < m.until
}

func (m *memLinks) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.all)
}

// memGate stands in for the gate of the host, on its real subjects.
type memGate struct {
	t    *testing.T
	conn *bus.Conn
	svc  *bus.Service

	mu    sync.Mutex
	all   map[string]*egressv1.Binding
	until time.Duration
	syncs int
	roots []byte
	// slow, if set, holds up what is asked with bind until it is closed.
	slow chan struct{}
}

func newGate(r *rig) *memGate {
	g := &memGate{t: r.t, all: map[string]*egressv1.Binding{}, conn: bustest.Connect(r.t, r.bus, subjects.Gate(testHost))}
	r.t.Cleanup(g.stop)
	return g
}

func (g *memGate) start() {
	g.t.Helper()
	svc, err := g.conn.Serve(context.Background(), bus.ServiceConfig{Name: "gate", Metadata: map[string]string{"host": string(testHost)}})
	if err != nil {
		g.t.Fatal(err)
	}
	g.svc = svc
	must(g.t, errsJoin(bus.Handle(svc, "bind", g.bind), bus.Handle(svc, "unbind", g.unbind), bus.Handle(svc, "sync", g.sync)))
}

// stop ends it; what it knew is forgotten.
func (g *memGate) stop() {
	if g.svc == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = g.svc.Stop(ctx)
	g.svc = nil
	g.with(func() { clear(g.all); g.until = 0 })
}

func (g *memGate) with(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
}

func (g *memGate) bind(ctx context.Context, _ bus.Request, req *egressv1.BindRequest) (*egressv1.BindReply, error) {
	g.mu.Lock()
	slow := g.slow
	g.mu.Unlock()
	if slow != nil {
		select {
		case <-slow:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all[req.GetBinding().GetSandbox()] = req.GetBinding()
	g.until = time.Duration(req.GetLeaseUntil())
	return &egressv1.BindReply{PolicyGeneration: 3, Notice: []byte(`{"rules":[]}`)}, nil
}

func (g *memGate) unbind(_ context.Context, _ bus.Request, req *egressv1.UnbindRequest) (*egressv1.UnbindReply, error) {
	g.with(func() { delete(g.all, req.GetSandbox()) })
	return &egressv1.UnbindReply{}, nil
}

func (g *memGate) sync(_ context.Context, _ bus.Request, req *egressv1.SyncRequest) (*egressv1.SyncReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if req.GetBoot() == "" {
		return nil, errs.E("sync", errkind.Invalid, "", "no boot")
	}
	clear(g.all)
	for _, b := range req.GetBindings() {
		g.all[b.GetSandbox()] = b
	}
	g.until = time.Duration(req.GetLeaseUntil())
	g.syncs++
	return &egressv1.SyncReply{Roots: g.roots}, nil
}

// of is whose a sandbox's traffic is to the gate while the lease holds; nil: nobody's.
func (g *memGate) of(id ids.SandboxID) *egressv1.Binding {
	g.mu.Lock()
	defer g.mu.Unlock()
	if watchdog.Now() >= g.until {
		return nil
	}
	return g.all[string(id)]
}

func (g *memGate) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.all)
}

func (g *memGate) notice(r *rig, ref *corev1.SessionRef, id ids.SandboxID, text string) error {
	_, err := bus.InvokeHost[*egressv1.NoticeReply](r.context(), g.conn, testHost, "notice", &egressv1.NoticeRequest{Session: ref, Sandbox: string(id), Notice: []byte(text)})
	return err
}

// netProcs are procs that are given links. None is stopped while something could leave it.
type netProcs struct {
	*readyProcs
	links *memLinks
}

func (p *netProcs) Stop(ctx context.Context, id ids.SandboxID) error {
	if p.links.through(id) {
		p.t.Errorf("%s is stopped while its link is bound", id)
	}
	return p.readyProcs.Stop(ctx, id)
}

func (p *netProcs) Fits(w driver.WarmSpec, spec driver.Spec) string {
	if why := w.SameNetwork(spec); why != "" {
		return why
	}
	return p.readyProcs.Fits(w, spec)
}

// netRig is a rig whose sandboxes have links in memory, and a gate that has not started.
func netRig(t *testing.T) (*rig, *netProcs, *memLinks, *memGate) {
	t.Helper()
	l := newMemLinks()
	drv := &netProcs{newReadyProcs(t), l}
	drv.caps = map[driver.Tier]driver.Capabilities{driver.Null: {Native: true, Adopts: true, Holds: true, Warm: true, Network: true}}
	r := newRig(t, drv, subjects.Gate(testHost))
	r.cfg.Network.GateTimeout = time.Second
	r.tune = func(h *host) { must(t, h.net.use(l, filepath.Join(r.cfg.Dir, "net"))) }
	return r, drv, l, newGate(r)
}

// leaves reports whether a sandbox's traffic gets to the gate and counts as the session's.
func leaves(l *memLinks, g *memGate, id ids.SandboxID, ref *corev1.SessionRef) bool {
	b := g.of(id)
	return l.through(id) && b != nil && b.GetSession().String() == ref.String()
}

// inRun is a file of a sandbox's run folder.
func (r *rig) inRun(id ids.SandboxID, name string) string {
	b, err := os.ReadFile(filepath.Join(r.cfg.Dir, "run", string(id), name))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func withActor(w *hostv1.WakeRequest) {
	w.Actor = &corev1.Actor{Tenant: "acme", Issuer: "https://issuer", Subject: "u1", Frontend: "web"}
}
