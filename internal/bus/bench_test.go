package bus_test

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func connectTCP(b *testing.B, e *bus.Embedded, c subjects.Caller) *bus.Conn {
	l, err := e.Login(c)
	if err != nil {
		b.Fatal(err)
	}
	conn, err := bus.Connect(context.Background(), l, bus.WithLogger(bustest.Log(b)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(conn.Close)
	return conn
}

func BenchmarkCall(b *testing.B) {
	e := bustest.Start(b)
	for name, connect := range map[string]func(subjects.Caller) *bus.Conn{
		"memory": func(c subjects.Caller) *bus.Conn { return bustest.Connect(b, e, c) },
		"tcp":    func(c subjects.Caller) *bus.Conn { return connectTCP(b, e, c) },
	} {
		sched, life := connect(subjects.Service("scheduler")), connect(subjects.Service("lifecycle"))
		ctx := context.Background()
		svc, err := sched.Serve(ctx, bus.ServiceConfig{Name: "scheduler"})
		if err != nil {
			b.Fatal(err)
		}
		err = bus.Handle(svc, "wake", func(_ context.Context, _ bus.Request, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
			return in, nil
		})
		if err != nil {
			b.Fatal(err)
		}
		req := wrapperspb.String(string(make([]byte, 256)))
		call := func(b *testing.B) {
			if _, err := bus.Invoke[*wrapperspb.StringValue](ctx, life, "scheduler", "wake", req); err != nil {
				b.Error(err)
			}
		}
		b.Run(name+"/one", func(b *testing.B) {
			for b.Loop() {
				call(b)
			}
		})
		b.Run(name+"/many", func(b *testing.B) {
			b.SetParallelism(32)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					call(b)
				}
			})
		})
		_ = svc.Stop(ctx)
	}
}

// BenchmarkFloor is a bare NATS request and reply through memory under the
// same permissions.
func BenchmarkFloor(b *testing.B) {
	e := bustest.Start(b)
	sched, life := bustest.Connect(b, e, subjects.Service("scheduler")), bustest.Connect(b, e, subjects.Service("lifecycle"))
	subject := subjects.RPC("scheduler", "wake", life.Self())
	if _, err := sched.NATS().Subscribe("berth.v1.rpc.scheduler.wake.*", func(m *nats.Msg) { _ = m.Respond(m.Data) }); err != nil {
		b.Fatal(err)
	}
	_ = sched.NATS().Flush()
	body := make([]byte, 256)
	for b.Loop() {
		if _, err := life.NATS().RequestWithContext(bustest.Context(b), subject, body); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPublish(b *testing.B) {
	e := bustest.Start(b, acmeWeb)
	sched, fe := bustest.Connect(b, e, subjects.Service("scheduler")), bustest.Connect(b, e, acmeWeb)
	ctx := context.Background()
	msg := wrapperspb.String(string(make([]byte, 256)))
	event, req := subjects.Session("acme", session, "placed"), subjects.Request("acme", "web", "open")
	b.Run("sessions", func(b *testing.B) {
		for b.Loop() {
			if _, err := sched.Publish(ctx, event, msg); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("sessions-async", func(b *testing.B) {
		var last bus.Future
		for b.Loop() {
			f, err := sched.PublishAsync(ctx, event, msg)
			if err != nil {
				b.Fatal(err)
			}
			last = f
		}
		if _, err := last.Wait(ctx); err != nil {
			b.Fatal(err)
		}
	})
	b.Run("requests-synced", func(b *testing.B) {
		for b.Loop() {
			if _, err := fe.Publish(ctx, req, msg); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkDurable is publish to handled to acknowledged on the work queue.
func BenchmarkDurable(b *testing.B) {
	e := bustest.Start(b, acmeWeb)
	idn, fe := bustest.Connect(b, e, subjects.Service("identity")), bustest.Connect(b, e, acmeWeb)
	ctx := context.Background()
	got := make(chan struct{}, 1)
	k, err := idn.Consume(ctx, bus.Spec("identity-requests", 16), func(context.Context, *bus.Msg) error { got <- struct{}{}; return nil })
	if err != nil {
		b.Fatal(err)
	}
	req, msg := subjects.Request("acme", "web", "open"), wrapperspb.String(string(make([]byte, 256)))
	for b.Loop() {
		if _, err := fe.PublishAsync(ctx, req, msg); err != nil {
			b.Fatal(err)
		}
		<-got
	}
	b.StopTimer()
	k.Stop(ctx)
}
