// Package sdktest is Berth in memory, for the tests of frontends: a real bus
// with real subjects, logins and permissions, and behind it a fake identity,
// scheduler and host that keep sessions, files and processes (Go functions)
// in memory.
//
// It guarantees that a frontend that works against it speaks the contract:
// requests are sealed, grants and proofs are checked, credits, offsets and
// idempotency keys mean what they mean on a real host. Conformance is the
// suite that holds both to the same behaviour. What it does not have: real
// isolation, a shell (sh knows a few words), durability. Its hosts are names: a
// session that loses one wakes on the other.
package sdktest

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
)

// Options of a Server.
type Options struct {
	Dir       string // for the bus's store and the client files; must exist
	Tenants   []string
	GrantLife time.Duration // default 15 minutes
	Idle      time.Duration // told to clients; nothing falls asleep by itself
}

// Frontend is the name of the one frontend that every tenant has.
const Frontend = "app"

// Issuer is the issuer of the fake's users.
const Issuer = "https://issuer.sdktest"

// Server is Berth in memory. Its methods are safe for concurrent use.
type Server struct {
	opts     Options
	ns       *server.Server
	bus      *server.Options // as it was started
	nc       *nats.Conn
	js       jetstream.JetStream
	identity seal.XKey
	hostKey  seal.XKey
	signer   ed25519.PrivateKey
	ctx      context.Context
	stop     context.CancelFunc

	drop   atomic.Int64 // frames to lose
	lapsed atomic.Int64 // streams that ended with their grant

	mu       sync.Mutex
	tokens   map[string]user
	acting   acting
	sessions map[string]*session // by key
	outcomes map[string]outcome
	programs map[string]Program
	streams  map[string]*hostStream
	index    uint64 // of the fake's raft
	failure  string // why opens are refused
	saves    checkpoints
	hosts    []*fakeHost
	peers    []*schedulerv1.Peer
	faults   faults

	policies         []*egressv1.Policy
	policyGeneration uint64
	shown            map[shownBy]int64 // until when a holder of grants keeps its streams, in Unix seconds
}

type user struct{ tenant, subject string }

// Start runs a Server for the length of a test, with the tenants acme and
// umbrella.
func Start(t testing.TB) *Server {
	t.Helper()
	s, err := New(Options{Dir: t.TempDir(), Tenants: []string{"acme", "umbrella"}})
	if err != nil {
		t.Fatalf("start the fake: %v", err)
	}
	t.Cleanup(s.Close)
	return s
}

