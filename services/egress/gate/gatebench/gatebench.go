// Package gatebench puts the parts of a gate together on loopback, so that they can be measured without links,
// namespaces and hosts. It guarantees that traffic takes the very path that it takes through a gate, from the
// transparent door to the dial: the same sessions, policies, certificates, injection and audit log, with
// records that go to a real bus and policies that come from it. What differs: a door has an address of 127/8
// instead of a synthetic one, and sessions are bound here, with a lease that does not end.
package gatebench

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/gate"
	"github.com/berth-dev/berth/services/egress/internal/audit"
	"github.com/berth-dev/berth/services/egress/internal/mint"
	"github.com/berth-dev/berth/services/egress/internal/proxy"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/upstream"
	"github.com/berth-dev/berth/services/egress/internal/web"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Config of a gate that is measured.
type Config struct {
	// Dir holds the audit spool.
	Dir string
	// Bus has the policies and takes the audit records; the identity of a gate.
	Bus *bus.Conn
	// Hosts are the names that can be reached and where they are, all on one port.
	Hosts map[string]netip.Addr
	Port  uint16
	// Roots verify the hosts' certificates.
	Roots *x509.CertPool
	// Secret is the value of every secret; it may be sent to every host.
	Secret string
	Log    *slog.Logger
}

// Gate is one that runs.
type Gate struct {
	cfg    Config
	table  *session.Table
	spool  *audit.Spool
	engine *web.Engine
	minter *mint.Authority
	rules  *gate.Follower
	names  map[netip.Addr]authority.Name // by the address of their door
	doors  map[string]netip.AddrPort
	stop   context.CancelFunc
	all    sync.WaitGroup
	bound  int

	mu      sync.Mutex
	force   uint64        // generation of the cell's policy that sessions have
	changed chan struct{} // closed and made anew when the policies changed
}

const startWait = 10 * time.Second

// Start runs a gate without sessions. It returns once the policies are known.
func Start(ctx context.Context, cfg Config) (*Gate, error) {
	g := &Gate{cfg: cfg, names: map[netip.Addr]authority.Name{}, doors: map[string]netip.AddrPort{}}
	g.changed, g.rules = make(chan struct{}), gate.NewFollower(cfg.Bus, cfg.Log)
	var err error
	if g.spool, err = audit.Open(audit.Config{Dir: filepath.Join(cfg.Dir, "audit"), Max: 256 << 20, Log: cfg.Log}, cfg.Bus); err != nil {
		return nil, err
	}
	began := time.Now()
	g.table = session.NewTable(session.Config{Host: "bench", Policies: g.rules, Audit: g.spool, Outlet: told{}, Log: cfg.Log,
		Boot: func() time.Duration { return time.Since(began) + time.Minute }, MaxConnections: 4096, AllConnections: 32768,
		RecordsPS: 1 << 30, RecordsAtOnce: 1 << 30})
	g.table.Lease(1000 * time.Hour)
	life, stop := context.WithCancel(ctx)
	g.stop = stop
	if err := g.open(life); err != nil {
		g.Close()
		return nil, err
	}
	return g, nil
}

// open has the doors opened and everything go on until life ends.
func (g *Gate) open(life context.Context) error {
	root, err := newRoot()
	if err != nil {
		return err
	}
	g.minter = mint.New(life, root.issue, time.Now, g.cfg.Log)
	static := map[authority.Name][]netip.Addr{}
	for host, at := range g.cfg.Hosts {
		n, err := authority.ParseStrict(host)
		if err != nil {
			return err
		}
		static[n] = []netip.Addr{at}
	}
	dial := upstream.New(upstream.Config{Static: static})
	g.engine = web.New(web.Config{Upstream: dial, Secrets: secrets{g.cfg}, Roots: g.cfg.Roots, Log: g.cfg.Log})
	p := proxy.New(proxy.Config{Sessions: finder{g}, Dialer: dial, Minter: g.minter, Web: g.engine, Denial: web.Denial, Log: g.cfg.Log,
		Limits: proxy.Limits{PerSandbox: 4096}})
	next := netip.AddrFrom4([4]byte{127, 77, 0, 1})
	for host := range g.cfg.Hosts {
		at := netip.AddrPortFrom(next, g.cfg.Port)
		l, err := net.Listen("tcp", at.String())
		if err != nil {
			return fmt.Errorf("open a door: %w", err)
		}
		g.names[next], g.doors[host] = authority.Name(host), at
		g.all.Go(func() { _ = p.ServeTransparent(life, l) })
		next = next.Next()
	}
	first := g.next()
	g.all.Go(func() { g.rules.Run(life, g.heard) })
	g.all.Go(func() { g.table.Run(life) })
	g.all.Go(func() { g.spool.Run(life, time.Second) })
	late := time.After(startWait)
	for _, ready := range []<-chan struct{}{g.minter.Ready(), first} {
		select {
		case <-ready:
		case <-late:
			return errors.Join(errors.New("there is no authority, or the policies are not known"), g.minter.Err())
		}
	}
	return nil
}

