package bus

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats-server/v2/server"
)

// SyncInterval is how often streams that are written asynchronously are
// synced; what was acknowledged twice as long ago is on the disk.
const SyncInterval = 5 * time.Second

// ServerConfig describes an embedded server.
type ServerConfig struct {
	StoreDir string // JetStream's files; private to this server
	Host     string // default 127.0.0.1
	Port     int    // -1: a free one; 0: no TCP listener at all
	Name     string // default "berth"
	Users    []User // who may log in; nobody else can
}

// Server is an embedded nats-server with JetStream, a system account and one
// account APP. Only nkeys log in.
type Server struct {
	ns   *server.Server
	opts *server.Options
	app  *server.Account
}

// StartServer starts an embedded server and waits until it answers.
func StartServer(cfg ServerConfig) (*Server, error) {
	const op = "start bus server"
	if cfg.StoreDir == "" {
		return nil, errs.E(op, errkind.Invalid, "", "no store folder is given")
	}
	if len(cfg.Users) == 0 {
		return nil, errs.E(op, errkind.Invalid, "", "no users are given, and nobody may log in without a key")
	}
	if err := os.MkdirAll(cfg.StoreDir, 0o700); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	s := &Server{app: server.NewAccount("APP")}
	s.opts = s.options(cfg)
	ns, err := server.NewServer(s.opts)
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	s.ns = ns
	go ns.Start()
	if !ns.ReadyForConnections(20 * time.Second) {
		ns.Shutdown()
		return nil, errs.E(op, errkind.Unavailable, "", fmt.Sprintf("it did not answer on %s:%d within 20 s; is the port taken?", s.opts.Host, s.opts.Port))
	}
	app, err := ns.LookupAccount("APP")
	if err == nil && !app.JetStreamEnabled() {
		err = app.EnableJetStream(nil, nil)
	}
	if err != nil {
		ns.Shutdown()
		return nil, errs.E(op, errkind.Unavailable, "", fmt.Errorf("enable JetStream in %s: %w", cfg.StoreDir, err))
	}
	return s, nil
}

func (s *Server) options(cfg ServerConfig) *server.Options {
	sys := server.NewAccount("SYS")
	o := &server.Options{
		ServerName:         orDefault(cfg.Name, "berth"),
		Host:               orDefault(cfg.Host, "127.0.0.1"),
		Port:               cfg.Port,
		DontListen:         cfg.Port == 0,
		NoSigs:             true,
		NoLog:              true,
		JetStream:          true,
		StoreDir:           filepath.Clean(cfg.StoreDir),
		SyncAlways:         true, // streams declared Async are exempt
		SyncInterval:       SyncInterval,
		JetStreamMaxStore:  declaredBytes() * 5 / 4,
		JetStreamMaxMemory: 256 * subjects.MiB,
		MaxPayload:         MaxPayload,
		MaxPending:         64 << 20,
		WriteDeadline:      10 * time.Second,
		PingInterval:       20 * time.Second,
		MaxControlLine:     4096,
		Accounts:           []*server.Account{sys, s.app},
		SystemAccount:      "SYS",
		Nkeys:              s.nkeyUsers(cfg.Users),
	}
	return o
}

// SetUsers replaces who may log in; connections of users that are gone end.
func (s *Server) SetUsers(users []User) error {
	o := s.opts.Clone()
	o.Nkeys = s.nkeyUsers(users)
	if err := s.ns.ReloadOptions(o); err != nil {
		return errs.E("change bus users", errkind.Internal, "", err)
	}
	s.opts = o
	return nil
}

func (s *Server) nkeyUsers(users []User) []*server.NkeyUser {
	out := make([]*server.NkeyUser, 0, len(users))
	for _, u := range users {
		out = append(out, &server.NkeyUser{Nkey: u.Public, Account: s.app, Permissions: PermissionsOf(u.Caller).server()})
	}
	return out
}

// URL is where clients of other processes connect; empty without a listener.
func (s *Server) URL() string {
	if s.opts.DontListen {
		return ""
	}
	return s.ns.ClientURL()
}

// Shutdown stops the server and waits until its files are closed.
func (s *Server) Shutdown() {
	s.ns.Shutdown()
	s.ns.WaitForShutdown()
}

func orDefault(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