// New starts a Server.
func New(o Options) (*Server, error) {
	if o.GrantLife <= 0 {
		o.GrantLife = 15 * time.Minute
	}
	if o.Idle <= 0 {
		o.Idle = 15 * time.Minute
	}
	s := &Server{opts: o, tokens: map[string]user{}, sessions: map[string]*session{}, outcomes: map[string]outcome{},
		programs: builtins(), streams: map[string]*hostStream{}, shown: map[shownBy]int64{}, index: 100,
		hosts: newHosts(), peers: []*schedulerv1.Peer{{Id: "scheduler-1", Addr: "127.0.0.1:7801", Voter: true, Leader: true}}}
	s.ctx, s.stop = context.WithCancel(context.Background())
	var err error
	if s.identity, err = seal.NewKey(rand.Reader); err != nil {
		return nil, err
	}
	if s.hostKey, err = seal.NewKey(rand.Reader); err != nil {
		return nil, err
	}
	if _, s.signer, err = ed25519.GenerateKey(rand.Reader); err != nil {
		return nil, err
	}
	if err := s.startBus(); err != nil {
		s.Close()
		return nil, err
	}
	if err := s.serve(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close ends everything.
func (s *Server) Close() {
	s.stop()
	if s.nc != nil {
		s.nc.Close()
	}
	if s.ns != nil {
		s.ns.Shutdown()
		s.ns.WaitForShutdown()
	}
}

// startBus runs the bus with one login for every client.
func (s *Server) startBus() error {
	all := server.SubjectPermission{Allow: []string{">"}}
	me, mySeed, err := login(&server.Permissions{Publish: &all, Subscribe: &all})
	if err != nil {
		return err
	}
	users, seeds := []*server.NkeyUser{me}, map[subjects.Caller]string{}
	callers := []subjects.Caller{subjects.Operator()}
	for _, t := range s.opts.Tenants {
		if _, err := ids.ParseTenant(t); err != nil {
			return err
		}
		callers = append(callers, subjects.Frontend(ids.Tenant(t), Frontend))
	}
	for _, c := range callers {
		u, seed, err := login(permissions(c))
		if err != nil {
			return err
		}
		users, seeds[c] = append(users, u), seed
	}
	conf, ca, err := certificate()
	if err != nil {
		return err
	}
	s.bus = &server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, NoSigs: true, NoLog: true, TLSConfig: conf, TLSTimeout: 5,
		StoreDir: filepath.Join(s.opts.Dir, "bus"), Nkeys: users}
	if s.ns, err = server.NewServer(s.bus.Clone()); err != nil {
		return err
	}
	s.ns.Start()
	if !s.ns.ReadyForConnections(10 * time.Second) {
		return errors.New("the embedded bus does not listen")
	}
	if err := os.MkdirAll(filepath.Join(s.opts.Dir, "clients"), 0o700); err != nil {
		return err
	}
	for _, c := range callers {
		f := sdk.ClientFile{URL: s.ns.ClientURL(), Name: c.Name(), Inbox: c.Inbox(), Seed: seeds[c], CA: ca}
		if err := f.Write(filepath.Join(s.opts.Dir, "clients", c.Name()+".json")); err != nil {
			return err
		}
	}
	kp, err := nkeys.FromSeed([]byte(mySeed))
	if err != nil {
		return err
	}
	s.nc, err = nats.Connect("nats://memory", nats.InProcessServer(s.ns), nats.Nkey(me.Nkey, kp.Sign), nats.Name("sdktest"))
	if err != nil {
		return err
	}
	s.js, err = jetstream.New(s.nc)
	return err
}

func login(p *server.Permissions) (*server.NkeyUser, string, error) {
	kp, err := nkeys.CreateUser()
	if err != nil {
		return nil, "", err
	}
	pub, err := kp.PublicKey()
	if err != nil {
		return nil, "", err
	}
	seed, err := kp.Seed()
	return &server.NkeyUser{Nkey: pub, Permissions: p}, string(seed), err
}

// permissions are those of the catalogue.
func permissions(c subjects.Caller) *server.Permissions {
	pub, sub := []string{}, []string{c.Inbox() + ".>"}
	for _, m := range subjects.Methods {
		if !m.Allows(c) {
			continue
		}
		service := m.Service
		if service == "host" {
			service += ".*"
		}
		pub = append(pub, subjects.Prefix+"rpc."+service+"."+m.Name+"."+c.Token())
	}
	if c.Role == subjects.RoleOperator {
		pub = append(pub, "$JS.API.>", "$JS.ACK.>", "$JS.FC.>")
		sub = append(sub, "berth.v1.session.>", "berth.v1.host.>", "berth.v1.dead.>")
	} else {
		pub = append(pub, "berth.v1.box.*.*.open", "berth.v1.box.*.*.in",
			"berth.v1.request."+string(c.Tenant)+"."+string(c.Frontend)+".*")
		sub = append(sub, "berth.v1.session."+string(c.Tenant)+".*.*")
	}
	return &server.Permissions{Publish: &server.SubjectPermission{Allow: pub}, Subscribe: &server.SubjectPermission{Allow: sub}}
}

// Dir is the folder with the client files, like that of `berth up`.
func (s *Server) Dir() string { return s.opts.Dir }

// ClientFile is the path of the client file of a tenant's frontend.
func (s *Server) ClientFile(tenant string) string {
	return filepath.Join(s.opts.Dir, "clients", subjects.Frontend(ids.Tenant(tenant), Frontend).Name()+".json")
}

// OperatorFile is the path of the operator's client file.
func (s *Server) OperatorFile() string {
	return filepath.Join(s.opts.Dir, "clients", subjects.Operator().Name()+".json")
}

// Client logs in as a tenant's frontend for the length of a test.
func (s *Server) Client(t testing.TB, tenant string) *sdk.Client {
	t.Helper()
	c, err := sdk.Connect(context.Background(), sdk.Config{ClientFile: s.ClientFile(tenant)})
	if err != nil {
		t.Fatalf("log in to the fake: %v", err)
	}
	t.Cleanup(c.Close)
	return c
}

// Token makes a token for a user of a tenant.
func (s *Server) Token(tenant, subject string) string {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	token := fmt.Sprintf("sdktest.%x", b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokens[token] = user{tenant, subject}
	return token
}

// Revoke makes a token expire.
func (s *Server) Revoke(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tokens, token)
}

// Refuse makes opens fail with a reason, until it is called with "".
func (s *Server) Refuse(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failure = reason
}

// DropFrames loses the next n frames from host to client.
func (s *Server) DropFrames(n int) {
	s.drop.Store(int64(n))
}

// Sleep puts a session to sleep as the idle time would: its processes end. On a host that is drained
// it is the end of the drain's patience: the session is handed over.
func (s *Server) Sleep(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.sessions[key]
	if x == nil {
		return
	}
	if h := s.hostState(x.host); h != nil && h.draining {
		s.leave(x)
		s.drained(h)
		return
	}
	s.sleepLocked(x, "idle")
}

// ForgetStreams is a restart of the host's service: streams are gone,
// processes go on.
func (s *Server) ForgetStreams() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.streams {
		st.end()
	}
	clear(s.streams)
}

// ForgetExecs loses every process of a session, as the loss of a host does,
// but leaves the session awake.
func (s *Server) ForgetExecs(key string) {
	if x := s.find(key); x != nil {
		s.ForgetStreams() // before: a lost host tells no exit
		x.killAll("the host was lost")
	}
}

func (s *Server) find(key string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[key]
}

// next counts like an index of raft.
func (s *Server) next() uint64 {
	s.index++
	return s.index
}
