package bus

import (
	"crypto/tls"
	"errors"
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
	StoreDir  string // JetStream's files; private to this server
	Host      string // where clients connect, default 127.0.0.1; 0.0.0.0 is every address of the network namespace
	Port      int    // -1: a free one; 0: no TCP listener at all
	Advertise string // host:port that clients are told, if it is not Host and Port; needed with 0.0.0.0 in a cluster
	Name      string // unique in a cluster; default "berth"
	Users     []User // who may log in by themselves; without Callout nobody else can
	Callout   *CalloutConfig
	Cluster   *ClusterConfig
	TLS       *tls.Config // of the port for clients, needed with one; see ServerTLS
}

// Server is an embedded nats-server with JetStream, a system account, the account AUTH of the auth
// callout and one account APP. Nobody logs in without an nkey, or a token that identity accepts.
type Server struct {
	ns       *server.Server
	opts     *server.Options
	accounts map[string]*server.Account
	callout  *CalloutConfig
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
	if cfg.Cluster != nil {
		if err := cfg.Cluster.validate(cfg.Name); err != nil {
			return nil, errs.E(op, errkind.Invalid, cfg.Name, err)
		}
	}
	if err := sameKind(cfg.StoreDir, cfg.Cluster != nil); err != nil {
		return nil, err
	}
	s := &Server{}
	if err := s.options(cfg); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
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
	if app, err := ns.LookupAccount(appAccount); err != nil || !app.JetStreamEnabled() {
		ns.Shutdown()
		return nil, errs.E(op, errkind.Unavailable, "", fmt.Errorf("JetStream in %s does not start: %w", cfg.StoreDir, errors.Join(err, errors.New("see whether its files can be read and written"))))
	}
	return s, nil
}

// accounts enables JetStream in APP from the first moment: a node that
// returns to its cluster loads the streams of enabled accounts only.
const accounts = `
system_account: SYS
accounts {
  SYS {}
  AUTH {}
  APP { jetstream: enabled }
}
`

func (s *Server) options(cfg ServerConfig) error {
	o := &server.Options{}
	if err := o.ProcessConfigString(accounts); err != nil {
		return err
	}
	s.accounts = map[string]*server.Account{}
	for _, a := range o.Accounts {
		s.accounts[a.Name] = a
	}
	o.ServerName = orDefault(cfg.Name, "berth")
	o.Host = orDefault(cfg.Host, "127.0.0.1")
	o.Port = cfg.Port
	o.DontListen = cfg.Port == 0
	o.ClientAdvertise = cfg.Advertise
	o.NoSigs, o.NoLog = true, true
	o.JetStream = true
	o.StoreDir = filepath.Clean(cfg.StoreDir)
	o.SyncAlways = true // streams declared Async are exempt, while they have one replica
	o.SyncInterval = SyncInterval
	// Per server: three on one machine may use thrice as much of its disk.
	o.JetStreamMaxStore = declaredBytes() * 5 / 4
	o.JetStreamMaxMemory = 256 * subjects.MiB
	o.MaxPayload = MaxPayload
	o.MaxPending = 64 << 20
	o.WriteDeadline = 10 * time.Second
	o.PingInterval = 20 * time.Second
	o.MaxControlLine = 4096
	s.callout = cfg.Callout
	o.Nkeys = s.nkeyUsers(cfg.Users)
	if cfg.Callout != nil {
		if err := cfg.Callout.ask(o); err != nil {
			return err
		}
	}
	if cfg.Cluster != nil {
		cfg.Cluster.join(o)
	}
	s.opts = o
	return cfg.transport(o)
}

// SetUsers replaces who may log in; connections of users that are gone end. Of a server that asks
// identity it changes those only that the server itself knows.
func (s *Server) SetUsers(users []User) error {
	o := s.opts.Clone()
	o.Nkeys = s.nkeyUsers(users)
	if s.callout != nil {
		if err := s.callout.ask(o); err != nil {
			return errs.E("change bus users", errkind.Internal, "", err)
		}
	}
	if err := s.ns.ReloadOptions(o); err != nil {
		return errs.E("change bus users", errkind.Internal, "", err)
	}
	s.opts = o
	return nil
}

func (s *Server) nkeyUsers(users []User) []*server.NkeyUser {
	out := make([]*server.NkeyUser, 0, len(users))
	for _, u := range s.callout.known(users) {
		out = append(out, &server.NkeyUser{Nkey: u.Public, Account: s.accounts[accountOf(u.Caller)], Permissions: PermissionsOf(u.Caller).server()})
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
