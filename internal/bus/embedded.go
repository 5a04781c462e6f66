package bus

import (
	"context"
	"crypto/tls"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
)

// EmbeddedConfig describes a whole bus inside this process.
type EmbeddedConfig struct {
	Dir         string            // logins are in Dir/keys and Dir/clients; nodes of a cluster share them
	Store       string            // the server's files, default Dir/bus
	Host        string            // default 127.0.0.1; see ServerConfig
	Port        int               // -1: a free one; 0: no TCP listener
	Advertise   string            // see ServerConfig
	Name        string            // see ServerConfig
	URL         string            // what client files say: the nodes, comma-separated; default this server's
	Callers     []subjects.Caller // besides the services, operator and keeper
	Callout     *CalloutConfig    // default: every caller is known to the server itself
	Declaration *Declaration      // default: the catalogue's, with three replicas in a cluster
	Cluster     *ClusterConfig    // default: a single server
	TLS         *tls.Config       // see ServerTLS; default: a certificate of the authority in Dir/tls
	Log         *slog.Logger
}

// Embedded is a running server with its keeper: streams and consumers are as
// declared when StartEmbedded returns.
type Embedded struct {
	*Server
	dir    string
	url    string
	log    *slog.Logger
	mu     sync.Mutex
	known  []subjects.Caller
	admin  *Conn
	keeper *Keeper
	quit   context.CancelFunc // of watchRoutes and renewLogins
}

// StartEmbedded makes missing keys and client files, starts the server and
// the keeper. In a cluster it waits, within ctx, for enough other nodes; keys
// must then be there already (EnsureKeys), because nodes that start at once
// would make different ones.
func StartEmbedded(ctx context.Context, cfg EmbeddedConfig) (*Embedded, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	decl := Declared(1)
	if cfg.Cluster != nil {
		decl = Declared(3)
	}
	if cfg.Declaration != nil {
		decl = *cfg.Declaration
	}
	e := &Embedded{dir: cfg.Dir, url: cfg.URL, log: cfg.Log, known: append(everyService(), cfg.Callers...)}
	if cfg.Callout != nil {
		e.known = append(e.known, subjects.Callout(), subjects.Warden())
	}
	users, err := EnsureKeys(cfg.Dir, cfg.URL, e.known)
	if err != nil {
		return nil, errs.E("start bus", errkind.Invalid, "", err)
	}
	own, err := cfg.ownTLS()
	if err != nil {
		return nil, errs.E("start bus", errkind.Invalid, "", err)
	}
	e.Server, err = StartServer(ServerConfig{TLS: own, StoreDir: orDefault(cfg.Store, filepath.Join(cfg.Dir, "bus")),
		Host: cfg.Host, Port: cfg.Port, Advertise: cfg.Advertise, Name: cfg.Name, Users: users, Callout: cfg.Callout, Cluster: cfg.Cluster})
	if err != nil {
		return nil, err
	}
	if err := e.keep(ctx, decl); err != nil {
		e.Close()
		return nil, err
	}
	beside, quit := context.WithCancel(context.WithoutCancel(ctx))
	e.quit = quit
	go e.renewLogins(beside)
	if cfg.Cluster != nil {
		go e.watchRoutes(beside, cfg.Cluster.nodes(), func() {
			e.log.Warn("this node does not reach a majority of the nodes and sends its clients to others")
		})
	}
	return e, nil
}

// keep writes the client files, now that the URL is known, and starts the
// keeper.
func (e *Embedded) keep(ctx context.Context, decl Declaration) (err error) {
	if _, err = EnsureKeys(e.dir, e.clientURL(), e.known); err != nil {
		return errs.E("start bus", errkind.Invalid, "", err)
	}
	if e.admin, err = e.Connect(ctx, subjects.Keeper()); err != nil {
		return err
	}
	e.keeper, err = StartKeeper(ctx, e.admin, decl, 30*time.Second)
	return err
}

func (e *Embedded) clientURL() string { return orDefault(e.url, e.URL()) }

func everyService() []subjects.Caller {
	out := []subjects.Caller{subjects.Keeper(), subjects.Operator()}
	for _, s := range subjects.Services {
		out = append(out, subjects.Service(s))
	}
	return out
}

// Allow lets more identities log in: their keys and client files are made.
func (e *Embedded) Allow(callers ...subjects.Caller) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	known := append([]subjects.Caller(nil), e.known...)
	for _, c := range callers {
		if !contains(known, c) {
			known = append(known, c)
		}
	}
	users, err := EnsureKeys(e.dir, e.clientURL(), known)
	if err != nil {
		return errs.E("allow bus users", errkind.Internal, "", err)
	}
	if err := e.SetUsers(users); err != nil {
		return err
	}
	e.known = known
	return nil
}

func contains(list []subjects.Caller, c subjects.Caller) bool {
	for _, x := range list {
		if x == c {
			return true
		}
	}
	return false
}

// Dir is where keys and client files lie.
func (e *Embedded) Dir() string { return e.dir }

// Login returns the login of a known caller.
func (e *Embedded) Login(c subjects.Caller) (Login, error) { return ReadLogin(LoginPath(e.dir, c)) }

// Connect logs a known caller in through memory.
func (e *Embedded) Connect(ctx context.Context, c subjects.Caller, opts ...Option) (*Conn, error) {
	l, err := e.Login(c)
	if err != nil {
		return nil, errs.E("connect to bus", errkind.Unauthenticated, c.Name(), err)
	}
	return Connect(ctx, l, append([]Option{WithLogger(e.log), InProcess(e.Server)}, opts...)...)
}

// Close stops keeper and server.
func (e *Embedded) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if e.quit != nil {
		e.quit()
	}
	if e.keeper != nil {
		e.keeper.Stop(ctx)
	}
	if e.admin != nil {
		e.admin.Close()
	}
	e.Shutdown()
}
