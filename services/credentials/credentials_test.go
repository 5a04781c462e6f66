package credentials

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// world is a real bus with credentials on it and a scheduler that says what
// the test puts into record.
type world struct {
	bus                         *bus.Embedded
	dir, store                  string
	identity, sched, host, othr *bus.Conn
	front                       *bus.Conn
	box                         *seal.Box
	proof                       ed25519.PrivateKey
	stop                        func()

	platform string       // platform_key
	log      *slog.Logger // nil: the tests'

	mu     sync.Mutex
	record *schedulerv1.SessionRecord
}

var session = ids.DeriveSessionKey([]byte("k"), "https://idp", "acme", "alice", "default")

func ref(gen, epoch uint64) *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: "acme", Session: string(session),
		Generation: &corev1.Stamp{Incarnation: 1, Index: gen}, Epoch: &corev1.Stamp{Incarnation: 1, Index: epoch}}
}

func newWorld(t testing.TB) *world { return newWorldWith(t, "") }

// newWorldWith is a world with this platform key.
func newWorldWith(t testing.TB, platformKey string) *world {
	t.Helper()
	store := t.TempDir()
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: store, Port: -1, Log: bustest.Log(t),
		Callers: []subjects.Caller{subjects.Host("h1"), subjects.Host("h2"), subjects.Gate("h1"), subjects.Gate("h2"), subjects.Frontend("globex", "web")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	w := &world{bus: e, platform: platformKey, dir: t.TempDir(), store: store, identity: bustest.Connect(t, e, subjects.Service("identity")),
		sched: bustest.Connect(t, e, subjects.Service("scheduler")), host: bustest.Connect(t, e, subjects.Host("h1")),
		othr: bustest.Connect(t, e, subjects.Host("h2")), front: bustest.Connect(t, e, subjects.Frontend("globex", "web"))}
	if w.box, err = seal.RandomBox(); err != nil {
		t.Fatal(err)
	}
	_, w.proof, _ = ed25519.GenerateKey(rand.Reader)
	w.record = &schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_WAKING, Host: "h1"}
	w.serveShow(t)
	w.run(t)
	return w
}