// heard has every session take its policy, as a gate does.
func (g *Gate) heard() {
	generation := g.rules.Of(&egressv1.Binding{}).Generation()
	g.table.Refresh()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.force = generation
	close(g.changed)
	g.changed = make(chan struct{})
}

// next is closed at the next change.
func (g *Gate) next() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// Close ends it.
func (g *Gate) Close() {
	g.stop()
	g.all.Wait()
	if g.engine != nil {
		g.engine.Close()
	}
	g.spool.Close()
}

// Bind adds a session and returns the address that its connections must come from.
func (g *Gate) Bind() (netip.Addr, error) {
	n := g.bound
	g.bound++
	a := netip.AddrFrom4([4]byte{127, byte(80 + n>>16), byte(n >> 8), byte(n)})
	at := &corev1.Stamp{Incarnation: 1, Index: uint64(n + 1)}
	_, err := g.table.Bind(&egressv1.Binding{Sandbox: fmt.Sprintf("box%d", n), Address4: a.String(), SessionName: "default", Plan: "default", Template: "default",
		Session: &corev1.SessionRef{Tenant: "acme", Session: fmt.Sprintf("s%051d", n), Generation: at, Epoch: at},
		Actor:   &corev1.Actor{Tenant: "acme", Issuer: "https://idp.example", Subject: "ann", Frontend: "web"}})
	return a, err
}

// Unbind ends the session of an address.
func (g *Gate) Unbind(a netip.Addr) {
	if b, ok := g.table.Bound(a); ok {
		g.table.Unbind(b.Binding().GetSession(), b.Binding().GetSandbox())
	}
}

// InForce waits until all sessions have a policy of this generation or a later one.
func (g *Gate) InForce(ctx context.Context, generation uint64) error {
	for {
		g.mu.Lock()
		changed, force := g.changed, g.force
		g.mu.Unlock()
		if force >= generation {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Judge asks the cell's policy for a request of HTTPS.
func (g *Gate) Judge(host string, port uint16, method, path string) bool {
	req := policy.Request{Name: authority.Name(host), Port: port, Protocol: policy.HTTPS, Method: method, Path: path}
	return g.rules.Of(&egressv1.Binding{}).Judge(req).Allowed
}

// Door is where a sandbox reaches a host.
func (g *Gate) Door(host string) netip.AddrPort { return g.doors[host] }

// Roots are what a sandbox trusts, PEM.
func (g *Gate) Roots() []byte { return g.minter.Roots() }

// Recorded is how many audit records are on the bus, and Waiting how many bytes of them are not.
func (g *Gate) Recorded() (sent uint64, waiting int64) { return g.spool.Sent(), g.spool.Waiting() }

// told is nobody.
type told struct{}

// Event implements session.Outlet.
func (told) Event(string, *egressv1.Event) {}

// Notice implements session.Outlet.
func (told) Notice(context.Context, *egressv1.Binding, []byte) error { return nil }

// finder finds sessions that know the doors' names.
type finder struct{ g *Gate }

// ByAddress implements session.Finder.
func (f finder) ByAddress(a netip.Addr) (session.Session, bool) {
	b, ok := f.g.table.Bound(a)
	if !ok {
		return nil, false
	}
	return sandbox{b, f.g}, true
}

type sandbox struct {
	*session.Bound
	g *Gate
}

// NameOf implements session.Session.
func (s sandbox) NameOf(a netip.Addr) (authority.Name, bool) {
	n, ok := s.g.names[a]
	return n, ok
}

type secrets struct{ cfg Config }

// Reveal implements web.Secrets.
func (s secrets) Reveal(context.Context, session.Session, string) (web.Secret, error) {
	out := web.Secret{Value: []byte(s.cfg.Secret)}
	for host := range s.cfg.Hosts {
		out.Hosts = append(out.Hosts, authority.Name(host))
	}
	return out, nil
}
