package hostagent

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

const testHost = ids.Host("h1")

// rig is a real bus with a hostagent on it, and stand-ins for scheduler and credentials on their
// real subjects.
type rig struct {
	t     *testing.T
	bus   *bus.Embedded
	sched *fakeScheduler
	creds *fakeCredentials
	cfg   Config
	drv   driver.Driver // nil: the one that cfg names
	disks disks         // nil: as the driver needs
	tune  func(*host)   // called before it runs
	load  Loader
	clock *movedClock   // of the lease; nil: the machine's
	noted *notes        // what was refused
	alive chan struct{} // closed when the process that serves is dead; nil if it is this one
	run   *running
	ask   *bus.Conn // svc-scheduler
	lc    *bus.Conn
}

// running is one life of the hostagent.
type running struct {
	h    *host
	conn *bus.Conn
	stop context.CancelFunc
	done chan error
}

func newRig(t *testing.T, drv driver.Driver, also ...subjects.Caller) *rig {
	t.Helper()
	r := &rig{t: t, drv: drv, disks: newNullDisks()}
	r.bus = bustest.Start(t, append(also, subjects.Host(testHost), subjects.Frontend("acme", "web"), subjects.Frontend("acme", "other"), subjects.Frontend("evil", "web"))...)
	if drv == nil {
		r.disks = nil
	}
	r.ask = bustest.Connect(t, r.bus, subjects.Service("scheduler"))
	r.sched = newFakeScheduler(t, r.ask)
	r.creds = newFakeCredentials(t, bustest.Connect(t, r.bus, subjects.Service("credentials")))
	r.cfg = NewConfig()
	r.cfg.Host, r.cfg.Dir, r.cfg.Driver, r.cfg.Tiers = string(testHost), t.TempDir(), driverNull, []string{"null"}
	r.cfg.Grace, r.cfg.Poll, r.cfg.Hello = 300*time.Millisecond, 200*time.Millisecond, 5*time.Second
	return r
}

// start starts a hostagent and waits until it is ready.
func (r *rig) start() {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	conn := bustest.Connect(r.t, r.bus, subjects.Host(testHost))
	h, err := open(ctx, r.cfg, conn, r.load, testLog())
	if err != nil {
		r.t.Fatal(err)
	}
	if r.clock != nil {
		h.lease.now = r.clock.now
	}
	r.noted = &notes{}
	h.meters.noted = r.noted.add
	if r.drv != nil {
		h.drv, h.caps, h.bare = r.drv, r.drv.Capabilities(), false
	}
	if r.disks != nil {
		h.disks, h.saves = r.disks, nullSaves{r.disks.(*nullDisks), h}
	}
	if r.tune != nil {
		r.tune(h)
	}
	run := &running{h: h, conn: conn, stop: cancel, done: make(chan error, 1)}
	ready := make(chan struct{})
	go func() { run.done <- errsJoin(h.run(ctx, func() { close(ready) }), h.close()) }()
	select {
	case <-ready:
	case err := <-run.done:
		r.t.Fatalf("hostagent ended: %v", err)
	case <-time.After(20 * time.Second):
		r.t.Fatal("hostagent is not ready after 20 s")
	}
	r.run = run
	r.t.Cleanup(func() { r.halt() })
}

