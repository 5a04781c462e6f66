package bus_test

import (
	"context"
	"fmt"
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
	type limits struct{ now, deadline time.Time }
	given := make(chan limits, 10)
	err = bus.Handle(svc, "wake", func(ctx context.Context, _ bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		d, _ := ctx.Deadline()
		given <- limits{time.Now(), d}
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
	// It has what was left when the call was sent, in whole milliseconds, from when it got it.
	own, _ := short.Deadline()
	if g := <-given; g.deadline.Sub(g.now) > 200*time.Millisecond || g.deadline.Before(own.Add(-time.Millisecond)) {
		t.Errorf("the handler had %s, to %s after the caller's end", g.deadline.Sub(g.now), g.deadline.Sub(own))
	}
	badBodies(t, life, wake)
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

func badBodies(t *testing.T, life *bus.Conn, wake string) {
	t.Helper()
	ctx := bustest.Context(t)
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
	refusedPublishes(t, sched, first)
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

func refusedPublishes(t *testing.T, sched *bus.Conn, first bus.Ack) {
	t.Helper()
	ctx, subject := bustest.Context(t), subjects.Session("acme", session, "placed")
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
	// The server forgets ids by a timer that runs at most every 50 ms, so a
	// window of 100 ms lasts up to 150, and as much longer as the timer is late.
	for known := time.Now(); pub(b, bus.WithID("known")).Duplicate; time.Sleep(10 * time.Millisecond) {
		if time.Since(known) > 2*time.Second {
			t.Fatal("still swallowed 2 s after the id was used: the window is 100 ms")
		}
	}
	if n := streamMessages(t, op, "BERTH_REQUESTS"); n != 4 {
		t.Errorf("%d messages stored, want 4", n)
	}
}
