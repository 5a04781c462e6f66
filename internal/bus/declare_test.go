package bus_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestReconcileChangesNothingTwice(t *testing.T) {
	e := bustest.Start(t)
	keeper := bustest.Connect(t, e, subjects.Keeper())
	changes, err := bus.Reconcile(bustest.Context(t), keeper, bus.Declared(1))
	if err != nil || len(changes) != 0 {
		t.Fatalf("%q, %v", changes, err)
	}
}

func TestAChangedSettingIsUpdated(t *testing.T) {
	e := bustest.Start(t)
	keeper := bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	d := bus.Declared(1)
	d.Streams, d.Consumers, d.Buckets = slices.Clone(d.Streams), slices.Clone(d.Consumers), slices.Clone(d.Buckets)
	d.Streams[1].MaxAge, d.Streams[1].MaxBytes = 24*time.Hour, 3*subjects.GiB/2
	d.Buckets[0].MaxBytes = 32 * subjects.MiB
	d.Consumers[1].AckWait, d.Consumers[1].Filters = 7*time.Second, []string{"berth.v1.session.*.*.active"}
	changes, err := bus.Reconcile(ctx, keeper, d)
	if err != nil || len(changes) != 3 {
		t.Fatalf("%q, %v", changes, err)
	}
	for i, w := range []string{"changed stream BERTH_SESSIONS: MaxBytes 2147483648 to 1610612736, MaxAge 2160h0m0s to 24h0m0s", "changed stream KV_BERTH_CREDENTIALS", "changed consumer lifecycle-sessions"} {
		if !strings.Contains(changes[i], w) {
			t.Errorf("%q does not say %q", changes[i], w)
		}
	}
	s, err := keeper.JetStream().Stream(ctx, "BERTH_SESSIONS")
	if err != nil || s.CachedInfo().Config.MaxAge != 24*time.Hour {
		t.Fatalf("%+v, %v", s.CachedInfo().Config, err)
	}
	if changes, err = bus.Reconcile(ctx, keeper, d); err != nil || len(changes) != 0 {
		t.Fatalf("%q, %v", changes, err)
	}
}

