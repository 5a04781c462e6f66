package hostagent

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// meters count what a host does. The zero value is not usable; newMeters makes one.
type meters struct {
	wakes, sleeps metric.Float64Histogram
	streams       metric.Float64Histogram
	ended         metric.Int64Counter
	saves, frozen metric.Float64Histogram
	uploaded      metric.Int64Counter
	read, objects metric.Int64Counter
	refused       map[string]metric.Int64Counter
	prepares      metric.Float64Histogram
	claims        metric.Int64Counter
	binds         metric.Float64Histogram
	bound, gate   metric.Int64UpDownCounter
	drops         metric.Int64Counter
	// noted, if set, hears of each refusal too, for tests.
	noted func(what, place string)
}

func newMeters() meters {
	return meters{
		bound:    level("berth.host.network.bound", "Sandboxes whose link the kernel lets through while the lease holds."),
		gate:     level("berth.host.network.gate", "Whether the gate of this host has all bindings."),
		wakes:    obs.Histogram("berth.host.wake.seconds", "Time of a wake on this host, by outcome."),
		sleeps:   obs.Histogram("berth.host.sleep.seconds", "Time of a sleep on this host, by outcome."),
		streams:  obs.Histogram("berth.host.stream.seconds", "Time of an operation of the data plane to its end, by operation and outcome."),
		ended:    obs.Counter("berth.host.sandbox.ended", "Sandboxes that ended without being asked."),
		saves:    obs.Histogram("berth.host.disk.save.seconds", "Time of a snapshot until it is the session's head, by outcome."),
		frozen:   obs.Histogram("berth.host.disk.frozen.seconds", "Time that writers waited for a snapshot."),
		uploaded: obs.Counter("berth.host.disk.uploaded.bytes", "Bytes of snapshots that were brought to the store."),
		read:     obs.Counter("berth.host.disk.read.bytes", "Bytes of disks that were read for snapshots."),
		objects:  obs.Counter("berth.host.disk.objects", "Objects of snapshots that were brought to the store."),
		prepares: obs.Histogram("berth.host.prepare.seconds", "Time to make a warm sandbox, by outcome."),
		claims:   obs.Counter("berth.host.claims", "Wakes of templates that have a pool, by outcome: claimed, missed, failed."),
		binds:    obs.Histogram("berth.host.network.bind.seconds", "Time until what a session sends is let out to the gate, by outcome."),
		drops:    obs.Counter("berth.host.network.dropped", "Packets of sandboxes that went nowhere, by reason."),
		refused: map[string]metric.Int64Counter{
			"fenced":   obs.Counter("berth.host.fenced", "Acts that were refused because they named another generation or epoch, by place."),
			"unleased": obs.Counter("berth.host.unleased", "Acts that were refused because this host has no lease, by place."),
		},
	}
}

// level counts up and down.
func level(name, doc string) metric.Int64UpDownCounter {
	c, err := obs.Meter().Int64UpDownCounter(name, metric.WithDescription(doc))
	if err != nil {
		panic(err)
	}
	return c
}

func outcome(err error) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("outcome", errs.Kind(err).String()))
}

func (m meters) wake(took time.Duration, err error) {
	m.wakes.Record(context.Background(), took.Seconds(), outcome(err))
}

func (m meters) sleep(took time.Duration, err error) {
	m.sleeps.Record(context.Background(), took.Seconds(), outcome(err))
}

func (m meters) prepared(took time.Duration, err error) {
	m.prepares.Record(context.Background(), took.Seconds(), outcome(err))
}

// claim counts what became of the wish for a warm sandbox.
func (m meters) claim(what string) {
	m.claims.Add(context.Background(), 1, metric.WithAttributes(attribute.String("outcome", what)))
}

func (m meters) bind(took time.Duration, err error) {
	m.binds.Record(context.Background(), took.Seconds(), outcome(err))
}

// lets counts a link that is let through from now on (1), or not any more (-1).
func (m meters) lets(n int64) {
	if m.bound != nil {
		m.bound.Add(context.Background(), n)
	}
}

// gated counts the gate that has all bindings from now on (1), or not any more (-1).
func (m meters) gated(n int64) {
	if m.gate != nil {
		m.gate.Add(context.Background(), n)
	}
}

// dropped counts what came since the last look. A count that fell began anew.
func (m meters) dropped(before, now map[string]uint64) {
	for reason, n := range now {
		if old := before[reason]; old <= n {
			n -= old
		}
		if n > 0 {
			m.drops.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String("reason", reason)))
		}
	}
}

func (m meters) lost(what string) {
	m.ended.Add(context.Background(), 1, metric.WithAttributes(attribute.String("what", what)))
}

// fenced counts an act in a wrong generation or epoch.
func (m meters) fenced(place string) { m.refuse("fenced", place) }

// unleased counts an act without a lease.
func (m meters) unleased(place string) { m.refuse("unleased", place) }

func (m meters) refuse(what, place string) {
	if m.noted != nil {
		m.noted(what, place)
	}
	if c := m.refused[what]; c != nil {
		c.Add(context.Background(), 1, metric.WithAttributes(attribute.String("place", place)))
	}
}

func (m meters) stream(op string, took time.Duration, err error) {
	m.streams.Record(context.Background(), took.Seconds(), metric.WithAttributes(attribute.String("op", op)), outcome(err))
}

func (m meters) saved(r saver.Result, err error) {
	if err == nil && r.Same {
		return
	}
	m.saves.Record(context.Background(), r.Took.Seconds(), outcome(err))
	m.frozen.Record(context.Background(), r.Frozen.Seconds())
	m.uploaded.Add(context.Background(), int64(r.BytesUploaded))
	m.read.Add(context.Background(), int64(r.BytesRead))
	m.objects.Add(context.Background(), int64(r.Objects))
}
