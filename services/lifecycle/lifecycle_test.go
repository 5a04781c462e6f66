package lifecycle

import (
	"context"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const tenant ids.Tenant = "acme"

var session = ids.DeriveSessionKey([]byte("k"), "https://issuer.test", tenant, "ann", "default")

// world is scheduler and one host as lifecycle sees them, on a real bus.
type world struct {
	t         *testing.T
	bus       *bus.Embedded
	scheduler *bus.Conn

	mu       sync.Mutex
	record   *schedulerv1.SessionRecord
	since    time.Time
	busy     bool
	sleeps   chan *schedulerv1.SleepRequest
	wakes    chan *schedulerv1.WakeRequest
	activity chan time.Time
	deletes  chan *schedulerv1.DeleteRequest
	verdict  error // scheduler's answer to a delete
	// wakeFault is its answer to a wake, while set.
	wakeFault error
	hosts     []*schedulerv1.HostRecord
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, bus: bustest.Start(t, subjects.Host("h1")),
		sleeps: make(chan *schedulerv1.SleepRequest, 16), wakes: make(chan *schedulerv1.WakeRequest, 16), activity: make(chan time.Time, 64),
		deletes: make(chan *schedulerv1.DeleteRequest, 16)}
	w.scheduler = bustest.Connect(t, w.bus, subjects.Service("scheduler"))
	micro, err := w.scheduler.Serve(t.Context(), bus.ServiceConfig{Name: "scheduler"})
	must(t, err)
	must(t, bus.Handle(micro, "wake", func(_ context.Context, _ bus.Request, r *schedulerv1.WakeRequest) (*schedulerv1.WakeReply, error) {
		w.wakes <- r
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.wakeFault != nil {
			return nil, w.wakeFault
		}
		return &schedulerv1.WakeReply{Session: w.ref(), Host: "h1", Terms: r.GetAdmission().GetTerms()}, nil
	}))
	must(t, bus.Handle(micro, "hosts", func(context.Context, bus.Request, *schedulerv1.HostsRequest) (*schedulerv1.HostsReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return &schedulerv1.HostsReply{Hosts: w.hosts}, nil
	}))
	must(t, bus.Handle(micro, "show", func(context.Context, bus.Request, *schedulerv1.ShowRequest) (*schedulerv1.ShowReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return &schedulerv1.ShowReply{Record: w.record}, nil
	}))
	must(t, bus.Handle(micro, "list", func(context.Context, bus.Request, *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.record == nil {
			return &schedulerv1.ListReply{}, nil
		}
		return &schedulerv1.ListReply{Records: []*schedulerv1.SessionRecord{w.record}}, nil
	}))
	must(t, bus.Handle(micro, "sleep", func(_ context.Context, _ bus.Request, r *schedulerv1.SleepRequest) (*schedulerv1.SleepReply, error) {
		w.sleeps <- r
		return &schedulerv1.SleepReply{Session: w.ref(), State: corev1.State_STATE_ASLEEP}, nil
	}))
	must(t, bus.Handle(micro, "delete", func(_ context.Context, _ bus.Request, r *schedulerv1.DeleteRequest) (*schedulerv1.DeleteReply, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.deletes <- r
		if w.verdict != nil {
			return nil, w.verdict
		}
		return &schedulerv1.DeleteReply{Session: w.ref(), State: corev1.State_STATE_ASLEEP}, nil
	}))
	host := bustest.Connect(t, w.bus, subjects.Host("h1"))
	hm, err := host.Serve(t.Context(), bus.ServiceConfig{Name: "host"})
	must(t, err)
	must(t, bus.Handle(hm, "activity", func(context.Context, bus.Request, *hostv1.ActivityRequest) (*hostv1.ActivityReply, error) {
		w.activity <- time.Now()
		w.mu.Lock()
		defer w.mu.Unlock()
		return &hostv1.ActivityReply{Busy: w.busy, IdleSince: timestamppb.New(w.since)}, nil
	}))
	return w
}