func TestASettingThatCannotChangeInPlaceIsAnError(t *testing.T) {
	e := bustest.Start(t)
	keeper := bustest.Connect(t, e, subjects.Keeper())
	for what, change := range map[string]func(*subjects.Stream){
		"Retention":   func(s *subjects.Stream) { s.Retention = subjects.WorkQueue },
		"PersistMode": func(s *subjects.Stream) { s.Async = false },
	} {
		d := bus.Declaration{Streams: []subjects.Stream{subjects.Streams[1]}}
		change(&d.Streams[0])
		_, err := bus.Reconcile(bustest.Context(t), keeper, d)
		if err == nil || !strings.Contains(err.Error(), "declare stream BERTH_SESSIONS: cannot change "+what) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if changes, err := bus.Reconcile(bustest.Context(t), keeper, bus.Declared(1)); err != nil || len(changes) != 0 {
		t.Errorf("something was changed: %q, %v", changes, err)
	}
}

func TestAForeignSettingIsPutBackAtTheNextStart(t *testing.T) {
	e := bustest.Start(t)
	keeper := bustest.Connect(t, e, subjects.Keeper())
	ctx := bustest.Context(t)
	s, err := keeper.JetStream().Stream(ctx, "BERTH_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.MaxAge, cfg.MaxBytes = time.Hour, -1
	if _, err := keeper.JetStream().UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	changes, err := bus.Reconcile(ctx, keeper, bus.Declared(1))
	if err != nil || len(changes) != 1 {
		t.Fatalf("%q, %v", changes, err)
	}
}

// A full object store refuses what is new; JetStream's default would drop the
// oldest objects, and with them acknowledged disks.
func TestObjectStoresNeverDropAnObject(t *testing.T) {
	e := bustest.Start(t)
	keeper := bustest.Connect(t, e, subjects.Keeper())
	for _, o := range subjects.ObjectStores {
		s, err := keeper.JetStream().Stream(bustest.Context(t), "OBJ_"+o.Name)
		if err != nil {
			t.Fatal(err)
		}
		cfg := s.CachedInfo().Config
		if cfg.Discard != jetstream.DiscardNew || cfg.MaxAge != 0 || cfg.MaxMsgs > 0 || cfg.MaxMsgsPerSubject > 0 ||
			cfg.Storage != jetstream.FileStorage || cfg.PersistMode != jetstream.DefaultPersistMode || cfg.MaxBytes != o.MaxBytes {
			t.Errorf("%s: %+v", o.Name, cfg)
		}
	}
}

func TestBucket(t *testing.T) {
	e := bustest.Start(t)
	c := bustest.Connect(t, e, subjects.Service("credentials"))
	ctx := bustest.Context(t)
	b, err := c.OpenBucket(ctx, "BERTH_DATAKEYS")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Get(ctx, "s1.1-2"); !errs.Is(err, errkind.NotFound) {
		t.Fatalf("got %v", err)
	}
	rev, err := b.Create(ctx, "s1.1-2", []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Create(ctx, "s1.1-2", nil); !errs.Is(err, errkind.Exists) {
		t.Errorf("got %v", err)
	}
	if _, err := b.Update(ctx, "s1.1-2", []byte("x"), rev+7); errs.Kind(err) != errkind.Conflict && errs.Kind(err) != errkind.Exists {
		t.Errorf("got %v", err)
	}
	if rev, err = b.Update(ctx, "s1.1-2", []byte("secret2"), rev); err != nil {
		t.Fatal(err)
	}
	if v, r, err := b.Get(ctx, "s1.1-2"); err != nil || string(v) != "secret2" || r != rev {
		t.Fatalf("%q %d %v", v, r, err)
	}
	if keys, err := b.Keys(ctx); err != nil || len(keys) != 1 {
		t.Fatalf("%q %v", keys, err)
	}
	for range 2 {
		if err := b.SecureDelete(ctx, "s1.1-2"); err != nil {
			t.Fatal(err)
		}
	}
	if keys, err := b.Keys(ctx); err != nil || len(keys) != 0 {
		t.Fatalf("%q %v", keys, err)
	}
	if _, err := bustest.Connect(t, e, subjects.Service("identity")).OpenBucket(ctx, "BERTH_CREDENTIALS"); err == nil {
		t.Error("identity opened credentials' bucket")
	}
}

// punctual tells whether something came when it was due: less than 300 ms late, and as much as this
// machine itself is late meanwhile at each of the four hops to a handler: the server's clock and
// writer, the connection's reader, the worker.
func punctual(t *testing.T) func(off time.Duration) bool {
	var worst atomic.Int64
	go func() {
		const nap = 5 * time.Millisecond
		for t.Context().Err() == nil {
			began := time.Now()
			time.Sleep(nap)
			worst.Store(max(worst.Load(), int64(time.Since(began)-nap)))
		}
	}()
	return func(off time.Duration) bool {
		return off >= -50*time.Millisecond && off <= 300*time.Millisecond+4*time.Duration(worst.Load())
	}
}

func TestTimersAreExactReArmedAndCancelled(t *testing.T) {
	e := bustest.Start(t)
	life := bustest.Connect(t, e, subjects.Service("lifecycle"))
	ctx := bustest.Context(t)
	type due struct {
		kind, body string
		at         time.Time
	}
	got := make(chan due, 10)
	_, err := life.Consume(ctx, bus.Spec("lifecycle-timers", 2), func(_ context.Context, m *bus.Msg) error {
		s, err := subjects.ParseTimer(m.Subject)
		var v wrapperspb.StringValue
		if err == nil {
			err = m.Decode(&v)
		}
		got <- due{s.Kind, v.Value, time.Now()}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	exact := punctual(t)
	start := time.Now().Add(2 * time.Second) // by then all are armed
	arm := func(s ids.SessionKey, kind, body string, after time.Duration) {
		t.Helper()
		if err := life.ArmTimer(ctx, "acme", s, kind, start.Add(after), wrapperspb.String(body)); err != nil {
			t.Fatal(err)
		}
	}
	arm(session, "idle", "first", 300*time.Millisecond)
	arm(session, "idle", "second", 1200*time.Millisecond) // replaces the first
	arm(session, "never", "cancelled", 600*time.Millisecond)
	arm(session, "expire", "other", 700*time.Millisecond)
	if err := life.CancelTimer(ctx, "acme", session, "never"); err != nil {
		t.Fatal(err)
	}
	// By kind: two workers handle what is late at once in any order.
	want := map[string]due{"expire": {"expire", "other", start.Add(700 * time.Millisecond)}, "idle": {"idle", "second", start.Add(1200 * time.Millisecond)}}
	for len(want) > 0 {
		select {
		case g := <-got:
			w, ok := want[g.kind]
			delete(want, g.kind)
			off := g.at.Sub(w.at)
			if !ok || g.body != w.body || !exact(off) {
				t.Errorf("got %+v, off by %s, want %+v", g, off, w)
			}
			t.Logf("%s: off by %s", g.kind, off)
		case <-time.After(20 * time.Second):
			t.Fatalf("never came: %v", want)
		}
	}
	select {
	case g := <-got:
		t.Errorf("%+v came as well", g)
	case <-time.After(200 * time.Millisecond):
	}
}