// serveShow answers as scheduler does.
func (w *world) serveShow(t testing.TB) *bus.Service {
	t.Helper()
	srv, err := w.sched.Serve(t.Context(), bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	err = bus.Handle(srv, "show", func(_ context.Context, r bus.Request, _ *schedulerv1.ShowRequest) (*schedulerv1.ShowReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.record == nil {
			return nil, errs.E("show", errkind.NotFound, "", "no such session")
		}
		return &schedulerv1.ShowReply{Record: proto.Clone(w.record).(*schedulerv1.SessionRecord)}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.sched.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	return srv
}

// run starts credentials and waits until it is ready.
func (w *world) run(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	conn := bustest.Connect(t, w.bus, subjects.Service("credentials"))
	ready, done := make(chan struct{}), make(chan error, 1)
	cfg := NewConfig()
	cfg.KeyDir, cfg.PlatformKey = w.dir, w.platform
	log := w.log
	if log == nil {
		log = bustest.Log(t)
	}
	go func() { done <- Run(ctx, cfg, conn, log, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			conn.Close()
		})
	}
	t.Cleanup(w.stop)
}

func (w *world) mintReq(gen, epoch uint64) *credentialsv1.MintRequest {
	return &credentialsv1.MintRequest{
		Session: ref(gen, epoch), Host: "h1", ProofKey: w.proof.Public().(ed25519.PublicKey), ReplyKey: w.box.Public(),
		Actor:           &corev1.Actor{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "web"},
		TokenVerifiedAt: timestamppb.Now(), TokenExpiresAt: timestamppb.New(time.Now().Add(time.Hour)),
	}
}

func (w *world) mint(t testing.TB, req *credentialsv1.MintRequest) (string, error) {
	t.Helper()
	reply, err := bus.Invoke[*credentialsv1.MintReply](t.Context(), w.identity, "credentials", "mint", req)
	if err != nil {
		return "", err
	}
	token, err := w.box.Open(reply.GetSender(), reply.GetSealedGrant())
	if err != nil {
		t.Fatal(err)
	}
	return string(token), nil
}

func (w *world) verifier(t *testing.T, c *bus.Conn) *grant.Verifier {
	t.Helper()
	reply, err := bus.Invoke[*credentialsv1.JwksReply](t.Context(), c, "credentials", "jwks", &credentialsv1.JwksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	v, err := grant.FromReply(reply)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantKind(t *testing.T, err error, want errkind.Kind) {
	t.Helper()
	if got := errs.Kind(err); got != want {
		t.Errorf("kind %v (%v), want %v", got, err, want)
	}
}

func TestMintedGrantOpensAtItsHostOnly(t *testing.T) {
	w := newWorld(t)
	token, err := w.mint(t, w.mintReq(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	v := w.verifier(t, w.host)
	c, err := v.Verify(token, grant.BindingOf(ref(10, 12), "h1"), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if c.Principal.Subject != "alice" || c.Expires-c.IssuedAt != 900 {
		t.Errorf("%+v", c)
	}
	_, err = v.Verify(token, grant.BindingOf(ref(10, 13), "h1"), time.Now())
	if grant.KindOf(err) != errkind.StaleEpoch {
		t.Error(err)
	}
	_, err = v.Verify(token, grant.BindingOf(ref(10, 12), "h2"), time.Now())
	if grant.KindOf(err) != errkind.StaleEpoch {
		t.Error(err)
	}
}

func TestMintRefusesBadInput(t *testing.T) {
	w := newWorld(t)
	for name, change := range map[string]func(*credentialsv1.MintRequest){
		"no session":      func(r *credentialsv1.MintRequest) { r.Session = nil },
		"no generation":   func(r *credentialsv1.MintRequest) { r.Session.Generation = nil },
		"no epoch":        func(r *credentialsv1.MintRequest) { r.Session.Epoch = nil },
		"no host":         func(r *credentialsv1.MintRequest) { r.Host = "" },
		"short proof key": func(r *credentialsv1.MintRequest) { r.ProofKey = r.ProofKey[:31] },
		"no reply key":    func(r *credentialsv1.MintRequest) { r.ReplyKey = "" },
		"no principal":    func(r *credentialsv1.MintRequest) { r.Actor.Subject = "" },
		"not verified":    func(r *credentialsv1.MintRequest) { r.TokenVerifiedAt = nil },
	} {
		req := w.mintReq(10, 12)
		change(req)
		if _, err := w.mint(t, req); errs.Kind(err) != errkind.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	req := w.mintReq(10, 12)
	req.Actor.Tenant = "globex"
	_, err := w.mint(t, req)
	wantKind(t, err, errkind.Denied)
}

func (w *world) renew(t *testing.T, token string, change func(*credentialsv1.RenewSecret)) (string, error) {
	t.Helper()
	keys, err := bus.Invoke[*credentialsv1.JwksReply](t.Context(), w.identity, "credentials", "jwks", &credentialsv1.JwksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	in := &credentialsv1.RenewSecret{Grant: token, RequestId: "r1", Time: timestamppb.New(now), Actor: &corev1.Actor{Tenant: "acme", Frontend: "web"}}
	in.Proof = grant.Renewal{RequestID: "r1", Grant: token, Time: now}.Sign(w.proof)
	if change != nil {
		change(in)
	}
	raw, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := w.box.Seal(keys.GetCurveKey(), raw)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := bus.Invoke[*credentialsv1.RenewReply](t.Context(), w.identity, "credentials", "renew",
		&credentialsv1.RenewRequest{Sealed: sealed, Sender: w.box.Public(), ReplyKey: w.box.Public()})
	if err != nil {
		return "", err
	}
	out, err := w.box.Open(reply.GetSender(), reply.GetSealedGrant())
	return string(out), err
}

func TestRenewNeedsTheProofKey(t *testing.T) {
	w := newWorld(t)
	token, err := w.mint(t, w.mintReq(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	fresh, err := w.renew(t, token, nil)
	if err != nil || fresh == token {
		t.Fatal(fresh == token, err)
	}
	if _, err := w.verifier(t, w.host).Verify(fresh, grant.BindingOf(ref(10, 12), "h1"), time.Now()); err != nil {
		t.Error(err)
	}
	_, thief, _ := ed25519.GenerateKey(rand.Reader)
	for name, tc := range map[string]struct {
		change func(*credentialsv1.RenewSecret)
		want   errkind.Kind
	}{
		"stolen grant, own key": {func(in *credentialsv1.RenewSecret) {
			in.Proof = grant.Renewal{RequestID: "r1", Grant: token, Time: in.GetTime().AsTime()}.Sign(thief)
		}, errkind.Unauthenticated},
		"proof of another request": {func(in *credentialsv1.RenewSecret) { in.RequestId = "r2" }, errkind.Unauthenticated},
		"another user's token":     {func(in *credentialsv1.RenewSecret) { in.Actor.Issuer, in.Actor.Subject = "https://idp", "bob" }, errkind.Denied},
		"another frontend":         {func(in *credentialsv1.RenewSecret) { in.Actor.Frontend = "other" }, errkind.Denied},
		"another tenant":           {func(in *credentialsv1.RenewSecret) { in.Actor.Tenant = "globex" }, errkind.Denied},
		"no grant":                 {func(in *credentialsv1.RenewSecret) { in.Grant = "" }, errkind.Unauthenticated},
	} {
		_, err := w.renew(t, token, tc.change)
		if errs.Kind(err) != tc.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// dataKey sends one request (Call, not Invoke), also while credentials announces itself.
func (w *world) dataKey(t *testing.T, c *bus.Conn, s *corev1.SessionRef) ([]byte, error) {
	t.Helper()
	return openDataKey(t, func(hostKey string) (*credentialsv1.DataKeyReply, error) {
		return bus.Call[*credentialsv1.DataKeyReply](t.Context(), c, subjects.RPC("credentials", "datakey", c.Self()),
			&credentialsv1.DataKeyRequest{Session: s, HostKey: hostKey})
	})
}

// invokeDataKey requests a data key as hostagent does: again after a reconnect.
func (w *world) invokeDataKey(t *testing.T, c *bus.Conn, s *corev1.SessionRef) ([]byte, error) {
	t.Helper()
	return openDataKey(t, func(hostKey string) (*credentialsv1.DataKeyReply, error) {
		return bus.Invoke[*credentialsv1.DataKeyReply](t.Context(), c, "credentials", "datakey",
			&credentialsv1.DataKeyRequest{Session: s, HostKey: hostKey})
	})
}

func openDataKey(t *testing.T, request func(hostKey string) (*credentialsv1.DataKeyReply, error)) ([]byte, error) {
	t.Helper()
	key, err := seal.NewKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := request(string(key.Public()))
	if err != nil {
		return nil, err
	}
	return key.Open(reply.GetSealedKey())
}

func TestDataKeyGoesToTheOwnerOfTheEpochOnly(t *testing.T) {
	w := newWorld(t)
	first, err := w.dataKey(t, w.host, ref(10, 12))
	if err != nil || len(first) != 32 {
		t.Fatal(len(first), err)
	}
	again, err := w.dataKey(t, w.host, ref(10, 12))
	if err != nil || !bytes.Equal(first, again) {
		t.Fatal("a second request got another key", err)
	}
	_, err = w.dataKey(t, w.othr, ref(10, 12))
	wantKind(t, err, errkind.Denied)
	_, err = w.dataKey(t, w.host, ref(10, 11))
	wantKind(t, err, errkind.StaleEpoch)
	_, err = w.dataKey(t, w.host, ref(10, 13))
	wantKind(t, err, errkind.StaleEpoch)

	w.mu.Lock()
	w.record = &schedulerv1.SessionRecord{Session: ref(20, 21), State: corev1.State_STATE_WAKING, Host: "h1"}
	w.mu.Unlock()
	next, err := w.dataKey(t, w.host, ref(20, 21))
	if err != nil || bytes.Equal(first, next) {
		t.Fatal("two generations share a key", err)
	}
	w.mu.Lock()
	w.record = nil
	w.mu.Unlock()
	_, err = w.dataKey(t, w.host, ref(20, 21))
	wantKind(t, err, errkind.NotFound)
}

func TestRevokeKillsGrantsAndDestroysTheDataKey(t *testing.T) {
	w := newWorld(t)
	token, err := w.mint(t, w.mintReq(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.dataKey(t, w.host, ref(10, 12)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // idempotent
		_, err = bus.Invoke[*credentialsv1.RevokeReply](t.Context(), w.sched, "credentials", "revoke", &credentialsv1.RevokeRequest{Session: ref(10, 12), Reason: "deleted"})
		if err != nil {
			t.Fatal(err)
		}
	}
	check := func() {
		t.Helper()
		if _, err := w.verifier(t, w.host).Verify(token, grant.BindingOf(ref(10, 12), "h1"), time.Now()); grant.KindOf(err) != errkind.Superseded {
			t.Errorf("the old grant: %v", err)
		}
		_, err := w.mint(t, w.mintReq(10, 12))
		wantKind(t, err, errkind.Superseded)
		_, err = w.renew(t, token, nil)
		wantKind(t, err, errkind.Superseded)
		_, err = w.dataKey(t, w.host, ref(10, 12))
		wantKind(t, err, errkind.Superseded)
		if _, err := w.mint(t, w.mintReq(20, 21)); err != nil {
			t.Errorf("the next generation: %v", err)
		}
	}
	check()
	w.stop()
	w.run(t) // the revocation outlives a restart, and so do the signing keys
	check()
	if n := len(bucketKeys(t, w.bus, "BERTH_DATAKEYS")); n != 0 {
		t.Errorf("%d data keys are left", n)
	}
	reply, err := bus.Invoke[*credentialsv1.JwksReply](t.Context(), w.front, "credentials", "jwks", &credentialsv1.JwksRequest{})
	if err != nil || len(reply.GetRevoked()) != 0 {
		t.Errorf("another tenant's frontend was told of %d revocations, %v", len(reply.GetRevoked()), err)
	}
}

// A data key that was destroyed is not in the bus's files any more, not even
// in its encrypted form; nothing was ever there in the clear.
func TestDestroyedDataKeyIsGoneFromTheFiles(t *testing.T) {
	w := newWorld(t)
	plain, err := w.dataKey(t, w.host, ref(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	b, err := bustest.Connect(t, w.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_DATAKEYS")
	if err != nil {
		t.Fatal(err)
	}
	record, _, err := b.Get(t.Context(), "acme."+string(session)+".1-10")
	if err != nil {
		t.Fatal(err)
	}
	if found(t, w.store, plain) {
		t.Error("the data key is in a file in the clear")
	}
	if !found(t, w.store, record) {
		t.Fatal("the test looks in the wrong place")
	}
	_, err = bus.Invoke[*credentialsv1.RevokeReply](t.Context(), w.sched, "credentials", "revoke", &credentialsv1.RevokeRequest{Session: ref(10, 12)})
	if err != nil {
		t.Fatal(err)
	}
	if found(t, w.store, record) {
		t.Error("the destroyed record is still in a file")
	}
}

func found(t *testing.T, dir string, what []byte) bool {
	t.Helper()
	hit := false
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // files come and go
		}
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, what) {
			hit = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return hit
}

func TestAuditNamesTheGrantAndNeverHoldsIt(t *testing.T) {
	w := newWorld(t)
	operator := bustest.Connect(t, w.bus, subjects.Operator())
	sub, err := operator.NATS().SubscribeSync("berth.v1.audit.credentials.acme." + string(session))
	if err != nil {
		t.Fatal(err)
	}
	if err := operator.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	token, err := w.mint(t, w.mintReq(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	msg, err := sub.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var a credentialsv1.Audit
	if err := bus.Decode(msg.Data, bus.Protobuf, &a); err != nil {
		t.Fatal(err)
	}
	if a.GetWhat() != "issued" || a.GetGrantId() == "" || a.GetActor().GetSubject() != "alice" {
		t.Errorf("%v", &a)
	}
	if strings.Contains(string(msg.Data), strings.Split(token, ".")[2]) {
		t.Error("the record holds the grant")
	}
}

func TestStartRefusesABadConfiguration(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("credentials"))
	for name, change := range map[string]func(*Config){
		"no key folder":   func(c *Config) { c.KeyDir = "" },
		"key in the file": func(c *Config) { c.PlatformKey = "base64key://smGbjm71Nxd1Ig5FS0wj9SlbzAIrnolCz9bQQ6uAhl4=" },
		"grants for ever": func(c *Config) { c.GrantTTL = 24 * time.Hour },
		"maximum too low": func(c *Config) { c.MaxSinceToken = time.Minute },
		"key file is open": func(c *Config) {
			_ = os.WriteFile(filepath.Join(c.KeyDir, "credentials-platform.json"), []byte("{}"), 0o644)
		},
	} {
		cfg := NewConfig()
		cfg.KeyDir = t.TempDir()
		change(&cfg)
		err := Run(t.Context(), cfg, conn, slog.New(slog.DiscardHandler), func() { t.Errorf("%s: it started", name) })
		if k := errs.Kind(err); k != errkind.Invalid && k != errkind.Denied {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAnotherPlatformKeyIsDataLossNotANewKey(t *testing.T) {
	w := newWorld(t)
	w.stop()
	cfg := NewConfig()
	cfg.KeyDir = t.TempDir()
	conn := bustest.Connect(t, w.bus, subjects.Service("credentials"))
	err := Run(t.Context(), cfg, conn, bustest.Log(t), func() { t.Error("it started") })
	if !errs.Is(err, errkind.DataLoss) {
		t.Error(errors.Unwrap(err), err)
	}
}

func BenchmarkMint(b *testing.B) {
	w := newWorld(b)
	req := w.mintReq(10, 12)
	for b.Loop() {
		if _, err := bus.Invoke[*credentialsv1.MintReply](b.Context(), w.identity, "credentials", "mint", req); err != nil {
			b.Fatal(err)
		}
	}
}
