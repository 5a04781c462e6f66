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
	"github.com/nats-io/nats.go"
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

// The duplicate window is global to a stream: with a known id one tenant
// could swallow another's request. Hence ids that nobody else knows, and the
// shortest window.
func TestDuplicateIDsOfTwoTenants(t *testing.T) {
	e := bustest.Start(t, acmeWeb, otherWeb)
	a, b := bustest.Connect(t, e, acmeWeb), bustest.Connect(t, e, otherWeb)
	op := bustest.Connect(t, e, subjects.Operator())
	ctx := bustest.Context(t)
	pub := func(c *bus.Conn, opts ...bus.PubOption) bus.Ack {
		t.Helper()
		self := c.Self()
		ack, err := c.Publish(ctx, subjects.Request(self.Tenant, self.Frontend, "delete"), wrapperspb.String("x"), opts...)
		if err != nil {
			t.Fatal(err)
		}
		return ack
	}
	if pub(a).Duplicate || pub(b).Duplicate {
		t.Error("random ids collided")
	}
	pub(a, bus.WithID("known"))
	time.Sleep(150 * time.Millisecond)
	if pub(b, bus.WithID("known")).Duplicate {
		t.Error("swallowed after the window of 100 ms")
	}
	if n := streamMessages(t, op, "BERTH_REQUESTS"); n != 4 {
		t.Errorf("%d messages stored, want 4", n)
	}
}

func TestPublishStatesWhatItIs(t *testing.T) {
	e := bustest.Start(t)
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	op := bustest.Connect(t, e, subjects.Operator())
	ctx := bustest.Context(t)
	subject := subjects.Session("acme", session, "placed")
	sub, err := op.NATS().SubscribeSync(subject)
	if err != nil {
		t.Fatal(err)
	}
	_ = op.NATS().Flush()
	first, err := sched.Publish(ctx, subject, wrapperspb.String("x"), bus.WithID("own-7"), bus.WithContentType(bus.JSON), bus.WithExpectedLast(0))
	if err != nil {
		t.Fatal(err)
	}
	m, err := sub.NextMsg(5 * time.Second)
	if err != nil || string(m.Data) != `"x"` {
		t.Fatalf("%v, %v", m, err)
	}
	for k, w := range map[string]string{"ce-id": "own-7", "Nats-Msg-Id": "own-7", "ce-type": "dev.berth.v1.session.placed",
		"ce-source": "berth/svc-scheduler", "ce-specversion": "1.0", "ce-datacontenttype": "application/json"} {
		if m.Header.Get(k) != w {
			t.Errorf("%s is %q, want %q", k, m.Header.Get(k), w)
		}
	}
	again, err := sched.Publish(ctx, subject, wrapperspb.String("x"), bus.WithID("own-7"))
	if err != nil || !again.Duplicate || again.Sequence != first.Sequence {
		t.Errorf("%+v, %v", again, err)
	}
	if _, err := sched.Publish(ctx, subject, wrapperspb.String("y"), bus.WithExpectedLast(0)); !errs.Is(err, errkind.Conflict) {
		t.Errorf("got %v", err)
	}
	if _, err := sched.PublishRaw(ctx, subject, make([]byte, 300<<10)); !errs.Is(err, errkind.TooLarge) {
		t.Errorf("got %v", err)
	}
	if _, err := sched.PublishRaw(ctx, subject, make([]byte, 2<<20)); !errs.Is(err, errkind.TooLarge) {
		t.Errorf("got %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if _, err := sched.Publish(short, subjects.Session("acme", session, "idle"), wrapperspb.String("y")); !errs.Is(err, errkind.Denied) {
		t.Errorf("an event of lifecycle: %v", err)
	}
	var futures []bus.Future
	for i := range 200 {
		f, err := sched.PublishAsync(ctx, subject, wrapperspb.String(fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		futures = append(futures, f)
	}
	last := first.Sequence
	for _, f := range futures {
		a, err := f.Wait(ctx)
		if err != nil || a.Sequence <= last {
			t.Fatalf("%+v after %d, %v", a, last, err)
		}
		last = a.Sequence
	}
}

func TestCallFailures(t *testing.T) {
	e := bustest.Start(t, hostH1)
	life, sched := bustest.Connect(t, e, subjects.Service("lifecycle")), bustest.Connect(t, e, subjects.Service("scheduler"))
	ctx := bustest.Context(t)
	wake := subjects.RPC("scheduler", "wake", life.Self())
	if _, err := life.CallRaw(ctx, wake, nil, ""); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("nobody serves: %v", err)
	}
	svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	deadline := make(chan time.Duration, 10)
	err = bus.Handle(svc, "wake", func(ctx context.Context, _ bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		d, _ := ctx.Deadline()
		deadline <- time.Until(d)
		if in.Value == "wait" {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return wrapperspb.String(string(make([]byte, len(in.Value)*4))), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if _, err := bus.Call[*wrapperspb.StringValue](short, life, wake, wrapperspb.String("wait")); !errs.Is(err, errkind.Deadline) {
		t.Errorf("got %v", err)
	}
	if d := <-deadline; d > 200*time.Millisecond || d < 50*time.Millisecond {
		t.Errorf("the handler had %s", d)
	}
	if _, err := life.CallRaw(ctx, wake, []byte(`{"unknown":1}`), bus.JSON); !errs.Is(err, errkind.Invalid) {
		t.Errorf("got %v", err)
	}
	if _, err := life.CallRaw(ctx, wake, []byte("\xff\xff"), bus.Protobuf); !errs.Is(err, errkind.Invalid) {
		t.Errorf("got %v", err)
	}
	if _, err := life.CallRaw(ctx, wake, nil, "text/xml"); !errs.Is(err, errkind.Invalid) {
		t.Errorf("got %v", err)
	}
	if m, err := life.CallRaw(ctx, wake, []byte(`""`), bus.JSON); err != nil || string(m.Data) != `""` || m.Header.Get("Content-Type") != bus.JSON {
		t.Errorf("got %v, %v", m, err)
	}
	big := wrapperspb.String(string(make([]byte, 400<<10)))
	if _, err := bus.Call[*wrapperspb.StringValue](ctx, life, wake, big); !errs.Is(err, errkind.TooLarge) {
		t.Errorf("got %v", err)
	}
	host := bustest.Connect(t, e, hostH1)
	denied, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if _, err := host.CallRaw(denied, wake, nil, ""); !errs.Is(err, errkind.Denied) {
		t.Errorf("got %v", err)
	}
	stop, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := svc.Stop(stop); err != nil {
		t.Error(err)
	}
	if _, err := life.CallRaw(ctx, wake, nil, ""); !errs.Is(err, errkind.Unavailable) {
		t.Errorf("after the stop: %v", err)
	}
}

// nats micro ls shows the fleet: PING and INFO are answered to operators.
func TestTheFleetIsListed(t *testing.T) {
	e := bustest.Start(t, hostH1)
	ctx := bustest.Context(t)
	host, op := bustest.Connect(t, e, hostH1), bustest.Connect(t, e, subjects.Operator())
	if _, err := host.Serve(ctx, bus.ServiceConfig{Name: "host", Metadata: map[string]string{"host": "h1"}}); err != nil {
		t.Fatal(err)
	}
	inbox := op.NATS().NewInbox()
	sub, err := op.NATS().SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	if err := op.NATS().PublishMsg(&nats.Msg{Subject: "$SRV.PING", Reply: inbox}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the host and the keeper
		if _, err := sub.NextMsg(5 * time.Second); err != nil {
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
