package bus_test

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

var (
	acmeWeb  = subjects.Frontend("acme", "web")
	otherWeb = subjects.Frontend("other", "web")
	session  = ids.DeriveSessionKey([]byte("k"), "https://issuer", "acme", "user", "default")
)

func TestCallBetweenServices(t *testing.T) {
	e := bustest.Start(t)
	sched := bustest.Connect(t, e, subjects.Service("scheduler"))
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	err = bus.Handle(svc, "wake", func(_ context.Context, r bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
		if in.Value == "bad" {
			return nil, errs.E("scheduler.wake", errkind.StaleEpoch, "s1", "epoch 1-2 is not the current one")
		}
		if in.Value == "panic" {
			panic("at the disco")
		}
		return wrapperspb.String(in.Value + " for " + r.Caller.Name()), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	out, err := bus.Invoke[*wrapperspb.StringValue](ctx, life, "scheduler", "wake", wrapperspb.String("hi"))
	if err != nil || out.Value != "hi for svc-lifecycle" {
		t.Fatalf("got %v, %v", out, err)
	}
	_, err = bus.Invoke[*wrapperspb.StringValue](ctx, life, "scheduler", "wake", wrapperspb.String("bad"))
	if !errs.Is(err, errkind.StaleEpoch) {
		t.Fatalf("got %v", err)
	}
	_, err = bus.Invoke[*wrapperspb.StringValue](ctx, life, "scheduler", "wake", wrapperspb.String("panic"))
	if !errs.Is(err, errkind.Internal) {
		t.Fatalf("got %v", err)
	}
}