func (w *world) ref() *corev1.SessionRef {
	return &corev1.SessionRef{Tenant: string(tenant), Session: string(session),
		Generation: &corev1.Stamp{Incarnation: 1, Index: 1}, Epoch: &corev1.Stamp{Incarnation: 1, Index: 2}}
}

// active puts the session into that state and tells it, as scheduler would.
func (w *world) active(idle time.Duration) {
	w.t.Helper()
	w.mu.Lock()
	w.since = time.Now()
	w.record = &schedulerv1.SessionRecord{Session: w.ref(), Revision: 3, State: corev1.State_STATE_ACTIVE, Host: "h1",
		Terms: &corev1.Terms{Idle: durationpb.New(idle)}}
	w.mu.Unlock()
	_, err := w.scheduler.Publish(w.t.Context(), subjects.Session(tenant, session, "active"), &schedulerv1.Event{
		Session: w.ref(), Revision: 3, At: timestamppb.Now(), State: corev1.State_STATE_ACTIVE,
		Detail: &schedulerv1.Event_Active{Active: &schedulerv1.Active{Idle: durationpb.New(idle)}}})
	must(w.t, err)
}

// start runs lifecycle until stop.
func (w *world) start(cfg Config) (stop func()) {
	w.t.Helper()
	conn := bustest.Connect(w.t, w.bus, subjects.Service("lifecycle"))
	ctx, cancel := context.WithCancel(w.t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- Run(ctx, cfg, conn, bustest.Log(w.t), func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		w.t.Fatalf("lifecycle ended: %v", err)
	}
	return func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("lifecycle ended: %v", err)
		}
	}
}

func (w *world) identity() *bus.Conn {
	return bustest.Connect(w.t, w.bus, subjects.Service("identity"))
}

func (w *world) verified() *lifecyclev1.Verified {
	return &lifecyclev1.Verified{Actor: &corev1.Actor{Tenant: string(tenant), Issuer: "https://issuer.test", Subject: "ann"},
		RequestId: "r1", Keys: []string{string(session)}, Plan: "default", StoredAt: timestamppb.Now(), SessionName: "default"}
}

func TestOpenBecomesAWakeWithTerms(t *testing.T) {
	w := newWorld(t)
	defer w.start(NewConfig())()
	reply, err := bus.Invoke[*lifecyclev1.OpenReply](t.Context(), w.identity(), "lifecycle", "open",
		&lifecyclev1.OpenRequest{Verified: w.verified(), Ask: &identityv1.OpenRequest{}})
	must(t, err)
	if got := (<-w.wakes).GetAdmission(); got.GetTerms().GetTier() != corev1.Tier_TIER_GVISOR || got.GetRequestId() != "r1" {
		t.Errorf("scheduler was asked for %v", got)
	}
	if reply.GetWake().GetHost() != "h1" {
		t.Errorf("the answer is %v", reply)
	}
}

func TestUnknownTemplateIsRefusedAndChangesNothing(t *testing.T) {
	w := newWorld(t)
	defer w.start(NewConfig())()
	_, err := bus.Invoke[*lifecyclev1.OpenReply](t.Context(), w.identity(), "lifecycle", "open",
		&lifecyclev1.OpenRequest{Verified: w.verified(), Ask: &identityv1.OpenRequest{Template: "absent"}})
	if !errs.Is(err, errkind.Refused) || !strings.Contains(err.Error(), `there is no template "absent"`) {
		t.Errorf("the answer is %v", err)
	}
	select {
	case r := <-w.wakes:
		t.Errorf("scheduler was asked for %v", r)
	default:
	}
}

// TestIdleIsExact: the host's answer moves the timer, the sleep is asked for
// when the idle time since then is over and not before, and it names that time.
// (The host may be asked early: by the search for lost timers at the start.)
func TestIdleIsExact(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	defer w.start(NewConfig())()
	const idle = 1500 * time.Millisecond
	w.active(idle)
	started := w.since
	w.mu.Lock()
	w.since = started.Add(500 * time.Millisecond) // activity after the commit
	want := w.since
	w.mu.Unlock()

	sleep := <-w.sleeps
	if got := sleep.GetIdleSince().AsTime(); !got.Equal(want) {
		t.Errorf("idle since %s, want %s", got, want)
	}
	if early := want.Add(idle).Sub(time.Now()); early > 0 {
		t.Errorf("asleep %s before the idle time was over", early)
	}
	t.Logf("sleep was asked for %s after the exact time", time.Since(want.Add(idle)))
}