// halt ends the hostagent; sandboxes stay.
func (r *rig) halt() {
	if r.run == nil {
		return
	}
	r.run.stop()
	select {
	case err := <-r.run.done:
		if err != nil {
			r.t.Errorf("hostagent ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		r.t.Error("hostagent does not end")
	}
	r.run.conn.Close()
	r.run = nil
}

func testLog() *slog.Logger { return bustest.Log(nil) }

func errsJoin(list ...error) error {
	for _, e := range list {
		if e != nil {
			return e
		}
	}
	return nil
}

func key(user string) ids.SessionKey {
	return ids.DeriveSessionKey([]byte("test"), "https://issuer", "acme", user, "default")
}

func ref(user string, gen, epoch uint64) *corev1.SessionRef {
	return &corev1.SessionRef{
		Tenant: "acme", Session: string(key(user)),
		Generation: &corev1.Stamp{Incarnation: 1, Index: gen}, Epoch: &corev1.Stamp{Incarnation: 1, Index: epoch},
	}
}

func terms() *corev1.Terms {
	return &corev1.Terms{
		Plan: "free", Template: "default", Tier: corev1.Tier_TIER_NULL, Image: "default",
		Limits: &corev1.Limits{CpuMillis: 500, MemoryBytes: 256 << 20, Pids: 128, DiskBytes: 1 << 30},
		Idle:   durationpb.New(time.Minute), Retention: durationpb.New(time.Hour),
	}
}

// wake wakes a session and, as scheduler does, commits it as active.
func (r *rig) wake(ref *corev1.SessionRef, change func(*hostv1.WakeRequest)) (*hostv1.WakeReply, error) {
	req := &hostv1.WakeRequest{Session: ref, Terms: terms(), SessionName: "default", Fresh: true}
	if change != nil {
		change(req)
	}
	r.sched.set(ref, corev1.State_STATE_WAKING)
	reply, err := bus.InvokeHost[*hostv1.WakeReply](r.context(), r.ask, testHost, "wake", req)
	if err == nil {
		r.sched.set(ref, corev1.State_STATE_ACTIVE)
	}
	return reply, err
}

func (r *rig) mustWake(ref *corev1.SessionRef, change func(*hostv1.WakeRequest)) *hostv1.WakeReply {
	r.t.Helper()
	reply, err := r.wake(ref, change)
	if err != nil {
		r.t.Fatalf("wake: %v", err)
	}
	return reply
}

func (r *rig) sleep(ref *corev1.SessionRef, since time.Time, force bool) (*hostv1.SleepReply, error) {
	req := &hostv1.SleepRequest{Session: ref, Force: force, Parent: r.sched.head(ref)}
	if !since.IsZero() {
		req.IdleSince = timestamppb.New(since)
	}
	reply, err := bus.InvokeHost[*hostv1.SleepReply](r.context(), r.ask, testHost, "sleep", req)
	if err == nil && !reply.GetBusy() {
		r.sched.set(ref, corev1.State_STATE_ASLEEP)
	}
	return reply, err
}

func (r *rig) delete(ref *corev1.SessionRef) error {
	_, err := bus.InvokeHost[*hostv1.DeleteReply](r.context(), r.ask, testHost, "delete", &hostv1.DeleteRequest{Session: ref})
	return err
}

func (r *rig) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	r.t.Cleanup(cancel)
	if alive := r.alive; alive != nil {
		go func() {
			select {
			case <-alive:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	return ctx
}

// eventually waits for a condition without a fixed sleep.
func eventually(t *testing.T, within time.Duration, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", within, what)
		}
	}
}

// fakeScheduler holds what the real one would of this host's sessions.
type fakeScheduler struct {
	mu      sync.Mutex
	owned   map[string]*schedulerv1.OwnedSession
	erased  []*corev1.SessionRef
	reports []*schedulerv1.ReportRequest
	joins   int
	mute    bool // answers nothing
	partial bool // answers without the end of the list
	lease   time.Duration
	// refuse makes the next commits fail.
	refuse   int
	commits  int
	accepted int
	stale    []*corev1.SessionRef
	load     *schedulerv1.HostLoad
	// unknown: it does not know this boot's lease until it joins again.
	unknown bool
	// denied is what joins are refused with, if not empty.
	denied string
	// failing renewals fail next; renewed counts those that went well.
	failing, renewed int
	// slow, if set, holds up the answers to renewals until it is closed.
	slow chan struct{}
}

func newFakeScheduler(t *testing.T, c *bus.Conn) *fakeScheduler {
	f := &fakeScheduler{owned: map[string]*schedulerv1.OwnedSession{}, lease: 3 * time.Second}
	svc, err := c.Serve(context.Background(), bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	err = errsJoin(
		bus.Handle(svc, "join", f.join), bus.Handle(svc, "lease", f.renew),
		bus.Handle(svc, "commit_manifest", f.commit), bus.Handle(svc, "report", f.report))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fakeScheduler) silent() error {
	if f.mute {
		return errs.E("scheduler", errkind.Unavailable, "", "no leader")
	}
	return nil
}

func (f *fakeScheduler) join(_ context.Context, _ bus.Request, req *schedulerv1.JoinRequest) (*schedulerv1.JoinReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.silent(); err != nil {
		return nil, err
	}
	f.joins++
	if f.denied != "" {
		return nil, errs.E("join", errkind.Denied, "", f.denied)
	}
	f.unknown, f.load = false, req.GetLoad()
	out := &schedulerv1.JoinReply{Lease: durationpb.New(f.lease), Complete: !f.partial, Erased: f.erased, Stale: f.stale}
	for _, o := range f.owned {
		out.Owned = append(out.Owned, proto.Clone(o).(*schedulerv1.OwnedSession))
	}
	return out, nil
}

func (f *fakeScheduler) renew(_ context.Context, _ bus.Request, req *schedulerv1.LeaseRequest) (*schedulerv1.LeaseReply, error) {
	f.mu.Lock()
	slow := f.slow
	f.mu.Unlock()
	if slow != nil {
		<-slow
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.load = req.GetLoad()
	if f.unknown {
		return nil, errs.E("lease", errkind.StaleEpoch, "", "another boot")
	}
	if f.failing > 0 {
		f.failing--
		return nil, errs.E("lease", errkind.Internal, "", "it was asked to fail")
	}
	f.renewed++
	return &schedulerv1.LeaseReply{Lease: durationpb.New(f.lease)}, f.silent()
}

func (f *fakeScheduler) commit(_ context.Context, _ bus.Request, req *schedulerv1.CommitManifestRequest) (*schedulerv1.CommitManifestReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.commits++
	if f.refuse > 0 {
		f.refuse--
		return nil, errs.E("commit", errkind.Conflict, "", "it was asked to fail")
	}
	o := f.owned[req.GetSession().GetSession()]
	m := req.GetManifest()
	switch {
	case o == nil || !proto.Equal(o.GetSession(), req.GetSession()):
		return nil, errs.E("commit", errkind.StaleEpoch, "", "another epoch")
	case o.Manifest != m.GetId() && o.Manifest != m.GetParent():
		return nil, errs.E("commit", errkind.Conflict, "", "another parent")
	}
	o.Manifest = m.GetId()
	f.accepted++
	return &schedulerv1.CommitManifestReply{Head: o.Manifest}, nil
}

func (f *fakeScheduler) report(_ context.Context, _ bus.Request, req *schedulerv1.ReportRequest) (*schedulerv1.ReportReply, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports = append(f.reports, req)
	if req.GetWhat() == "dropped" {
		return &schedulerv1.ReportReply{}, nil
	}
	if o := f.owned[req.GetSession().GetSession()]; o != nil && proto.Equal(o.GetSession(), req.GetSession()) {
		o.State = corev1.State_STATE_ASLEEP
	}
	return &schedulerv1.ReportReply{State: corev1.State_STATE_ASLEEP}, nil
}

func (f *fakeScheduler) set(ref *corev1.SessionRef, st corev1.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o := f.owned[ref.GetSession()]
	if o == nil {
		o = &schedulerv1.OwnedSession{}
		f.owned[ref.GetSession()] = o
	}
	o.Session, o.State, o.Terms, o.SessionName = ref, st, terms(), "default"
	if st == corev1.State_STATE_ACTIVE {
		o.LastActiveEpoch = ref.GetEpoch()
	}
}

func (f *fakeScheduler) disown(ref *corev1.SessionRef) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.owned, ref.GetSession())
}

func (f *fakeScheduler) head(ref *corev1.SessionRef) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.owned[ref.GetSession()].GetManifest()
}

func (f *fakeScheduler) with(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeScheduler) reported() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.reports)
}

