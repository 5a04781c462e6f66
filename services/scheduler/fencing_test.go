package scheduler

import (
	"reflect"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"go.opentelemetry.io/otel"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// countFenced returns how many refusals were counted at a place since.
func countFenced(t *testing.T) func(place string) int64 {
	reader := sdkmetric.NewManualReader()
	was := otel.GetMeterProvider()
	otel.SetMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)))
	t.Cleanup(func() { otel.SetMeterProvider(was) })
	return func(place string) (n int64) {
		var out metricdata.ResourceMetrics
		if err := reader.Collect(bustest.Context(t), &out); err != nil {
			t.Fatal(err)
		}
		for _, scope := range out.ScopeMetrics {
			for _, m := range scope.Metrics {
				sum, ok := m.Data.(metricdata.Sum[int64])
				if !ok || m.Name != "berth.scheduler.fenced" {
					continue
				}
				for _, p := range sum.DataPoints {
					if v, _ := p.Attributes.Value("place"); v.AsString() == place {
						n += p.Value
					}
				}
			}
		}
		return n
	}
}

// TestEveryEntryOfAnOldOwnerIsRefusedAndCounted: every entry of the log that is
// about one session, host or boot is proposed with the generation, epoch or
// host of an old owner, changes nothing and is counted. An entry that is new
// and has no row fails the test.
func TestEveryEntryOfAnOldOwnerIsRefusedAndCounted(t *testing.T) {
	counted := countFenced(t)
	var l *leader
	w := newWorld(t, func(c *Config) { c.onLead = func(now *leader) { l = now } })
	w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "r1"))
	must[wakeReply](t)(w.open(2, "r1"))
	must[sleepReply](t)(w.close(2, "r2"))
	awake, asleep := l.session(testKey(1)), l.session(testKey(2))
	old := refOf(awake)
	old.Epoch.Index--
	earlier := ids.Generation{Incarnation: asleep.Generation.Incarnation, Index: asleep.Generation.Index + 1000}
	now := core.At(time.Now())
	rows := map[string]core.Entry{
		"Woke":         {Woke: &core.Woke{Ref: old}},
		"WakeFailed":   {WakeFailed: &core.WakeFailed{Ref: old}},
		"Slept":        {Slept: &core.Slept{Ref: old}},
		"SleepRefused": {SleepRefused: &core.SleepRefused{Ref: old}},
		"Delayed":      {Delayed: &core.Delayed{Ref: old}},
		"Removed":      {Removed: &core.Removed{Ref: old}},
		"Stopped":      {Stopped: &old},
		"Exited":       {Exited: &core.Exited{Ref: refOf(awake), Host: "h2"}},
		"Manifest":     {Manifest: &core.ManifestCmd{Ref: refOf(awake), Host: "h2", Manifest: core.ManifestInfo{ID: "m9"}}},
		"Save":         {Save: &core.Save{Ref: old, Host: "h1"}},
		"Cleared":      {Cleared: &core.Cleared{Ref: core.Ref{Session: awake.Key, Generation: earlier, Epoch: awake.Epoch}, Host: "h1"}},
		"Sleep":        {Sleep: &core.SleepCmd{Tenant: "acme", Keys: []ids.SessionKey{awake.Key}, Generation: old.Generation, Epoch: old.Epoch}},
		"Place":        {Place: &core.Place{Session: asleep.Key, Generation: earlier}},
		"Move":         {Move: &core.Move{Session: asleep.Key, Generation: earlier, Host: "h1"}},
		"Dropped":      {Dropped: &core.Dropped{Session: asleep.Key, Generation: earlier, Host: "h2"}},
		"Restore":      {Restore: &core.Restore{Tenant: "acme", Session: asleep.Key, Generation: earlier, Head: asleep.Manifest, Snapshot: "m0"}},
		"Delete": {Delete: &core.Delete{Tenant: "acme", Keys: []ids.SessionKey{asleep.Key},
			Expire: &core.Expire{Generation: earlier, Revision: asleep.Revision, MaxPerHour: 1}}},
	}
	// These name no owner: what they ask for is decided by what is so then.
	// HostLost of another boot is not refused, it says nothing new.
	free := map[string]bool{"Open": true, "Join": true, "HostLost": true, "Drain": true, "RemoveHost": true, "Trim": true, "Tick": true, "Incarnate": true, "Raise": true}
	for i := range reflect.TypeFor[core.Entry]().NumField() {
		f := reflect.TypeFor[core.Entry]().Field(i)
		if f.Type.Kind() != reflect.Pointer || free[f.Name] {
			continue
		}
		e, ok := rows[f.Name]
		if !ok {
			t.Errorf("entry %s has no row", f.Name)
			continue
		}
		was := counted(e.Name())
		e.Now = now
		out, err := l.apply(bustest.Context(t), e)
		if err != nil || out.Refused == nil {
			t.Errorf("%s of an old owner: %+v, %v", f.Name, out.Refused, err)
		}
		if got := counted(e.Name()) - was; got != 1 {
			t.Errorf("%s (%v) was counted %d times at place %s", f.Name, out.Refused, got, e.Name())
		}
	}
	if a, b := l.session(testKey(1)), l.session(testKey(2)); a != awake || b != asleep {
		t.Error("something changed")
	}
}

// A lease is refused to a boot that did not join, and counted.
func TestLeaseOfAnotherBootIsCounted(t *testing.T) {
	counted := countFenced(t)
	w := newWorld(t, nil)
	h := newFakeHost(t, w, "b1")
	h.join(t)
	h.boot = "b0"
	h.keepLease(t)
	w.until("the refusal is counted", func() bool { return counted(placeLease) > 0 })
}
