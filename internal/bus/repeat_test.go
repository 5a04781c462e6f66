package bus_test

import (
	"bytes"
	"context"
	"runtime"
	"strconv"
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

type rawHandler = func(context.Context, bus.Request, []byte) ([]byte, error)

// replica is one replica of scheduler that serves wake.
func replica(t *testing.T, e *bus.Embedded, h rawHandler) (*bus.Conn, *bus.Service) {
	t.Helper()
	return replicaOf(t, e, "scheduler", "wake", h)
}

func replicaOf(t *testing.T, e *bus.Embedded, service, method string, h rawHandler) (*bus.Conn, *bus.Service) {
	t.Helper()
	conn := bustest.Connect(t, e, subjects.Service(service))
	svc, err := conn.Serve(bustest.Context(t), bus.ServiceConfig{Name: service})
	if err == nil {
		err = svc.HandleRaw(method, h)
	}
	if err != nil {
		t.Fatal(err)
	}
	return conn, svc
}

// told says that a replica serves.
func told(t *testing.T, svc *bus.Service) {
	t.Helper()
	if err := svc.Announce(); err != nil {
		t.Fatal(err)
	}
}

func says(text string) rawHandler {
	return func(_ context.Context, r bus.Request, _ []byte) ([]byte, error) {
		return bus.Encode(wrapperspb.String(text), r.ContentType)
	}
}

type answer struct {
	text string
	err  error
}

// wake calls scheduler beside the test.
func wake(ctx context.Context, c *bus.Conn, text string) <-chan answer {
	out := make(chan answer, 1)
	go func() {
		v, err := bus.Invoke[*wrapperspb.StringValue](ctx, c, "scheduler", "wake", wrapperspb.String(text))
		out <- answer{v.GetValue(), err}
	}()
	return out
}

func wantAnswer(t *testing.T, got <-chan answer, want string) {
	t.Helper()
	select {
	case a := <-got:
		if a.err != nil || a.text != want {
			t.Fatalf("got %q, %v; want %q", a.text, a.err, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("no answer, want %q", want)
	}
}

// taken waits until a handler was called.
func taken[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(10 * time.Second):
		t.Fatal("the request did not arrive")
	}
	return v
}

type seen struct {
	body []byte
	left int64
}

func TestACallWhoseLeaderDiedIsAnsweredByTheNext(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	got := make(chan seen, 4)
	note := func(r bus.Request, body []byte) {
		left, _ := strconv.ParseInt(r.Header.Get(bus.HeaderTimeout), 10, 64)
		got <- seen{bytes.Clone(body), left}
	}
	first, _ := replica(t, e, func(ctx context.Context, r bus.Request, body []byte) ([]byte, error) {
		note(r, body)
		<-ctx.Done()
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithTimeout(bustest.Context(t), 30*time.Second)
	defer cancel()
	out := wake(ctx, life, "same")
	a := taken(t, got)
	first.Close()
	_, svc := replica(t, e, func(ctx context.Context, r bus.Request, body []byte) ([]byte, error) {
		note(r, body)
		return says("next")(ctx, r, body)
	})
	told(t, svc)
	wantAnswer(t, out, "next")
	b := taken(t, got)
	if !bytes.Equal(a.body, b.body) {
		t.Errorf("sent %q, then %q", a.body, b.body)
	}
	if a.left > 30_000 || b.left > a.left || b.left <= 0 {
		t.Errorf("time left: %d ms, then %d ms", a.left, b.left)
	}
}

// A paused leader is still subscribed: it must not swallow what its successor
// could answer.
func TestALeaderThatIsPausedForEverHoldsNothingUp(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	got := make(chan struct{}, 100)
	replica(t, e, func(ctx context.Context, _ bus.Request, _ []byte) ([]byte, error) {
		got <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	ctx := bustest.Context(t)
	out := wake(ctx, life, "x")
	taken(t, got)
	_, svc := replica(t, e, says("next"))
	told(t, svc)
	wantAnswer(t, out, "next")
	for range 20 {
		wantAnswer(t, wake(ctx, life, "y"), "next")
	}
}

func TestACallWaitsWhileNobodyLeads(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	out := wake(ctx, life, "x")
	select {
	case a := <-out:
		t.Fatalf("answered by nobody: %+v", a)
	case <-time.After(time.Second): // the fault: a second without a leader
	}
	replica(t, e, says("here")) // and it says nothing of itself
	wantAnswer(t, out, "here")
}

func TestAReplicaThatDoesNotLeadIsNoAnswer(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	got := make(chan struct{}, 1000)
	not := func(context.Context, bus.Request, []byte) ([]byte, error) {
		select {
		case got <- struct{}{}:
		default:
		}
		return nil, errs.E("wake", errkind.NotLeader, "", "ask another one")
	}
	replica(t, e, not)
	ctx := bustest.Context(t)
	out := wake(ctx, life, "x")
	taken(t, got)
	taken(t, got) // it is asked again by itself
	_, svc := replica(t, e, says("leader"))
	told(t, svc)
	wantAnswer(t, out, "leader")
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for range 10 {
		wantAnswer(t, wake(short, life, "y"), "leader") // the other one is faster and does not count
	}
}

func TestALateAnswerToAnEarlierAttemptCounts(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	got, release := make(chan struct{}, 10), make(chan struct{})
	var calls atomic.Int32
	_, svc := replica(t, e, func(ctx context.Context, r bus.Request, body []byte) ([]byte, error) {
		n := calls.Add(1)
		got <- struct{}{}
		if n == 1 {
			<-release
			return says("first")(ctx, r, body)
		}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	out := wake(bustest.Context(t), life, "x")
	taken(t, got)
	told(t, svc)
	taken(t, got)
	close(release)
	wantAnswer(t, out, "first")
}

func TestARealErrorIsNotRepeated(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	var calls atomic.Int32
	_, svc := replica(t, e, func(context.Context, bus.Request, []byte) ([]byte, error) {
		calls.Add(1)
		return nil, errs.E("wake", errkind.Unavailable, "", "the disk is full")
	})
	a := <-wake(bustest.Context(t), life, "x")
	told(t, svc)
	if !errs.Is(a.err, errkind.Unavailable) || calls.Load() != 1 {
		t.Errorf("%d calls, %v", calls.Load(), a.err)
	}
}

func TestAForbiddenCallIsRefusedAtOnce(t *testing.T) {
	e := bustest.Start(t, hostH1)
	host := bustest.Connect(t, e, hostH1)
	if a := <-wake(bustest.Context(t), host, "x"); !errs.Is(a.err, errkind.Denied) {
		t.Errorf("got %v", a.err)
	}
}

// The kind tells whether the request may have taken effect.
func TestTheEndOfACallWithoutAnOutcome(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	within := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(ctx, d)
		t.Cleanup(cancel)
		return ctx
	}
	// The server must have answered once that there is no responder; until then a replica may have received the call.
	if a := <-wake(within(3*time.Second), life, "x"); !errs.Is(a.err, errkind.Unavailable) {
		t.Errorf("nobody took it: %v", a.err)
	}
	canceled, cancel := context.WithCancel(ctx)
	out := wake(canceled, life, "x")
	cancel()
	if a := <-out; !errs.Is(a.err, errkind.Canceled) {
		t.Errorf("canceled: %v", a.err)
	}
	replica(t, e, func(ctx context.Context, _ bus.Request, _ []byte) ([]byte, error) {
		<-ctx.Done()
		time.Sleep(50 * time.Millisecond)
		return nil, errs.E("wake", errkind.NotLeader, "", "too late")
	})
	if a := <-wake(within(200*time.Millisecond), life, "x"); !errs.Is(a.err, errkind.Deadline) {
		t.Errorf("somebody may have taken it: %v", a.err)
	}
}

func TestCallsLeaveNothingBehind(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	replica(t, e, says("ok"))
	ctx := bustest.Context(t)
	wantAnswer(t, wake(ctx, life, "x"), "ok")
	before := runtime.NumGoroutine()
	_, svc := replicaOf(t, e, "credentials", "mint", says("ok"))
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			short, cancel := context.WithTimeout(ctx, time.Duration(i)*time.Millisecond/10)
			defer cancel()
			_, _ = bus.Invoke[*wrapperspb.StringValue](short, life, "scheduler", "wake", wrapperspb.String("x"))
		})
	}
	all.Wait()
	if err := svc.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before+12 })
	if n := life.NATS().NumSubscriptions(); n > 3 {
		t.Errorf("%d subscriptions after 201 calls", n)
	}
}

// Any replica of lifecycle answers: while none is on the bus a call waits as
// long as a reconnect takes, and no longer.
func TestAServiceThatReconnectsIsWaitedFor(t *testing.T) {
	t.Parallel()
	e := bustest.Start(t)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	ctx := bustest.Context(t)
	out := make(chan answer, 1)
	open := func() {
		v, err := bus.Invoke[*wrapperspb.StringValue](ctx, idn, "lifecycle", "open", wrapperspb.String("x"))
		out <- answer{v.GetValue(), err}
	}
	open()
	if a := <-out; !errs.Is(a.err, errkind.Unavailable) {
		t.Fatalf("nobody is there: %v", a.err)
	}
	go open()
	_, svc := replicaOf(t, e, "lifecycle", "open", says("here"))
	wantAnswer(t, out, "here")
	if err := svc.Stop(ctx); err != nil {
		t.Fatal(err)
	}
}

// What was under way when a service lost its connection is asked again.
func TestAnAnswerThatWasLostWithItsConnectionIsAskedForAgain(t *testing.T) {
	e := bustest.Start(t)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	got, release := make(chan struct{}, 10), make(chan struct{})
	conn, svc := replicaOf(t, e, "lifecycle", "open", func(ctx context.Context, r bus.Request, body []byte) ([]byte, error) {
		got <- struct{}{}
		<-release
		return says("ok")(ctx, r, body)
	})
	told(t, svc)
	out := make(chan answer, 1)
	go func() {
		v, err := bus.Invoke[*wrapperspb.StringValue](bustest.Context(t), idn, "lifecycle", "open", wrapperspb.String("x"))
		out <- answer{v.GetValue(), err}
	}()
	taken(t, got)
	if err := conn.NATS().ForceReconnect(); err != nil { // the server forgets who may answer whom
		t.Fatal(err)
	}
	taken(t, got)
	close(release)
	wantAnswer(t, out, "ok")
}

func TestNobodyAnnouncesForAnother(t *testing.T) {
	e := bustest.Start(t)
	ctx := bustest.Context(t)
	svc, err := bustest.Connect(t, e, subjects.Service("identity")).Serve(ctx, bus.ServiceConfig{Name: "lifecycle"})
	if err != nil {
		t.Fatal(err)
	}
	if err := svc.Announce(); !errs.Is(err, errkind.Denied) {
		t.Error(err)
	}
}

// What a host's agent took before it was killed, or lost its connection, is
// asked of the next one; another host's word does not matter.
func TestACommandToAHostIsSentAgainWhenItServes(t *testing.T) {
	h2 := subjects.Host("h2")
	e := bustest.Start(t, hostH1, h2)
	ctx := bustest.Context(t)
	got := make(chan struct{}, 10)
	serve := func(c subjects.Caller, h func(context.Context, bus.Request, []byte) ([]byte, error)) *bus.Service {
		svc, err := bustest.Connect(t, e, c).Serve(ctx, bus.ServiceConfig{Name: "host"})
		if err == nil {
			err = svc.HandleRaw("wake", h)
		}
		if err != nil {
			t.Fatal(err)
		}
		return svc
	}
	dead := serve(hostH1, func(ctx context.Context, _ bus.Request, _ []byte) ([]byte, error) {
		got <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	out := make(chan answer, 1)
	go func() {
		v, err := bus.InvokeHost[*wrapperspb.StringValue](ctx, sched, "h1", "wake", wrapperspb.String("x"))
		out <- answer{v.GetValue(), err}
	}()
	taken(t, got)
	told(t, serve(h2, says("not me")))
	told(t, dead) // as after a reconnect: it is asked once more
	taken(t, got)
	select {
	case a := <-out:
		t.Fatalf("answered before a host did: %+v", a)
	default:
	}
}