// TestTimerSurvivesARestart: lifecycle is down when the timer is due.
func TestTimerSurvivesARestart(t *testing.T) {
	w := newWorld(t)
	stop := w.start(NewConfig())
	w.active(time.Second)
	waitForTimer(t, w)
	stop()
	<-time.After(time.Until(w.since.Add(1200 * time.Millisecond))) // the fault itself: due while nobody is there
	defer w.start(NewConfig())()
	select {
	case <-w.sleeps:
	case <-time.After(20 * time.Second):
		t.Fatal("the timer was lost")
	}
}

// TestLostTimersAreRebuilt: the timer stream was wiped while lifecycle was down.
func TestLostTimersAreRebuilt(t *testing.T) {
	w := newWorld(t)
	w.mu.Lock()
	w.since = time.Now().Add(-time.Hour)
	w.record = &schedulerv1.SessionRecord{Session: w.ref(), Revision: 3, State: corev1.State_STATE_ACTIVE, Host: "h1",
		Terms: &corev1.Terms{Idle: durationpb.New(time.Minute)}}
	w.mu.Unlock()
	defer w.start(NewConfig())()
	select {
	case <-w.sleeps:
	case <-time.After(20 * time.Second):
		t.Fatal("an active session without a timer stayed awake")
	}
}

// TestAnEndThatIsTooEarlyIsAskedForAgain: the warning is sent as a warning,
// and scheduler's no to the end (too early by its own time, or one end too
// many) arms the timer anew; nothing is lost and nothing goes to BERTH_DEAD.
func TestAnEndThatIsTooEarlyIsAskedForAgain(t *testing.T) {
	w := newWorld(t)
	keeper, operator := bustest.Connect(t, w.bus, subjects.Keeper()), bustest.Connect(t, w.bus, subjects.Operator())
	told, err := operator.NATS().SubscribeSync("berth.v1.session.*.*.*")
	must(t, err)
	must(t, operator.NATS().Flush())
	defer w.start(NewConfig())()
	w.asleep(24 * time.Hour)

	if r := <-w.deletes; !r.GetExpire() || !r.GetWarn() || r.GetRevision() != 7 {
		t.Errorf("the warning says %v", r)
	}
	timer, _ := lastTimer(t, keeper, core.TimerExpire, 0)
	if left := time.Until(timer.GetDue().AsTime()); left < core.Warning {
		t.Errorf("the end is %s after the warning", left)
	}
	_, seq := lastTimer(t, keeper, core.TimerExpire, 0)
	self := bustest.Connect(t, w.bus, subjects.Service("lifecycle"))
	for _, kind := range []errkind.Kind{errkind.Conflict, errkind.Exhausted} {
		w.mu.Lock()
		w.verdict = errs.E("scheduler.delete", kind, "", "not yet")
		w.mu.Unlock()
		must(t, self.ArmTimer(t.Context(), tenant, session, core.TimerExpire, time.Now(), timer))
		if r := <-w.deletes; !r.GetExpire() || r.GetWarn() {
			t.Errorf("the end says %v", r)
		}
		var again *lifecyclev1.Timer
		for again == nil || time.Until(again.GetDue().AsTime()) > 2*core.ExpireRetry || time.Until(again.GetDue().AsTime()) < time.Minute {
			again, seq = lastTimer(t, keeper, core.TimerExpire, seq)
		}
	}
	w.mu.Lock()
	w.verdict = nil
	w.mu.Unlock()
	must(t, self.ArmTimer(t.Context(), tenant, session, core.TimerExpire, time.Now(), timer))
	names := ""
	for !strings.HasSuffix(names, "expire ") {
		m, err := told.NextMsg(10 * time.Second)
		must(t, err)
		names += m.Subject[strings.LastIndexByte(m.Subject, '.')+1:] + " "
	}
	if names != "asleep expiring expire " {
		t.Errorf("the events are %s", names)
	}
	if dead, err := operator.ListDead(t.Context(), "lifecycle", 10); err != nil || len(dead) != 0 {
		t.Errorf("%d timers went to BERTH_DEAD, %v", len(dead), err)
	}
}

