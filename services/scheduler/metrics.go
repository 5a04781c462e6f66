package scheduler

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// metrics of the scheduler.
type metrics struct {
	applies  metric.Float64Histogram
	refusals metric.Int64Counter
	fences   metric.Int64Counter
	wakes    metric.Float64Histogram
	reserves metric.Float64Histogram
	dropped  metric.Int64Counter
	alarms   metric.Int64Counter
	waiting  atomic.Int64
}

func newMetrics() (*metrics, error) {
	m, meter := &metrics{}, otel.Meter("github.com/berth-dev/berth/services/scheduler")
	var err error
	keep := func(e error) {
		if err == nil {
			err = e
		}
	}
	var e error
	m.applies, e = meter.Float64Histogram("berth.scheduler.apply", metric.WithUnit("s"), metric.WithDescription("Time from proposing a log entry to its outcome."))
	keep(e)
	m.refusals, e = meter.Int64Counter("berth.scheduler.refusals", metric.WithDescription("Log entries that were refused, by kind."))
	keep(e)
	m.fences, e = meter.Int64Counter("berth.scheduler.fenced", metric.WithDescription("Refusals for a generation, epoch, boot, host or parent that is not the current one, by place."))
	keep(e)
	m.wakes, e = meter.Float64Histogram("berth.scheduler.wake", metric.WithUnit("s"), metric.WithDescription("Time from an open to active."))
	keep(e)
	m.reserves, e = meter.Float64Histogram("berth.scheduler.reserve", metric.WithUnit("s"), metric.WithDescription("Time that a placement waited for the pool's word, by verdict; unspecified: there was none."))
	keep(e)
	m.dropped, e = meter.Int64Counter("berth.scheduler.settle_dropped", metric.WithDescription("Outcomes of wakes that the pool was not told."))
	keep(e)
	m.alarms, e = meter.Int64Counter("berth.scheduler.expiry_stopped", metric.WithDescription("Ends of retention that were refused."))
	keep(e)
	_, e = meter.Int64ObservableGauge("berth.scheduler.outbox_lag", metric.WithDescription("Events that no stream has yet."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(m.waiting.Load())
			return nil
		}))
	keep(e)
	return m, errs.Wrap("make metrics", "", err)
}

func (m *metrics) applied(ctx context.Context, e core.Entry, took time.Duration, out core.Outcome, err error) {
	entry, result := e.Name(), "ok"
	if err == nil && isFence(e, out.Refused) {
		m.fenced(ctx, entry)
	}
	switch {
	case err != nil:
		result = errs.Kind(err).String()
	case out.Refused != nil:
		result = out.Refused.Kind.String()
		m.refusals.Add(ctx, 1, metric.WithAttributes(attribute.String("kind", result)))
	}
	if m.applies.Enabled(ctx) {
		m.applies.Record(ctx, took.Seconds(), metric.WithAttributes(attribute.String("entry", entry), attribute.String("result", result)))
	}
}

// fenced counts what was refused because it came from somebody, or was about
// something, that is not the current one. Places are the log's entries, counted
// where all of them pass, and placeLease.
func (m *metrics) fenced(ctx context.Context, place string) {
	m.fences.Add(ctx, 1, metric.WithAttributes(attribute.String("place", place)))
}

// placeLease is the one place that refuses without an entry of the log.
const placeLease = "lease"

// isFence reports whether a refusal of an entry was one of fencing.
func isFence(e core.Entry, f *core.Failure) bool {
	switch {
	case f == nil:
		return false
	case f.Kind == errkind.StaleEpoch:
		return true
	case f.Kind == errkind.Denied: // another host than the owner; a tenant's own denials are no matter of fencing
		return e.Open == nil && e.Sleep == nil && e.Delete == nil && e.Restore == nil
	case f.Kind == errkind.Conflict: // the head is not the expected parent, or what came back is not what was asked for
		return e.Manifest != nil || e.Slept != nil || e.Woke != nil
	}
	return false
}

func (m *metrics) woke(ctx context.Context, took time.Duration, origin string) {
	if m.wakes.Enabled(ctx) {
		m.wakes.Record(ctx, took.Seconds(), metric.WithAttributes(attribute.String("origin", origin)))
	}
}

func (m *metrics) reserved(ctx context.Context, took time.Duration, v poolv1.Verdict) {
	if m.reserves.Enabled(ctx) {
		name := strings.ToLower(strings.TrimPrefix(v.String(), "VERDICT_"))
		m.reserves.Record(ctx, took.Seconds(), metric.WithAttributes(attribute.String("verdict", name)))
	}
}

func (m *metrics) settleDropped() { m.dropped.Add(context.Background(), 1) }

func (m *metrics) deleteRefused(ctx context.Context, c *core.Delete, f *core.Failure) {
	if c.Expire != nil {
		m.alarms.Add(ctx, 1, metric.WithAttributes(attribute.String("kind", f.Kind.String())))
	}
}

func (m *metrics) lag(n uint64) { m.waiting.Store(int64(n)) }
