// Package gate is the egress of one host: everything that leaves a sandbox of the host leaves through it. It
// guarantees that nothing leaves which the session's policy does not allow, that nothing leaves without a
// binding by the host's own agent, after the host's lease, before the policies are known or when it cannot be
// recorded, and that what is open is reset within a second when one of these changes. It stores nothing but
// the audit records that the bus has not taken yet and the bytes of the day by rule: bindings come again with
// the host's next sync. While the bus is away the policies that were last heard hold on.
package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/bus"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/egress/internal/audit"
	"github.com/berth-dev/berth/services/egress/internal/mint"
	"github.com/berth-dev/berth/services/egress/internal/names"
	"github.com/berth-dev/berth/services/egress/internal/proxy"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/upstream"
	"github.com/berth-dev/berth/services/egress/internal/web"
)

// gate is the parts of one.
type gate struct {
	cfg  Config
	host ids.Host
	conn *bus.Conn
	log  *slog.Logger

	m        *metrics
	spool    *audit.Spool
	policies *policies
	table    *session.Table
	outlet   *outlet
	minter   *mint.Authority
	secrets  *secrets
	engine   *web.Engine
	proxy    *proxy.Proxy
	doors    *doors

	leaseMu sync.Mutex
	until   time.Duration
}

// Run serves until ctx ends. conn is the identity gate-<host>. ready, when not nil, is called once the host's
// agent may call; the doors open when its router is there, and again when there is another one.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("gate: %w", err)
	}
	if self := conn.Self(); string(self.Host) != cfg.Host {
		return fmt.Errorf("gate: the bus login is %s, which is not the gate of host %s", self, cfg.Host)
	}
	g := &gate{cfg: cfg, host: ids.Host(cfg.Host), conn: conn, log: log}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := g.build(inner); err != nil {
		if g.spool != nil {
			g.spool.Close()
		}
		return err
	}
	defer g.m.close()
	return g.run(inner, ready)
}

// build makes the parts; nothing is open yet.
func (g *gate) build(ctx context.Context) (err error) {
	if g.m, err = newMetrics(); err != nil {
		return err
	}
	if g.secrets, err = newSecrets(g.conn); err != nil {
		return err
	}
	roots, err := g.cfg.roots()
	if err != nil {
		return err
	}
	dialer, err := g.dialer()
	if err != nil {
		return err
	}
	g.spool, err = audit.Open(audit.Config{Dir: g.cfg.Dir, Max: g.cfg.SpoolBytes, Lossy: g.cfg.WhenFull == allow, Log: g.log}, g.conn)
	if err != nil {
		return err
	}
	lost := func() { g.m.lost.Add(context.Background(), 1) }
	g.outlet = newOutlet(g.conn, g.host, g.log, lost)
	g.policies = newPolicies(g.conn, g.log)
	g.table = session.NewTable(session.Config{Host: g.cfg.Host, Policies: g.policies, Audit: g.spool, Outlet: g.outlet, Boot: boot,
		MaxConnections: g.cfg.MaxConnections, AllConnections: g.cfg.AllConnections, Log: g.log, Noted: g.m.noted,
		Kept: filepath.Join(g.cfg.Dir, "bytes.json")})
	g.policies.changed, g.policies.applied = g.table.Refresh, g.m.inForce
	g.minter = mint.New(ctx, g.certificate, time.Now, g.log)
	g.engine = web.New(web.Config{Upstream: dialer, Secrets: g.secrets, Roots: roots, Log: g.log,
		MaxRequests: g.cfg.MaxConnections + 64}) // so that some more can be told why not
	g.proxy = proxy.New(proxy.Config{Sessions: g.table, Dialer: dialer, Minter: g.minter, Web: g.engine, Denial: web.Denial, Log: g.log,
		Limits: proxy.Limits{All: g.cfg.AllConnections, PerSandbox: g.cfg.MaxConnections, Dial: g.cfg.DialTimeout}})
	at := g.cfg.Listener
	if at == nil {
		at = router(g.cfg.Router)
	}
	find := func(a netip.Addr) (names.Session, bool) { return g.table.Bound(a) }
	g.doors = &doors{at: at, proxy: g.proxy, names: names.New(find, g.log, g.m.asked), log: g.log, opened: g.m.opened}
	return g.m.watch(g)
}

// dialer makes what dials out.
func (g *gate) dialer() (upstream.Dialer, error) {
	servers, err := resolvers(g.cfg.Resolvers)
	if err != nil {
		return nil, err
	}
	static, err := g.cfg.static()
	if err != nil {
		return nil, err
	}
	return upstream.New(upstream.Config{Resolvers: servers, Static: static, Timeout: g.cfg.DialTimeout, Dialed: g.m.dialed}), nil
}

// boot is the time since the machine started, also while it was suspended.
func boot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 1<<63 - 1 // cannot happen on Linux; a lease that has run out is the safe side
	}
	return time.Duration(ts.Nano())
}

// certificate fetches an authority of this gate's own, as mint asks for it.
func (g *gate) certificate(ctx context.Context, public []byte) ([]byte, [][]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := bus.Invoke[*credentialsv1.EgressCAReply](ctx, g.conn, "credentials", "egress_ca", &credentialsv1.EgressCARequest{PublicKey: public})
	return r.GetCertificate(), r.GetRoots(), err
}

// roots are what sandboxes have to trust; empty while there is no authority.
func (g *gate) roots() []byte { return g.minter.Roots() }

// Times that the parts have to end in.
const (
	stopTime  = 5 * time.Second
	drainTime = 2 * time.Second
)

// run runs the parts until ctx ends. They end in this order: the words of the host, the doors, what is to be
// told, the audit log.
func (g *gate) run(ctx context.Context, ready func()) error {
	spoolCtx, stopSpool := context.WithCancel(context.WithoutCancel(ctx))
	tellCtx, stopTell := context.WithCancel(context.WithoutCancel(ctx))
	var spool, tell, rest sync.WaitGroup
	spool.Go(func() { g.spool.Run(spoolCtx, drainTime) })
	tell.Go(func() { g.outlet.run(tellCtx) })
	tell.Go(func() { g.table.Run(tellCtx) })
	defer func() {
		g.engine.Close()
		rest.Wait()
		stopTell()
		tell.Wait()
		stopSpool()
		spool.Wait()
		g.spool.Close()
	}()
	rest.Go(func() { g.policies.follow(ctx) })
	svc, err := g.serve(ctx)
	if err != nil {
		return err
	}
	rest.Go(func() { g.doors.run(ctx) })
	if ready != nil {
		ready()
	}
	<-ctx.Done()
	wait := stopTime
	if !g.conn.Connected() {
		wait = 500 * time.Millisecond // nobody hears that it ends
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), wait)
	defer cancel()
	if err := svc.Stop(end); err != nil && !errors.Is(err, context.Canceled) {
		g.log.Warn("the host's words were under way when the gate ended", "error", err)
	}
	return nil
}