// fakeCredentials mints real grants.
type fakeCredentials struct {
	mu      sync.Mutex
	key     ed25519.PrivateKey
	revoked []*credentialsv1.RevokedGeneration
	ended   []*credentialsv1.EndedGrants
	seq     uint64
	down    bool
	asked   int
}

// end ends grants as credentials does: from now on the feed says so.
func (f *fakeCredentials) end(e *credentialsv1.EndedGrants) {
	f.change(func() { f.ended = append(f.ended, e) })
}

func (f *fakeCredentials) change(what func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	what()
	f.seq++
}

func newFakeCredentials(t *testing.T, c *bus.Conn) *fakeCredentials {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeCredentials{key: priv}
	jwks, err := json.Marshal(map[string]any{"keys": []any{map[string]string{
		"kty": "OKP", "crv": "Ed25519", "kid": "k1", "use": "sig", "x": base64.RawURLEncoding.EncodeToString(pub)}}})
	if err != nil {
		t.Fatal(err)
	}
	svc, err := c.Serve(context.Background(), bus.ServiceConfig{Name: "credentials"})
	if err == nil {
		err = bus.Handle(svc, "jwks", func(_ context.Context, _ bus.Request, req *credentialsv1.JwksRequest) (*credentialsv1.JwksReply, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.asked++
			switch {
			case f.down:
				return nil, errs.E("jwks", errkind.Unavailable, "", "credentials is away")
			case req.GetFeed() == "f1" && req.GetSeq() == f.seq:
				return &credentialsv1.JwksReply{Feed: "f1", Seq: f.seq}, nil
			}
			return &credentialsv1.JwksReply{Jwks: jwks, Revoked: f.revoked, Ended: f.ended, Feed: "f1", Seq: f.seq}, nil
		})
	}
	if err == nil {
		err = bus.Handle(svc, "datakey", func(_ context.Context, _ bus.Request, req *credentialsv1.DataKeyRequest) (*credentialsv1.DataKeyReply, error) {
			sealed, err := seal.SealTo(seal.Public(req.GetHostKey()), make([]byte, 32), rand.Reader)
			return &credentialsv1.DataKeyReply{SealedKey: sealed}, err
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fakeCredentials) mint(t testing.TB, ref *corev1.SessionRef, fe subjects.Caller, proofKey ed25519.PublicKey, change func(*grant.Claims)) string {
	t.Helper()
	now := time.Now()
	c := grant.Claims{
		Issuer: grant.Issuer, ID: "g1", Tenant: fe.Tenant, Frontend: fe.Frontend, Session: ids.SessionKey(ref.GetSession()),
		Generation: grant.GenerationOf(ref.GetGeneration()), Epoch: grant.EpochOf(ref.GetEpoch()), Host: testHost,
		Principal: grant.Principal{Issuer: "https://issuer", Subject: "u"}, Confirm: grant.Confirm(proofKey), Verbs: grant.DefaultVerbs(),
		IssuedAt: now.Unix(), Expires: now.Add(15 * time.Minute).Unix(), AuthTime: now.Unix(),
	}
	if change != nil {
		change(&c)
	}
	g, err := grant.Sign(c, "k1", f.key)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func (r *rig) hostKey() seal.Public { return r.run.h.key.Public() }

func operator() subjects.Caller { return subjects.Operator() }

func invokeInventory(r *rig, c *bus.Conn) (*hostv1.InventoryReply, error) {
	return bus.InvokeHost[*hostv1.InventoryReply](r.context(), c, testHost, "inventory", &hostv1.InventoryRequest{})
}

func (f *fakeScheduler) state(ref *corev1.SessionRef) corev1.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.owned[ref.GetSession()].GetState()
}

func timestampIn(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(time.Now().Add(d)) }
