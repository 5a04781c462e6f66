package credentials

import (
	"context"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/auditlog"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/keyfile"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	tickEvery    = 10 * time.Second
	compactEvery = time.Hour
	startWait    = 30 * time.Second
	// keepMarks is longer than a revocation can stay on the list, which is at
	// most an hour and the skew of clocks.
	keepMarks = 3 * time.Hour
)

// service is running credentials.
type service struct {
	cfg   Config
	conn  *bus.Conn
	log   *slog.Logger
	store store
	// platform is open while the service runs.
	platform *platform.Key
	box      *seal.Box
	audit    *auditlog.Log
	rpc      *bus.Service
	stop     context.CancelFunc
	done     chan struct{}

	mu       sync.Mutex
	state    core.State
	secrets  map[ids.KeyID]ed25519.PrivateKey
	verifier *grant.Verifier          // nil: make it again
	feed     string                   // names this run
	seq      uint64                   // counts the changes of what jwks answers
	told     *credentialsv1.JwksReply // what jwks answers a host at seq; nil: make it again

	ending sync.Mutex // one ending is decided and stored at a time

	tenantSecrets secretStore
	egressRoots   rootStore
	toldOnce      told
}

// Run runs the service until ctx ends and calls ready once it has a signing
// key and answers; conn must be logged in as credentials.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger, ready func()) error {
	s, err := start(ctx, cfg, conn, log)
	if err != nil {
		return err
	}
	ready()
	<-ctx.Done()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return s.end(stop)
}

func start(ctx context.Context, cfg Config, conn *bus.Conn, log *slog.Logger) (*service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	curve, err := keyfile.Open(filepath.Join(cfg.KeyDir, "credentials-curve.json"))
	if err != nil {
		return nil, err
	}
	s := &service{cfg: cfg, conn: conn, log: log, done: make(chan struct{}), feed: string(ids.NewRequestID()), seq: 1}
	s.state = core.NewState(core.Policy{TTL: cfg.GrantTTL, MaxAuth: cfg.MaxSinceToken, Rotate: cfg.RotateKeys, Ahead: cfg.PublishAhead})
	if s.box, err = seal.BoxOf(curve.Newest().Secret); err != nil {
		return nil, err
	}
	starting, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	if s.platform, err = platform.Open(starting, cfg.PlatformKey, filepath.Join(cfg.KeyDir, "credentials-platform.json")); err != nil {
		return nil, err
	}
	if err := s.begin(starting, ctx); err != nil {
		return nil, errors.Join(err, s.platform.Close())
	}
	return s, nil
}

// open opens the buckets and reads what the service keeps in memory.
func (s *service) open(starting context.Context) (err error) {
	s.store.locks = new(locks)
	if s.store.records, err = vault.Open(starting, s.conn, "BERTH_CREDENTIALS", s.platform); err != nil {
		return err
	}
	if s.store.dataKeys, err = vault.Open(starting, s.conn, "BERTH_DATAKEYS", s.platform); err != nil {
		return err
	}
	if s.tenantSecrets.vault, err = vault.Open(starting, s.conn, "BERTH_SECRETS", s.platform); err != nil {
		return err
	}
	s.egressRoots.vault = s.tenantSecrets.vault
	had, err := s.store.load(starting)
	if err == nil {
		s.secrets, s.state.Keys, s.state.Revoked, s.state.Ended = had.secrets, had.keys, had.revoked, had.ended
	}
	return err
}

func (s *service) begin(starting, ctx context.Context) (err error) {
	if err := s.open(starting); err != nil {
		return err
	}
	s.audit = auditlog.New(s.conn, s.log)
	defer func() {
		if err != nil {
			s.audit.Close(starting)
		}
	}()
	if err := s.tick(starting); err != nil {
		return err
	}
	if s.rpc, err = s.conn.Serve(ctx, bus.ServiceConfig{Name: "credentials", Description: "grants, signing keys, data keys and secrets", Limit: s.cfg.Limit}); err != nil {
		return err
	}
	err = errors.Join(
		bus.Handle(s.rpc, "mint", s.mint), bus.Handle(s.rpc, "renew", s.renew), bus.Handle(s.rpc, "revoke", s.revoke),
		bus.Handle(s.rpc, "end_grants", s.endGrants), bus.Handle(s.rpc, "datakey", s.dataKey), bus.Handle(s.rpc, "jwks", s.jwks), s.rpc.HandleRetry(),
		bus.Handle(s.rpc, "secret_put", s.secretPut), bus.Handle(s.rpc, "secrets", s.secretList), bus.Handle(s.rpc, "secret_remove", s.secretRemove),
		bus.Handle(s.rpc, "reveal", s.reveal), bus.Handle(s.rpc, "egress_ca", s.egressCA),
		s.conn.NATS().FlushWithContext(starting)) // ready means that the server knows the subjects
	if err != nil {
		return errors.Join(err, s.rpc.Stop(starting))
	}
	if aerr := s.rpc.Announce(); aerr != nil {
		s.log.Warn("cannot say that credentials serves", "error", aerr)
	}
	var life context.Context
	life, s.stop = context.WithCancel(ctx)
	go s.keepTime(life)
	return nil
}

