package pool

import (
	"context"
	"sync/atomic"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/berth-dev/berth/internal/errs"
	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// metrics of the pool service, by template. Only the leader has any.
type metrics struct {
	claims, wakes metric.Int64Counter
	wait          metric.Float64Histogram
	leader        atomic.Pointer[leader]
	registered    metric.Registration
}

func newMetrics() (*metrics, error) {
	m, meter := &metrics{}, otel.Meter("github.com/berth-dev/berth/services/pool")
	var failed error
	keep := func(err error) {
		if failed == nil {
			failed = err
		}
	}
	var err error
	m.claims, err = meter.Int64Counter("berth.pool.claims", metric.WithDescription("Warm sandboxes that became a session's."))
	keep(err)
	m.wakes, err = meter.Int64Counter("berth.pool.wakes", metric.WithDescription("Wakes of a pool's template, by whether they were served warm."))
	keep(err)
	m.wait, err = meter.Float64Histogram("berth.pool.wait", metric.WithUnit("s"), metric.WithDescription("How long a reservation waited, by its verdict."))
	keep(err)
	gauges := map[string]func(*poolv1.Status) int64{}
	var all []metric.Observable
	byName := map[string]metric.Int64ObservableGauge{}
	for _, g := range []struct {
		name, unit, doc string
		of              func(*poolv1.Status) int64
	}{
		{"warm", "", "Sandboxes that wait.", func(s *poolv1.Status) int64 { return int64(s.GetWarm()) }},
		{"preparing", "", "Sandboxes that are being prepared.", func(s *poolv1.Status) int64 { return int64(s.GetPreparing()) }},
		{"reserved", "", "Sandboxes that are kept for a wake.", func(s *poolv1.Status) int64 { return int64(s.GetReserved()) }},
		{"goal", "", "Sandboxes that are wanted.", func(s *poolv1.Status) int64 { return int64(s.GetGoal()) }},
		{"idle_memory", "By", "Memory of the sandboxes that wait.", func(s *poolv1.Status) int64 { return int64(s.GetIdleMemoryBytes()) }},
	} {
		gauge, err := meter.Int64ObservableGauge("berth.pool."+g.name, metric.WithUnit(g.unit), metric.WithDescription(g.doc))
		keep(err)
		all, gauges[g.name], byName[g.name] = append(all, gauge), g.of, gauge
	}
	if failed == nil {
		m.registered, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			l := m.leader.Load()
			if l == nil {
				return nil
			}
			for _, e := range l.entries() {
				st := e.current()
				for name, of := range gauges {
					o.ObserveInt64(byName[name], of(st), template(e.name))
				}
			}
			return nil
		}, all...)
		keep(err)
	}
	return m, errs.Wrap("make metrics", "", failed)
}

func template(name string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("template", name))
}

func (m *metrics) close() { _ = m.registered.Unregister() }

// leads says whose figures are shown; nil: nobody's.
func (m *metrics) leads(l *leader) { m.leader.Store(l) }

func (m *metrics) reserved(name string, a core.Answer) {
	m.wait.Record(context.Background(), a.Waited.Seconds(), metric.WithAttributes(attribute.String("template", name), attribute.String("verdict", words[a.Verdict])))
}

var words = map[core.Verdict]string{core.Reserved: "reserved", core.Exhausted: "exhausted", core.OverShare: "over_share"}

func (m *metrics) settled(name string, req *poolv1.SettleRequest) {
	if req.GetWarm() == "" && req.GetHost() == "" {
		return // the reservation was not used
	}
	ctx, warm := context.Background(), req.GetWarm() != "" && !req.GetFailed()
	if req.GetWarm() != "" {
		m.claims.Add(ctx, 1, template(name))
	}
	m.wakes.Add(ctx, 1, metric.WithAttributes(attribute.String("template", name), attribute.Bool("warm", warm)))
}
