package identity_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// world is a real bus with identity on it, a dev issuer, and working fakes of
// lifecycle and credentials on their real subjects.
type world struct {
	connect  func(subjects.Caller) *bus.Conn
	dir      string
	front    *bus.Conn // fe-acme-web
	other    *bus.Conn // fe-acme-mobile
	globex   *bus.Conn
	operator *bus.Conn
	creds    *seal.Box

	mu     sync.Mutex
	calls  []proto.Message // what reached lifecycle and credentials
	fail   error           // what lifecycle.open answers, while set
	minted map[string]*credentialsv1.MintRequest
	state  corev1.State // of the session, as lifecycle.open tells it
	before func()       // runs once, before lifecycle.open answers
	onMint func()       // runs once, before credentials.mint answers
	cfg    identity.Config
}

var frontends = []subjects.Caller{subjects.Frontend("acme", "web"), subjects.Frontend("acme", "mobile"), subjects.Frontend("globex", "web")}

func newWorld(t testing.TB) *world {
	t.Helper()
	e := bustest.Start(t, frontends...)
	return newWorldOn(t, func(c subjects.Caller) *bus.Conn { return bustest.Connect(t, e, c) })
}

// newWorldOn is a world on a bus that is there already, with more issuers in
// the registry than those of the dev issuer.
func newWorldOn(t testing.TB, connect func(subjects.Caller) *bus.Conn, more ...identity.Issuer) *world {
	t.Helper()
	return newConfiguredWorld(t, connect, func(cfg *identity.Config) { cfg.Issuers = append(cfg.Issuers, more...) })
}

// newConfiguredWorld is a world whose identity is configured further.
func newConfiguredWorld(t testing.TB, connect func(subjects.Caller) *bus.Conn, configure func(*identity.Config)) *world {
	t.Helper()
	w := newWorldWithoutIdentity(t, connect)
	configure(&w.cfg)
	w.replica(t)
	return w
}

// newWorldWithoutIdentity is a world in which identity is yet to be started.
func newWorldWithoutIdentity(t testing.TB, connect func(subjects.Caller) *bus.Conn) *world {
	t.Helper()
	w := &world{connect: connect, dir: t.TempDir(), minted: map[string]*credentialsv1.MintRequest{}, state: corev1.State_STATE_ACTIVE,
		front: connect(frontends[0]), other: connect(frontends[1]), globex: connect(frontends[2]),
		operator: connect(subjects.Operator())}
	var err error
	if w.creds, err = seal.RandomBox(); err != nil {
		t.Fatal(err)
	}
	w.fakes(t)
	background(t, func(ctx context.Context, ready func()) error {
		return devissuer.Run(ctx, devissuer.Config{Dir: w.dir, Tenants: []ids.Tenant{"acme", "globex"}}, bustest.Log(t), ready)
	})
	cfg := identity.NewConfig()
	cfg.KeyDir = w.dir
	for _, tenant := range []ids.Tenant{"acme", "globex"} {
		entry, err := devissuer.Entry(w.dir, tenant, "default")
		if err != nil {
			t.Fatal(err)
		}
		entry.TierFloor = "gvisor"
		cfg.Issuers = append(cfg.Issuers, entry)
	}
	w.cfg = cfg
	return w
}

// replica starts one more identity.
func (w *world) replica(t testing.TB) {
	t.Helper()
	conn := w.connect(subjects.Service("identity"))
	background(t, func(ctx context.Context, ready func()) error {
		return identity.Run(ctx, w.cfg, conn, bustest.Log(t), ready)
	})
}

// background runs a service until the test ends.
func background(t testing.TB, run func(context.Context, func()) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func (w *world) note(m proto.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = append(w.calls, m)
}

// seen returns the calls since the last time.
func (w *world) seen() []proto.Message {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.calls
	w.calls = nil
	return out
}

func (w *world) failWith(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail = err
}

func (w *world) failing() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fail
}

func ref(v *lifecyclev1.Verified) *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: v.GetActor().GetTenant(), Session: v.GetKeys()[0],
		Generation: &corev1.Stamp{Incarnation: 1, Index: 10}, Epoch: &corev1.Stamp{Incarnation: 1, Index: 12}}
}

var terms = &corev1.Terms{Plan: "default", Template: "python", Tier: corev1.Tier_TIER_GVISOR, Idle: durationpb.New(time.Minute),
	Persistence: corev1.Persistence_PERSISTENCE_DURABLE, Limits: &corev1.Limits{CpuMillis: 1000}}

