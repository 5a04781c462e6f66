package stack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials"
	"github.com/berth-dev/berth/services/egress"
	"github.com/berth-dev/berth/services/egress/gate"
	"github.com/berth-dev/berth/services/hostagent"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
	"github.com/berth-dev/berth/services/lifecycle"
	"github.com/berth-dev/berth/services/pool"
	"github.com/berth-dev/berth/services/scheduler"
)

// Info says how to reach a running stack; it is <dir>/up.json while it is ready.
type Info struct {
	PID     int    `json:"pid"`
	URL     string `json:"url"`
	Issuer  string `json:"issuer"`
	Clients string `json:"clients"`
	Metrics string `json:"metrics,omitempty"`
	// Marks tell this installation's processes, mounts and cgroups from another's.
	Marks []string `json:"marks"`
}

const infoFile = "up.json"

// ErrNotRoot is said before anything else is looked for.
var ErrNotRoot = errors.New("berth up must run as root: it makes namespaces, mounts and cgroups")

// stack is one running assembly.
type stack struct {
	cfg   Config
	log   *slog.Logger
	bus   *bus.Embedded
	tele  *obs.Telemetry
	mu    sync.Mutex
	conns map[subjects.Caller]*bus.Conn
}

// Run runs everything until ctx ends, then puts active sessions to sleep and
// stops in order. ready is called once everything serves.
func Run(ctx context.Context, cfg Config, log *slog.Logger, ready func(Info)) error {
	if err := cfg.Complete(); err != nil {
		return err
	}
	if err := preflight(cfg); err != nil {
		return err
	}
	unlock, err := Lock(cfg.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	s := &stack{cfg: cfg, log: log, conns: map[subjects.Caller]*bus.Conn{}}
	defer s.close()
	if err := s.foundation(ctx); err != nil {
		return err
	}
	services, err := s.services(ctx)
	if err != nil {
		return err
	}
	return s.serve(ctx, services, ready)
}

// preflight finds the machine fit, before anything is made.
func preflight(cfg Config) error {
	if cfg.Host.Driver != "null" && os.Geteuid() != 0 {
		return ErrNotRoot
	}
	for _, addr := range []string{cfg.Listen, cfg.MetricsListen} {
		if addr == "" {
			continue
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return fmt.Errorf("the address %s cannot be used: %w", addr, err)
		}
		l.Close()
	}
	return hostagent.Preflight(cfg.Host)
}

// Lock takes the state folder for this process.
func Lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the state folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another berth up uses the state folder %s", dir)
	}
	return func() { f.Close() }, nil
}

// foundation starts telemetry and the bus.
func (s *stack) foundation(ctx context.Context) (err error) {
	if err := RemoveInfo(s.cfg.Dir); err != nil {
		return err
	}
	if s.tele, err = obs.Setup(ctx, "berth-up", "0.1.0", s.cfg.Telemetry); err != nil {
		return err
	}
	host, port, err := splitAddr(s.cfg.Listen)
	if err != nil {
		return err
	}
	if port == 0 {
		port = -1
	}
	callers, err := s.cfg.Callers(s.cfg.Host.Host)
	if err != nil {
		return err
	}
	decl, err := s.cfg.Declaration(1)
	if err != nil {
		return err
	}
	callout, err := bus.EnsureCallout(s.cfg.Dir)
	if err != nil {
		return err
	}
	s.bus, err = bus.StartEmbedded(ctx, bus.EmbeddedConfig{Dir: s.cfg.Dir, Host: host, Port: port, Callers: callers, Callout: &callout, Declaration: &decl, Log: s.log})
	return err
}

// services in order of start; each is ready before the next begins.
func (s *stack) services(ctx context.Context) ([]svc.Service, error) {
	cfg := s.cfg
	tenants, err := cfg.DevIssuers()
	if err != nil {
		return nil, err
	}
	cfg.Scheduler.Log = s.log
	host, err := ids.ParseHost(cfg.Host.Host)
	if err != nil {
		return nil, err
	}
	if err := cfg.BusLogins(cfg.Host.Host); err != nil {
		return nil, err
	}
	cfg.Identity.Callout.Connect = func(ctx context.Context, c subjects.Caller) (*bus.Conn, error) { return s.bus.Connect(ctx, c) }
	conns := map[string]*bus.Conn{}
	for _, name := range subjects.Services {
		c := subjects.Service(name)
		if conns[c.Name()], err = s.connect(ctx, c); err != nil {
			return nil, err
		}
	}
	logger := s.logger
	return append([]svc.Service{
		svc.Func("devissuer", func(ctx context.Context, ready func()) error {
			return devissuer.Run(ctx, devissuer.Config{Dir: cfg.Keys(), Tenants: tenants}, logger("devissuer"), ready)
		}),
		svc.Func("scheduler", func(ctx context.Context, ready func()) error {
			cfg := cfg.Scheduler
			cfg.Ready = ready
			return scheduler.Run(ctx, cfg, conns["svc-scheduler"])
		}),
		svc.Func("credentials", func(ctx context.Context, ready func()) error {
			return credentials.Run(ctx, cfg.Credentials, conns["svc-credentials"], logger("credentials"), ready)
		}),
		svc.Func("pool", func(ctx context.Context, ready func()) error {
			cfg := cfg.Pool
			cfg.Alone = true // by the lock of the state folder
			return pool.Run(ctx, cfg, conns["svc-pool"], logger("pool"), ready)
		}),
		svc.Func("egress", func(ctx context.Context, ready func()) error {
			return egress.Run(ctx, cfg.Egress, conns["svc-egress"], logger("egress"), ready)
		}),
		svc.Func("lifecycle", func(ctx context.Context, ready func()) error {
			return lifecycle.Run(ctx, cfg.Lifecycle, conns["svc-lifecycle"], logger("lifecycle"), ready)
		}),
		svc.Func("identity", func(ctx context.Context, ready func()) error {
			return identity.Run(ctx, cfg.Identity, conns["svc-identity"], logger("identity"), ready)
		}),
	}, s.machine(cfg, host)...), nil
}

