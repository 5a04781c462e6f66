package scheduler

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// world is a bus with a scheduler that can be killed and started again.
type world struct {
	t     testing.TB
	bus   *bus.Embedded
	dir   string
	host  *bus.Conn
	life  *bus.Conn
	op    *bus.Conn
	cfg   Config
	stop  func()
	creds *fakeCredentials
	led   atomic.Pointer[leader] // the last that served
}

// patience is how long a test waits for an event on a busy machine.
const patience = time.Minute

type fakeCredentials struct {
	mu      sync.Mutex
	revoked []string
	fail    error
}

func (c *fakeCredentials) revoke(_ context.Context, _ bus.Request, r *credentialsv1.RevokeRequest) (*credentialsv1.RevokeReply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fail != nil {
		return nil, c.fail
	}
	g, _ := key(r.GetSession())
	c.revoked = append(c.revoked, r.GetSession().GetSession()+" "+g)
	return &credentialsv1.RevokeReply{}, nil
}

func newWorld(t testing.TB, change func(*Config)) *world {
	w := &world{t: t, dir: t.TempDir(), creds: &fakeCredentials{}}
	w.bus = bustest.Start(t, subjects.Host(testHost), subjects.Host("h2"), subjects.Host("h3"))
	w.host = bustest.Connect(t, w.bus, subjects.Host(testHost))
	w.life = bustest.Connect(t, w.bus, subjects.Service("lifecycle"))
	w.op = bustest.Connect(t, w.bus, subjects.Operator())
	svc, err := bustest.Connect(t, w.bus, subjects.Service("credentials")).Serve(bustest.Context(t), bus.ServiceConfig{Name: "credentials"})
	if err == nil {
		err = bus.Handle(svc, "revoke", w.creds.revoke)
	}
	if err != nil {
		t.Fatal(err)
	}
	w.cfg = NewConfig(w.dir)
	w.cfg.Log = bustest.Log(t)
	w.cfg.Lease = time.Minute // most hosts here join and renew nothing, and a busy machine is slow
	w.cfg.RetryMin, w.cfg.RetryMax = 20*time.Millisecond, 200*time.Millisecond
	w.cfg.TrimAfter = 100 * time.Millisecond
	w.cfg.Fatal = func(err error) { t.Errorf("fatal: %v", err) }
	if change != nil {
		change(&w.cfg)
	}
	onLead := w.cfg.onLead
	w.cfg.onLead = func(l *leader) {
		w.led.Store(l)
		if onLead != nil {
			onLead(l)
		}
	}
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

// start starts the scheduler on the same folder and waits until it serves.
func (w *world) start() { w.t.Helper(); w.startWith() }

func (w *world) startWith(opts ...bus.Option) {
	w.t.Helper()
	conn, err := w.bus.Connect(bustest.Context(w.t), subjects.Service("scheduler"), opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}, 1), make(chan error, 1)
	cfg := w.cfg
	cfg.Ready = func() { ready <- struct{}{} }
	go func() { done <- Run(ctx, cfg, conn) }()
	select {
	case <-ready:
	case err := <-done:
		w.t.Fatalf("scheduler ended: %v", err)
	case <-time.After(patience):
		w.t.Fatalf("scheduler does not serve after %s", patience)
	}
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Errorf("scheduler ended: %v", err)
			}
			conn.Close()
		})
	}
}

func (w *world) restart() { w.t.Helper(); w.stop(); w.start() }

func testKey(n int) ids.SessionKey {
	return ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", fmt.Sprint("u", n), "default")
}

func admission(n int, request string) *corev1.Admission {
	return &corev1.Admission{
		Actor: &corev1.Actor{Tenant: "acme", Issuer: "https://issuer", Subject: fmt.Sprint("u", n), Frontend: "web"},
		Terms: &corev1.Terms{Plan: "free", Template: "default", Tier: corev1.Tier_TIER_NULL,
			Limits: &corev1.Limits{CpuMillis: 100, MemoryBytes: 1 << 20, Pids: 64, DiskBytes: 1 << 30},
			Idle:   durationpb.New(15 * time.Minute), Retention: durationpb.New(720 * time.Hour),
			Persistence: corev1.Persistence_PERSISTENCE_DURABLE},
		RequestId: request, BodyHash: []byte("h"), StoredAt: timestamppb.Now(),
		Deadline: timestamppb.New(time.Now().Add(20 * time.Second)),
		Keys:     []string{testKey(n).String()}, SessionName: "default",
	}
}

func (w *world) open(n int, request string) (*schedulerv1.WakeReply, error) {
	return w.openWith(admission(n, request))
}

func (w *world) openWith(a *corev1.Admission) (*schedulerv1.WakeReply, error) {
	return bus.Invoke[*schedulerv1.WakeReply](bustest.Context(w.t), w.life, "scheduler", "wake", &schedulerv1.WakeRequest{Admission: a})
}

func (w *world) close(n int, request string) (*schedulerv1.SleepReply, error) {
	return bus.Invoke[*schedulerv1.SleepReply](bustest.Context(w.t), w.life, "scheduler", "sleep",
		&schedulerv1.SleepRequest{Tenant: "acme", Session: testKey(n).String(), RequestId: request, Reason: "close"})
}

func (w *world) delete(n int, request string) (*schedulerv1.DeleteReply, error) {
	return bus.Invoke[*schedulerv1.DeleteReply](bustest.Context(w.t), w.life, "scheduler", "delete",
		&schedulerv1.DeleteRequest{Tenant: "acme", Session: testKey(n).String(), RequestId: request})
}

func (w *world) show(n int) *schedulerv1.SessionRecord {
	w.t.Helper()
	r, err := bus.Invoke[*schedulerv1.ShowReply](bustest.Context(w.t), w.op, "scheduler", "show",
		&schedulerv1.ShowRequest{Tenant: "acme", Session: testKey(n).String()})
	if err != nil {
		w.t.Fatalf("show: %v", err)
	}
	return r.GetRecord()
}

// become waits until the session is in a state.
func (w *world) become(n int, want corev1.State) *schedulerv1.SessionRecord {
	w.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		r := w.show(n)
		if r.GetState() == want {
			return r
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("session is %s, wanted %s", r.GetState(), want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func must[T proto.Message](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