// TestATimerInBerthDeadIsArmedAgain: an active session whose timer is gone
// does not stay awake for ever while lifecycle runs on.
func TestATimerInBerthDeadIsArmedAgain(t *testing.T) {
	w := newWorld(t)
	cfg := NewConfig()
	cfg.RebuildEvery = 200 * time.Millisecond
	defer w.start(cfg)()
	w.mu.Lock() // its event was handled long ago, and its timer is gone
	w.since = time.Now().Add(-time.Hour)
	w.record = &schedulerv1.SessionRecord{Session: w.ref(), Revision: 3, State: corev1.State_STATE_ACTIVE, Host: "h1",
		Terms: &corev1.Terms{Idle: durationpb.New(time.Minute)}}
	w.mu.Unlock()
	select {
	case <-w.sleeps:
	case <-time.After(20 * time.Second):
		t.Fatal("an active session without a timer stayed awake")
	}
}

// asleep puts the session into that state and tells it.
func (w *world) asleep(retention time.Duration) {
	w.t.Helper()
	w.mu.Lock()
	w.record = &schedulerv1.SessionRecord{Session: w.ref(), Revision: 7, State: corev1.State_STATE_ASLEEP, ChangedAt: timestamppb.Now(),
		Terms: &corev1.Terms{Retention: durationpb.New(retention)}}
	w.mu.Unlock()
	_, err := w.scheduler.Publish(w.t.Context(), subjects.Session(tenant, session, "asleep"), &schedulerv1.Event{
		Session: w.ref(), Revision: 7, At: timestamppb.Now(), State: corev1.State_STATE_ASLEEP,
		Detail: &schedulerv1.Event_Asleep{Asleep: &schedulerv1.Asleep{Retention: durationpb.New(retention)}}})
	must(w.t, err)
}

// lastTimer waits for a set timer of the kind that was stored after seq.
func lastTimer(t *testing.T, keeper *bus.Conn, kind string, after uint64) (*lifecyclev1.Timer, uint64) {
	t.Helper()
	stream, err := keeper.JetStream().Stream(t.Context(), "BERTH_TIMERS")
	must(t, err)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		m, err := stream.GetLastMsgForSubject(t.Context(), "berth.v1.timer.set."+string(tenant)+"."+string(session)+"."+kind)
		if err != nil || m.Sequence <= after {
			continue
		}
		out := &lifecyclev1.Timer{}
		must(t, bus.Decode(m.Data, m.Header.Get(bus.HeaderContentType), out))
		return out, m.Sequence
	}
	t.Fatalf("no timer %s was armed", kind)
	return nil, 0
}

// waitForTimer waits until the stream holds the session's timer.
func waitForTimer(t *testing.T, w *world) {
	t.Helper()
	keeper := bustest.Connect(t, w.bus, subjects.Keeper())
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		stream, err := keeper.JetStream().Stream(t.Context(), "BERTH_TIMERS")
		must(t, err)
		if stream.CachedInfo().State.Msgs > 0 {
			return
		}
	}
	t.Fatal("no timer was armed")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestTheExampleHoldsTheDefaults: the annotated example is read, and says what is so.
func TestTheExampleHoldsTheDefaults(t *testing.T) {
	cfg := Config{}
	must(t, svc.LoadConfig("lifecycle.example.yaml", &cfg))
	want := NewConfig()
	plan := want.Policy.Plans["default"]
	plan.Templates, plan.Zones = []string{}, []string{}
	want.Policy.Plans["default"] = plan
	if !reflect.DeepEqual(cfg, want) {
		t.Errorf("the example says\n%+v\nthe defaults are\n%+v", cfg, want)
	}
}