// end answers what is under way, writes the audit records and returns.
func (s *service) end(ctx context.Context) error {
	s.stop()
	<-s.done
	err := s.rpc.Stop(ctx)
	s.audit.Close(ctx)
	return errors.Join(err, s.platform.Close())
}

// keepTime rotates keys and forgets what is over.
func (s *service) keepTime(ctx context.Context) {
	defer close(s.done)
	tick, compact := time.NewTicker(tickEvery), time.NewTicker(compactEvery)
	defer tick.Stop()
	defer compact.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			err = s.tick(ctx)
		case <-compact.C:
			err = errors.Join(s.store.records.Compact(ctx, keepMarks), s.store.dataKeys.Compact(ctx, keepMarks),
				s.tenantSecrets.sweep(ctx), s.tenantSecrets.vault.Compact(ctx, keepMarks))
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("upkeep of keys and revocations failed; it is tried again", "error", err)
		}
	}
}

func (s *service) tick(ctx context.Context) error {
	cmds, err := s.decide(core.Tick{})
	if err != nil {
		return err
	}
	for _, c := range cmds {
		switch c := c.(type) {
		case core.MakeKey:
			err = errors.Join(err, s.makeKey(ctx, c.Key))
		case core.DropKey:
			err = errors.Join(err, s.store.dropSigningKey(ctx, c.ID))
			s.forget(c.ID)
		case core.DropRevocation:
			err = errors.Join(err, s.store.dropRevocation(ctx, c.Generation))
		case core.DropEnding:
			err = errors.Join(err, s.dropEnding(ctx, c.Scope))
		}
	}
	return err
}

func (s *service) makeKey(ctx context.Context, want core.SigningKey) error {
	key, secret, err := s.store.makeSigningKey(ctx, want)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.secrets[key.ID] = secret
	s.mu.Unlock()
	cmds, err := s.decide(core.KeyMade{Key: key})
	if err != nil {
		return err
	}
	s.record(ctx, cmds)
	return nil
}

func (s *service) forget(id ids.KeyID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.secrets, id)
}

// decide applies an event to the state.
func (s *service) decide(ev core.Event) ([]core.Command, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next, cmds, err := core.Decide(s.state, ev, time.Now())
	s.state = next
	if changesKeySet(cmds) {
		s.verifier, s.told = nil, nil
		s.seq++
	}
	return cmds, err
}

// record queues the audit records among cmds.
func (s *service) record(ctx context.Context, cmds []core.Command) {
	for _, c := range cmds {
		a, ok := c.(core.Audit)
		if !ok {
			continue
		}
		body := &credentialsv1.Audit{
			Session: refOf(a.Session), What: a.What, GrantId: a.GrantID, At: timestamppb.Now(), Reason: a.Reason,
			Actor: &corev1.Actor{Tenant: string(a.Actor.Tenant), Issuer: a.Actor.Issuer, Subject: a.Actor.Subject, Frontend: string(a.Actor.Frontend),
				Acting: a.Actor.Acting, Role: a.Actor.Role},
		}
		if !a.Expires.IsZero() {
			body.ExpiresAt = timestamppb.New(a.Expires)
		}
		s.audit.Record(ctx, subjects.Audit("credentials", a.Session.Tenant, a.Session.Session), body)
	}
}

func refOf(s core.Session) *corev1.SessionRef {
	if s.Session == "" {
		return nil
	}
	return &corev1.SessionRef{Tenant: string(s.Tenant), Session: string(s.Session),
		Generation: &corev1.Stamp{Incarnation: s.Generation.Generation.Incarnation, Index: s.Generation.Generation.Index},
		Epoch:      &corev1.Stamp{Incarnation: s.Epoch.Incarnation, Index: s.Epoch.Index}}
}
