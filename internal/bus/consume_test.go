package bus_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// quick is a consumer for tests, on BERTH_SESSIONS or BERTH_REQUESTS.
func quick(stream, owner string) subjects.Consumer {
	s, _ := subjects.FindStream(stream)
	durable := map[string]string{"BERTH_REQUESTS": "identity-requests", "BERTH_SESSIONS": "lifecycle-sessions"}[stream]
	return subjects.Consumer{Stream: stream, Durable: durable, Owner: owner, Filters: s.Subjects, AckWait: time.Second,
		MaxDeliver: 3, Backoff: []time.Duration{10 * time.Millisecond}, MaxPending: 1000, Memory: s.Retention == subjects.WorkQueue}
}

func startQuick(t *testing.T, stream, owner string, callers ...subjects.Caller) (*bus.Embedded, bus.ConsumerSpec) {
	t.Helper()
	d := bus.Declared(1)
	c := quick(stream, owner)
	d.Consumers = []subjects.Consumer{c}
	e, err := bus.StartEmbedded(bustest.Context(t), bus.EmbeddedConfig{Dir: t.TempDir(), Port: -1, Callers: callers, Declaration: &d, Log: bustest.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e, bus.ConsumerSpec{Consumer: c, Workers: 2, Heartbeat: 500 * time.Millisecond}
}

func request(t *testing.T, c *bus.Conn, body string, opts ...bus.PubOption) {
	t.Helper()
	self := c.Self()
	_, err := c.Publish(bustest.Context(t), subjects.Request(self.Tenant, self.Frontend, "open"), wrapperspb.String(body), opts...)
	if err != nil {
		t.Fatal(err)
	}
}

func body(m *bus.Msg) string {
	var v wrapperspb.StringValue
	if err := m.Decode(&v); err != nil {
		return "undecodable: " + err.Error()
	}
	return v.Value
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

func streamMessages(t *testing.T, c *bus.Conn, stream string) uint64 {
	t.Helper()
	s, err := c.JetStream().Stream(bustest.Context(t), stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

func TestKindDecidesWhatBecomesOfAMessage(t *testing.T) {
	e, spec := startQuick(t, "BERTH_REQUESTS", "identity", acmeWeb)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	fe := bustest.Connect(t, e, acmeWeb)
	op := bustest.Connect(t, e, subjects.Operator())
	ctx := bustest.Context(t)
	var mu sync.Mutex
	calls := map[string]int{}
	fixed := false
	k, err := idn.Consume(ctx, spec, func(_ context.Context, m *bus.Msg) error {
		mu.Lock()
		defer mu.Unlock()
		b := body(m)
		calls[b]++
		switch {
		case b == "refused":
			return errs.E("open", errkind.Refused, "", "the plan is used up")
		case b == "invalid" && !fixed:
			return errs.E("open", errkind.Invalid, "", "no such field")
		case b == "busy":
			return errs.E("open", errkind.Busy, "", "later")
		case b == "twice" && calls[b] == 1:
			return errors.New("some fault")
		case b == "panic":
			panic("defect")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []string{"good", "refused", "invalid", "busy", "twice", "panic"} {
		request(t, fe, b)
	}
	eventually(t, "the work queue is empty", func() bool { return streamMessages(t, op, "BERTH_REQUESTS") == 0 })
	mu.Lock()
	want := map[string]int{"good": 1, "refused": 1, "invalid": 1, "busy": 3, "twice": 2, "panic": 3}
	for b, n := range want {
		if calls[b] != n {
			t.Errorf("%s was handled %d times, want %d", b, calls[b], n)
		}
	}
	fixed = true
	mu.Unlock()

	retryDead(t, idn, op, k)
}

// retryDead finds the three dead messages, of which one can be handled by now.
func retryDead(t *testing.T, idn, op *bus.Conn, k *bus.Consumer) {
	t.Helper()
	ctx := bustest.Context(t)
	dead, err := op.ListDead(ctx, "identity", 10)
	if err != nil || len(dead) != 3 {
		t.Fatalf("%+v, %v", dead, err)
	}
	var invalid bus.DeadLetter
	for _, d := range dead {
		if d.Reason == "open: no such field" {
			invalid = d
		}
	}
	if invalid.Subject != "berth.v1.request.acme.web.open" || invalid.Consumer != "identity-requests" || invalid.Stream != "BERTH_REQUESTS" ||
		invalid.Deliveries != 1 || invalid.Header.Get("ce-source") != "berth/fe-acme-web" || invalid.Stored.IsZero() || len(invalid.Body) == 0 {
		t.Fatalf("%+v", dead)
	}

	svc, err := idn.Serve(ctx, bus.ServiceConfig{Name: "identity"})
	if err != nil {
		t.Fatal(err)
	}
	if err := svc.HandleRetry(k); err != nil {
		t.Fatal(err)
	}
	if err := op.RetryDead(ctx, invalid.Sequence); err != nil {
		t.Fatal(err)
	}
	for _, d := range dead {
		if d.Sequence != invalid.Sequence {
			if err := op.RetryDead(ctx, d.Sequence); err == nil {
				t.Errorf("the retry of %q went well", d.Reason)
			}
		}
	}
	if err := op.RetryDead(ctx, 999); !errs.Is(err, errkind.NotFound) {
		t.Errorf("got %v", err)
	}
	if left, err := op.ListDead(ctx, "", 10); err != nil || len(left) != 2 {
		t.Errorf("%+v, %v", left, err)
	}
}

// The prefetch hazard: messages that wait in a buffer run out of time.
func TestSlowConsumerHandlesEachMessageOnce(t *testing.T) {
	e, spec := startQuick(t, "BERTH_REQUESTS", "identity", acmeWeb)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	fe := bustest.Connect(t, e, acmeWeb)
	op := bustest.Connect(t, e, subjects.Operator())
	var calls, running, most atomic.Int64
	_, err := idn.Consume(bustest.Context(t), spec, func(_ context.Context, m *bus.Msg) error {
		calls.Add(1)
		n := running.Add(1)
		for {
			old := most.Load()
			if n <= old || most.CompareAndSwap(old, n) {
				break
			}
		}
		wait := 300 * time.Millisecond
		if body(m) == "0" {
			wait = 2500 * time.Millisecond // longer than AckWait
		}
		time.Sleep(wait)
		running.Add(-1)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 12 {
		request(t, fe, fmt.Sprint(i))
	}
	eventually(t, "all handled", func() bool { return streamMessages(t, op, "BERTH_REQUESTS") == 0 })
	if calls.Load() != 12 || most.Load() != 2 {
		t.Errorf("%d calls for 12 messages, %d at once", calls.Load(), most.Load())
	}
}

// A message that no publisher of ours wrote (the server's own answer, steered
// by a foreign reply subject) never reaches a handler.
func TestAMessageWithoutCloudEventsIsBuried(t *testing.T) {
	e, spec := startQuick(t, "BERTH_SESSIONS", "lifecycle", acmeWeb)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	fe := bustest.Connect(t, e, acmeWeb)
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	op := bustest.Connect(t, e, subjects.Operator())
	ctx := bustest.Context(t)
	var handled atomic.Int64
	if _, err := life.Consume(ctx, spec, func(context.Context, *bus.Msg) error { handled.Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	forged := subjects.Session("acme", session, "active")
	if err := fe.NATS().PublishRequest(subjects.Request("acme", "web", "open"), forged, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is dead", func() bool { d, err := op.ListDead(ctx, "lifecycle", 5); return err == nil && len(d) == 1 })
	if _, err := sched.Publish(ctx, forged, wrapperspb.String("real")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the real one is handled", func() bool { return handled.Load() == 1 })
}

func TestAMissingConsumerIsRecreatedAndGoesOn(t *testing.T) {
	e, spec := startQuick(t, "BERTH_SESSIONS", "lifecycle")
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	keeper := bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	var mu sync.Mutex
	calls := map[string]int{}
	k, err := life.Consume(ctx, spec, func(_ context.Context, m *bus.Msg) error {
		mu.Lock()
		defer mu.Unlock()
		calls[body(m)]++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := func(n int) func() bool {
		return func() bool { mu.Lock(); defer mu.Unlock(); return len(calls) == n }
	}
	publish := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := sched.Publish(ctx, subjects.Session("acme", session, "active"), wrapperspb.String(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish(0, 50)
	eventually(t, "50 handled", seen(50))
	time.Sleep(3 * spec.Heartbeat) // let the watchdog see the floor: it looks at every third quiet heartbeat
	if err := keeper.JetStream().DeleteConsumer(ctx, spec.Stream, spec.Durable); err != nil {
		t.Fatal(err)
	}
	publish(50, 100)
	eventually(t, "100 handled", seen(100))
	mu.Lock()
	again := 0
	for _, n := range calls {
		again += n - 1
	}
	mu.Unlock()
	t.Logf("%d messages handled again", again)
	stop, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	k.Stop(stop)
	if stop.Err() != nil {
		t.Error("the consumer did not stop")
	}
}

func TestAConsumerGoesOnAfterItsConnectionWasCut(t *testing.T) {
	e, spec := startQuick(t, "BERTH_REQUESTS", "identity", acmeWeb)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	fe := bustest.Connect(t, e, acmeWeb)
	var handled atomic.Int64
	if _, err := idn.Consume(bustest.Context(t), spec, func(context.Context, *bus.Msg) error { handled.Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		request(t, fe, fmt.Sprint(i))
		eventually(t, "handled", func() bool { return handled.Load() == int64(i+1) })
		if err := idn.NATS().ForceReconnect(); err != nil {
			t.Fatal(err)
		}
	}
}

// A consumer that holds its messages back (here: paused behind our back) is
// found and recreated, and nothing is lost or handled twice.
func TestAStalledConsumerIsRecreated(t *testing.T) {
	e, spec := startQuick(t, "BERTH_SESSIONS", "lifecycle")
	spec.Heartbeat = 200 * time.Millisecond
	life, sched := bustest.Connect(t, e, subjects.Service("lifecycle")), bustest.Connect(t, e, subjects.Service("scheduler"))
	keeper := bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	var handled atomic.Int64
	if _, err := life.Consume(ctx, spec, func(context.Context, *bus.Msg) error { handled.Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	publish := func() {
		t.Helper()
		for i := range 20 {
			if _, err := sched.Publish(ctx, subjects.Session("acme", session, "active"), wrapperspb.String(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	publish()
	eventually(t, "20 handled", func() bool { return handled.Load() == 20 })
	if _, err := keeper.JetStream().PauseConsumer(ctx, spec.Stream, spec.Durable, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	publish()
	eventually(t, "40 handled", func() bool { return handled.Load() >= 40 })
	if n := handled.Load(); n != 40 {
		t.Errorf("%d handled", n)
	}
}

func TestTheKeeperRecreatesOnlyTheCallersOwn(t *testing.T) {
	e := bustest.Start(t)
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	ctx := bustest.Context(t)
	subject := subjects.RPC("bus", "recreate", sched.Self())
	for body, want := range map[string]errkind.Kind{
		`{"stream":"BERTH_SESSIONS","durable":"lifecycle-sessions","stalled":true}`: errkind.Denied,
		`{"stream":"BERTH_SESSIONS","durable":"mine"}`:                              errkind.NotFound,
		`{`: errkind.Invalid,
	} {
		if _, err := sched.CallRaw(ctx, subject, []byte(body), bus.JSON); !errs.Is(err, want) {
			t.Errorf("%s: %v", body, err)
		}
	}
}
