package identity

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/auditlog"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/identity/internal/acting"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/handles"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

// sessionKeyFile in Config.KeyDir holds the key that session keys are derived with.
const sessionKeyFile = "identity-session.json"

// auditDir there holds audit records that are not on the bus.
const auditDir = "identity-audit"

// curveFile there holds the key that requests are sealed to.
const curveFile = "identity-curve.json"

const (
	startWait = 30 * time.Second
	stopWait  = 10 * time.Second
	// longest is a little more than the longest wait for capacity.
	longest = 11 * time.Minute
)

type service struct {
	conn   *bus.Conn
	log    *slog.Logger
	derive *sessionKeys
	curve  []*seal.Box // open requests; newest first
	box    *seal.Box   // seals answers and speaks with credentials; lives as long as the process
	audit  *auditlog.Log

	acting  *acting.Ledger
	handles *handles.Keys

	registry *registry.Store
	viewing  sync.Mutex
	viewed   *view
	follow   context.Context // ends after the doors are shut
	ending   sync.WaitGroup  // of grants, of whoever was shut out
	unended  underWay        // whose grants end once more

	rpc     *bus.Service
	durable *bus.Consumer

	mu       sync.Mutex
	credsKey string // curve key of credentials
}

// Run runs the service until ctx ends and calls ready once both doors are
// open; conn must be logged in as identity.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	s, err := newService(cfg, conn, log)
	if err != nil {
		return err
	}
	if s.audit, err = auditlog.Open(conn, log, cmp.Or(cfg.AuditDir, filepath.Join(cfg.KeyDir, auditDir))); err != nil {
		return err
	}
	go s.derive.watch(ctx)
	follow, quit := context.WithCancel(context.WithoutCancel(ctx))
	s.follow = follow
	var in *logins
	if err = s.openDelegation(ctx); err == nil {
		err = s.openRegistry(ctx, cfg)
	}
	if err == nil {
		in, err = s.serveLogins(ctx, cfg)
	}
	if err == nil {
		err = s.openDoors(ctx, cfg)
	}
	if err == nil {
		if aerr := s.rpc.Announce(); aerr != nil {
			log.Warn("cannot say that identity serves", "error", aerr)
		}
		ready()
		<-ctx.Done()
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopWait)
	defer cancel()
	if s.durable != nil {
		s.durable.Stop(stop)
	}
	if s.rpc != nil {
		err = errors.Join(err, s.rpc.Stop(stop))
	}
	in.stop(stop)
	quit()
	s.closeRegistry()
	s.closeDelegation()
	s.audit.Close(stop)
	return err
}

func newService(cfg Config, conn *bus.Conn, log *slog.Logger) (*service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &service{conn: conn, log: log}
	var err error
	if s.derive, err = openSessionKeys(filepath.Join(cfg.KeyDir, sessionKeyFile), log); err != nil {
		return nil, err
	}
	curve, err := keyfile.Open(filepath.Join(cfg.KeyDir, curveFile))
	if err != nil {
		return nil, err
	}
	for _, k := range curve {
		key, err := seal.BoxOf(k.Secret)
		if err != nil {
			return nil, err
		}
		s.curve = append(s.curve, key)
	}
	if err := s.openHandles(cfg); err != nil {
		return nil, err
	}
	s.box, err = seal.RandomBox()
	return s, err
}

// doors are the verbs of the direct door.
var doors = []string{core.Open, core.Close, core.Delete, core.Renew, core.Status, core.Frontends, core.RevokeFrontend,
	core.AdminSessions, core.AdminAttach, core.AdminSuspend}

func (s *service) openDoors(ctx context.Context, cfg Config) (err error) {
	starting, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	s.rpc, err = s.conn.Serve(ctx, bus.ServiceConfig{Name: "identity", Description: "who is asking", Limit: cfg.Limit})
	if err != nil {
		return err
	}
	for _, verb := range doors {
		if err := s.rpc.HandleRaw(verb, s.direct); err != nil {
			return err
		}
	}
	if err := s.rpc.HandleRaw("keys", s.keys); err != nil {
		return err
	}
	if err := bus.Handle(s.rpc, core.OperatorAttach, s.operatorAttach); err != nil {
		return err
	}
	if err := s.serveRegistry(); err != nil {
		return err
	}
	spec := bus.Spec("identity-requests", cfg.Workers)
	spec.Timeout = longest
	if s.durable, err = s.conn.Consume(ctx, spec, func(ctx context.Context, m *bus.Msg) error {
		return s.stored(ctx, m, spec.MaxDeliver)
	}); err != nil {
		return err
	}
	if err := s.rpc.HandleRetry(s.durable); err != nil {
		return err
	}
	return s.conn.NATS().FlushWithContext(starting) // ready means that the server knows the subjects
}