func (w *world) fakes(t testing.TB) {
	t.Helper()
	life := w.connect(subjects.Service("lifecycle"))
	l, err := life.Serve(t.Context(), bus.ServiceConfig{Name: "lifecycle"})
	must(t, err)
	must(t, bus.Handle(l, "open", func(_ context.Context, _ bus.Request, r *lifecyclev1.OpenRequest) (*lifecyclev1.OpenReply, error) {
		w.note(r)
		w.mu.Lock()
		first := w.before
		w.before = nil
		w.mu.Unlock()
		if first != nil {
			first()
		}
		if err := w.failing(); err != nil {
			return nil, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		return &lifecyclev1.OpenReply{Terms: terms, Wake: &schedulerv1.WakeReply{Session: ref(r.GetVerified()), Origin: corev1.Origin_ORIGIN_CREATED,
			State: w.state, Host: "h1", HostKey: w.creds.Public(), Timing: &corev1.Timing{Steps: []*corev1.Step{{Name: "scheduler.apply", Took: durationpb.New(time.Millisecond)}}}}}, nil
	}))
	must(t, bus.Handle(l, "close", func(_ context.Context, _ bus.Request, r *lifecyclev1.CloseRequest) (*lifecyclev1.CloseReply, error) {
		w.note(r)
		return &lifecyclev1.CloseReply{Session: ref(r.GetVerified()), State: corev1.State_STATE_ASLEEP}, nil
	}))
	must(t, bus.Handle(l, "delete", func(_ context.Context, _ bus.Request, r *lifecyclev1.DeleteRequest) (*lifecyclev1.DeleteReply, error) {
		w.note(r)
		return &lifecyclev1.DeleteReply{Session: ref(r.GetVerified()), State: corev1.State_STATE_DELETED}, nil
	}))
	must(t, bus.Handle(l, "status", func(_ context.Context, _ bus.Request, r *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
		w.note(r)
		own := &corev1.Actor{Tenant: r.GetTenant(), Issuer: r.GetIssuer(), Subject: r.GetSubject()}
		foreign := &corev1.Actor{Tenant: r.GetTenant(), Issuer: r.GetIssuer(), Subject: "somebody"}
		rec := func(a *corev1.Actor, name string) *schedulerv1.SessionRecord {
			return &schedulerv1.SessionRecord{Actor: a, SessionName: name, State: corev1.State_STATE_ASLEEP}
		}
		if r.GetAfter() == "" {
			return &schedulerv1.ListReply{Records: []*schedulerv1.SessionRecord{rec(own, "default"), rec(foreign, "default")}, Next: "s1"}, nil
		}
		return &schedulerv1.ListReply{Records: []*schedulerv1.SessionRecord{rec(own, "work")}}, nil
	}))
	w.fakeCredentials(t)
	must(t, life.NATS().Flush())
}

func (w *world) fakeCredentials(t testing.TB) {
	t.Helper()
	creds := w.connect(subjects.Service("credentials"))
	c, err := creds.Serve(t.Context(), bus.ServiceConfig{Name: "credentials"})
	must(t, err)
	must(t, bus.Handle(c, "mint", func(_ context.Context, _ bus.Request, r *credentialsv1.MintRequest) (*credentialsv1.MintReply, error) {
		w.note(r)
		grant := "grant-" + string(ids.NewRequestID())
		w.mu.Lock()
		first := w.onMint
		w.onMint = nil
		w.mu.Unlock()
		if first != nil {
			first()
		}
		w.mu.Lock()
		w.minted[grant] = r
		w.mu.Unlock()
		sealed, err := w.creds.Seal(r.GetReplyKey(), []byte(grant))
		return &credentialsv1.MintReply{SealedGrant: sealed, Sender: w.creds.Public(), ExpiresAt: timestamppb.New(time.Now().Add(15 * time.Minute))}, err
	}))
	must(t, bus.Handle(c, "renew", func(_ context.Context, _ bus.Request, r *credentialsv1.RenewRequest) (*credentialsv1.RenewReply, error) {
		raw, err := w.creds.Open(r.GetSender(), r.GetSealed())
		if err != nil {
			return nil, err
		}
		secret := &credentialsv1.RenewSecret{}
		if err := proto.Unmarshal(raw, secret); err != nil {
			return nil, err
		}
		w.note(secret)
		sealed, err := w.creds.Seal(r.GetReplyKey(), []byte("renewed"))
		return &credentialsv1.RenewReply{SealedGrant: sealed, Sender: w.creds.Public(), ExpiresAt: timestamppb.Now()}, err
	}))
	must(t, bus.Handle(c, "jwks", func(context.Context, bus.Request, *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
		return &credentialsv1.JwksReply{CurveKey: w.creds.Public()}, nil
	}))
	must(t, bus.Handle(c, "end_grants", func(_ context.Context, _ bus.Request, r *credentialsv1.EndGrantsRequest) (*credentialsv1.EndGrantsReply, error) {
		w.note(r)
		return &credentialsv1.EndGrantsReply{}, nil
	}))
	must(t, creds.NATS().Flush())
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) token(t testing.TB, tenant ids.Tenant, subject string, at time.Time) string {
	t.Helper()
	token, err := devissuer.Mint(w.dir, devissuer.User{Tenant: tenant, Subject: subject}, at)
	must(t, err)
	return token
}

// request is what a client seals. Its fields are changed by tests before it is sent.
type request struct {
	env     *identityv1.Envelope
	reply   seal.XKey
	proof   ed25519.PrivateKey
	asJSON  bool // envelope and bus message
	plain   []byte
	mangled func(*identityv1.SealedRequest)
}

func (w *world) request(t testing.TB, verb string, body proto.Message) *request {
	t.Helper()
	raw, err := proto.Marshal(body)
	must(t, err)
	key, err := seal.NewKey(rand.Reader)
	must(t, err)
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	r := &request{reply: key, proof: priv, env: &identityv1.Envelope{Token: w.token(t, "acme", "alice", time.Now()), RequestId: string(ids.NewRequestID()),
		Verb: verb, Time: timestamppb.Now(), ReplyKey: string(key.Public()), ProofKey: pub}}
	r.body(raw)
	return r
}

func (r *request) body(raw []byte) {
	sum := sha256.Sum256(raw)
	r.env.Body, r.env.BodyHash = raw, sum[:]
}

func (w *world) curve(t testing.TB, c *bus.Conn) seal.Public {
	t.Helper()
	reply, err := bus.Invoke[*identityv1.KeysReply](t.Context(), c, "identity", "keys", &identityv1.KeysRequest{})
	must(t, err)
	return seal.Public(reply.GetCurveKey())
}

// encode seals the request; the same bytes can be sent again and again.
func (r *request) encode(t testing.TB, w *world) []byte {
	t.Helper()
	return r.encodeTo(t, w.curve(t, w.front))
}

// encodeTo is encode where identity's key is known already.
func (r *request) encodeTo(t testing.TB, key seal.Public) []byte {
	t.Helper()
	plain := r.plain
	var err error
	if plain == nil && r.asJSON {
		plain, err = protojson.Marshal(r.env)
	} else if plain == nil {
		plain, err = proto.Marshal(r.env)
	}
	must(t, err)
	sealed, err := seal.SealTo(key, plain, rand.Reader)
	must(t, err)
	req := &identityv1.SealedRequest{Sealed: sealed}
	if r.mangled != nil {
		r.mangled(req)
	}
	if r.asJSON {
		raw, err := protojson.Marshal(req)
		must(t, err)
		return raw
	}
	raw, err := proto.Marshal(req)
	must(t, err)
	return raw
}

func (r *request) contentType() string {
	if r.asJSON {
		return bus.JSON
	}
	return bus.Protobuf
}

// direct sends by the direct door and opens the answer.
func (w *world) direct(t testing.TB, c *bus.Conn, r *request) *identityv1.Reply {
	t.Helper()
	return r.open(t, w.directRaw(t, c, r.env.GetVerb(), r.encode(t, w), r.contentType()))
}

func (w *world) directRaw(t testing.TB, c *bus.Conn, verb string, body []byte, ct string) []byte {
	t.Helper()
	msg, err := c.CallRaw(t.Context(), subjects.RPC("identity", verb, c.Self()), body, ct)
	must(t, err)
	return msg.Data
}

// durable sends by the durable door and waits for the answer.
func (w *world) durable(t testing.TB, c *bus.Conn, verb string, body []byte, ct string) []byte {
	t.Helper()
	inbox := c.NATS().NewInbox()
	sub, err := c.NATS().SubscribeSync(inbox)
	must(t, err)
	w.publish(t, c, verb, body, nats.Header{bus.HeaderContentType: {ct}, bus.HeaderReply: {inbox}})
	msg, err := sub.NextMsg(20 * time.Second)
	must(t, err)
	return msg.Data
}

func (w *world) publish(t testing.TB, c *bus.Conn, verb string, body []byte, h nats.Header) {
	t.Helper()
	subject := subjects.Request(c.Self().Tenant, c.Self().Frontend, verb)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // else it is 5 s
	defer cancel()
	_, err := c.JetStream().PublishMsg(ctx, &nats.Msg{Subject: subject, Data: body, Header: h})
	must(t, err)
}

// sealed decodes a SealedReply as the request was encoded.
func (r *request) sealed(t testing.TB, data []byte) *identityv1.SealedReply {
	t.Helper()
	out := &identityv1.SealedReply{}
	must(t, bus.Decode(data, r.contentType(), out))
	return out
}

func (r *request) open(t testing.TB, data []byte) *identityv1.Reply {
	t.Helper()
	s := r.sealed(t, data)
	if len(s.GetSealed()) == 0 {
		return &identityv1.Reply{Outcome: &identityv1.Reply_Failure{Failure: s.GetFailure()}}
	}
	plain, err := r.reply.Open(s.GetSealed())
	must(t, err)
	out := &identityv1.Reply{}
	if r.asJSON {
		must(t, protojson.Unmarshal(plain, out))
	} else {
		must(t, proto.Unmarshal(plain, out))
	}
	return out
}