func (s *stack) logger(service string) *slog.Logger { return s.log.With("service", service) }

// machine is the host and, where its sandboxes have a network, its gate. Identity lets them in.
func (s *stack) machine(cfg Config, host ids.Host) []svc.Service {
	out := []svc.Service{svc.Func("hostagent", func(ctx context.Context, ready func()) error {
		conn, err := s.connect(ctx, subjects.Host(host))
		if err != nil {
			return err
		}
		return hostagent.Run(ctx, cfg.Host, conn, ociimage.LoadContext, s.logger("hostagent"), ready)
	})}
	if !cfg.Gated() {
		return out
	}
	return append(out, svc.Func("gate", func(ctx context.Context, ready func()) error {
		conn, err := s.connect(ctx, subjects.Gate(host))
		if err != nil {
			return err
		}
		return gate.Run(ctx, cfg.Gate, conn, s.logger("gate"), ready)
	}))
}

// loginTime is how long a login is tried.
const loginTime = 30 * time.Second

// connect logs a caller in, once; the connection lasts as long as the stack.
func (s *stack) connect(ctx context.Context, c subjects.Caller) (*bus.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if conn := s.conns[c]; conn != nil {
		return conn, nil
	}
	ctx, cancel := context.WithTimeout(ctx, loginTime)
	defer cancel()
	conn, err := s.bus.Connect(ctx, c)
	if err == nil {
		s.conns[c] = conn
	}
	return conn, err
}

// serve runs the services until ctx ends, then lets sessions sleep first.
func (s *stack) serve(ctx context.Context, services []svc.Service, ready func(Info)) error {
	issuer, err := devissuer.Address(s.cfg.Keys())
	if err != nil {
		return err
	}
	info := Info{PID: os.Getpid(), URL: s.bus.URL(), Issuer: "http://" + issuer, Clients: filepath.Join(s.cfg.Dir, "clients"),
		Marks: append(s.cfg.Host.Marks(), s.cfg.Dir)}
	stopMetrics, err := s.metrics(&info)
	if err != nil {
		return err
	}
	defer stopMetrics()
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group := svc.NewGroup(svc.Options{Log: s.log, MustStart: 3 * time.Minute}, services...)
	go func() {
		<-ctx.Done()
		if err := RemoveInfo(s.cfg.Dir); err != nil {
			s.log.Warn("it still says that it is ready", "error", err)
		}
		if group.Healthy() && !s.cfg.LeaveRunning {
			s.drain(running)
		}
		stop()
	}()
	return group.Run(running, func() {
		if err := WriteInfo(s.cfg.Dir, info); err != nil {
			s.log.Error("cannot say that it is ready", "error", err)
		}
		if ready != nil {
			ready(info)
		}
	})
}

// WriteInfo says how to reach what runs on a state folder.
func WriteInfo(dir string, info any) error {
	raw, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, infoFile)
	if err := os.WriteFile(path+".new", append(raw, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// RemoveInfo says that nothing can be reached there.
func RemoveInfo(dir string) error {
	if err := os.Remove(filepath.Join(dir, infoFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (s *stack) metrics(info *Info) (stop func(), err error) {
	if s.cfg.MetricsListen == "" {
		return func() {}, nil
	}
	l, err := s.cfg.Telemetry.Listen(s.cfg.MetricsListen)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", s.tele.MetricsHandler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("metrics are not served any more", "error", err)
		}
	}()
	scheme := "http://"
	if s.cfg.Telemetry.MetricsCert != "" {
		scheme = "https://"
	}
	info.Metrics = scheme + l.Addr().String() + "/metrics"
	return func() { server.Close() }, nil
}

func (s *stack) close() {
	for _, c := range s.conns {
		c.Close()
	}
	if s.bus != nil {
		s.bus.Close()
	}
	if s.tele != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := s.tele.Shutdown(ctx); err != nil {
			s.log.Warn("telemetry is incomplete", "error", err)
		}
	}
}
