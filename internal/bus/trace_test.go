package bus_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// One open is one trace over every call; what waits in a stream begins a
// trace of its own that is linked to it.
func TestTraceGoesOverCallsAndIsLinkedOverStreams(t *testing.T) {
	tel, err := obs.Setup(context.Background(), "test", "0", obs.Config{KeepSpans: 1000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tel.Shutdown(context.Background()) })
	e, spec := startQuick(t, "BERTH_SESSIONS", "lifecycle")
	sched, life := bustest.Connect(t, e, subjects.Service("scheduler")), bustest.Connect(t, e, subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	err = bus.Handle(svc, "wake", func(ctx context.Context, _ bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		_, err := sched.Publish(ctx, subjects.Session("acme", session, "active"), in)
		return in, err
	})
	if err != nil {
		t.Fatal(err)
	}
	handled := make(chan struct{})
	if _, err := life.Consume(ctx, spec, func(context.Context, *bus.Msg) error { close(handled); return nil }); err != nil {
		t.Fatal(err)
	}
	spanCtx, root := obs.Start(ctx, "open")
	if _, err := bus.Invoke[*wrapperspb.StringValue](spanCtx, life, "scheduler", "wake", wrapperspb.String("x")); err != nil {
		t.Fatal(err)
	}
	obs.End(root, nil)
	<-handled
	id := root.SpanContext().TraceID().String()
	eventually(t, "the spans are there", func() bool {
		_ = tel.Flush(ctx)
		var names []string
		for _, s := range tel.Spans().Trace(id) {
			names = append(names, s.Name)
		}
		slices.Sort(names)
		linked := false
		for _, s := range tel.Spans().All() {
			linked = linked || s.Name == "process lifecycle-sessions" && s.Trace != id && len(s.Links) == 1 && s.Links[0][:32] == id
		}
		return linked && slices.Equal(names, []string{"call scheduler.wake", "open", "publish dev.berth.v1.session.active", "serve scheduler.wake"})
	})
}

// Timers and messages outlive a restart of the server.
func TestARestartKeepsTimersKeysAndMessages(t *testing.T) {
	dir, ctx := t.TempDir(), bustest.Context(t)
	start := func() (*bus.Embedded, *bus.Conn) {
		e, err := bus.StartEmbedded(ctx, bus.EmbeddedConfig{Dir: dir, Log: bustest.Log(t)})
		if err != nil {
			t.Fatal(err)
		}
		c, err := e.Connect(ctx, subjects.Service("lifecycle"))
		if err != nil {
			t.Fatal(err)
		}
		return e, c
	}
	e, life := start()
	first, _ := e.Login(life.Self())
	at := time.Now().Add(1500 * time.Millisecond)
	if err := life.ArmTimer(ctx, "acme", session, "idle", at, wrapperspb.String("x")); err != nil {
		t.Fatal(err)
	}
	life.Close()
	e.Close()
	e, life = start()
	defer e.Close()
	defer life.Close()
	if again, _ := e.Login(life.Self()); again != first {
		t.Error("the key is another")
	}
	if e.URL() != "" {
		t.Errorf("port 0 means no listener, got %s", e.URL())
	}
	exact, got := punctual(t), make(chan time.Time, 1)
	if now := time.Now(); now.After(at) { // the restart took longer
		at = now
	}
	k, err := life.Consume(ctx, bus.Spec("lifecycle-timers", 1), func(context.Context, *bus.Msg) error { got <- time.Now(); return nil })
	if err != nil {
		t.Fatal(err)
	}
	select {
	case now := <-got:
		if off := now.Sub(at); !exact(off) {
			t.Errorf("off by %s", off)
		}
	case <-time.After(10 * time.Second):
		t.Error("the timer was lost")
	}
	k.Stop(ctx)
}
