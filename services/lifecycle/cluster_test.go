package lifecycle

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestMain(m *testing.M) {
	bustest.Child()
	os.Exit(m.Run())
}

// With two of three nodes gone nothing can be stored: an open is answered, a
// killed leader of scheduler in its middle included, and the event that tells
// of it is stored once the nodes are back.
func TestAnOpenDoesNotWaitForJetStream(t *testing.T) {
	t.Parallel()
	c := bustest.StartCluster(t)
	w := &world{t: t}
	answers := func(h func(context.Context) error) *bus.Conn {
		conn := c.Connect(subjects.Service("scheduler"))
		svc, err := conn.Serve(t.Context(), bus.ServiceConfig{Name: "scheduler"})
		must(t, err)
		must(t, bus.Handle(svc, "wake", func(ctx context.Context, _ bus.Request, r *schedulerv1.WakeRequest) (*schedulerv1.WakeReply, error) {
			return &schedulerv1.WakeReply{Session: w.ref(), Host: "h1", Terms: r.GetAdmission().GetTerms()}, h(ctx)
		}))
		must(t, svc.Announce())
		return conn
	}
	taken := make(chan struct{}, 16)
	first := answers(func(ctx context.Context) error { taken <- struct{}{}; <-ctx.Done(); return ctx.Err() })
	conn := c.Connect(subjects.Service("lifecycle"))
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- Run(ctx, NewConfig(), conn, bustest.Log(t), func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	defer func() { cancel(); must(t, <-done) }()
	c.Kill(1, 2)
	idn := c.Connect(subjects.Service("identity"))
	out := make(chan error, 1)
	go func() {
		reply, err := bus.Invoke[*lifecyclev1.OpenReply](t.Context(), idn, "lifecycle", "open",
			&lifecyclev1.OpenRequest{Verified: w.verified(), Ask: &identityv1.OpenRequest{}})
		if err == nil && reply.GetWake().GetHost() != "h1" {
			t.Errorf("the answer is %v", reply)
		}
		out <- err
	}()
	<-taken
	first.Close()
	answers(func(context.Context) error { return nil })
	must(t, <-out)
	c.Restart(1, 2)
	operator := c.Connect(subjects.Operator())
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		s, err := operator.JetStream().Stream(bustest.Context(t), "BERTH_SESSIONS")
		if err == nil && s.CachedInfo().State.Msgs > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the event was not stored")
		}
	}
}
