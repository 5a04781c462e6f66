package gate

import (
	"context"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/berth-dev/berth/internal/errs"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/proxy"
	"github.com/berth-dev/berth/services/egress/internal/session"
)

// metrics of one gate. None has a name in it that a sandbox chose.
type metrics struct {
	verdicts, questions, lost metric.Int64Counter
	dial, applied             metric.Float64Histogram
	doors                     metric.Int64UpDownCounter
	meter                     metric.Meter
	registered                metric.Registration
	fault                     error
}

func newMetrics() (*metrics, error) {
	m := &metrics{meter: otel.Meter("github.com/berth-dev/berth/services/egress/gate")}
	m.verdicts = m.counter("verdicts", "Connections and requests of sandboxes, by verdict and reason.")
	m.questions = m.counter("questions", "DNS questions of sandboxes: answered, denied or dropped.")
	m.lost = m.counter("events.lost", "Events that the bus did not take.")
	m.dial = m.histogram("dial", "How long a dial took, with its look-up.")
	m.applied = m.histogram("policy.applied", "From the applying of a policy until this gate judged by it.")
	var err error
	m.doors, err = m.meter.Int64UpDownCounter("berth.egress.doors", metric.WithDescription("Whether the doors of a family of addresses are open."))
	m.keep(err)
	return m, errs.Wrap("make metrics", "", m.fault)
}

func (m *metrics) keep(err error) {
	if m.fault == nil {
		m.fault = err
	}
}

func (m *metrics) counter(name, doc string) metric.Int64Counter {
	c, err := m.meter.Int64Counter("berth.egress."+name, metric.WithDescription(doc))
	m.keep(err)
	return c
}

func (m *metrics) histogram(name, doc string) metric.Float64Histogram {
	h, err := m.meter.Float64Histogram("berth.egress."+name, metric.WithUnit("s"), metric.WithDescription(doc),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10))
	m.keep(err)
	return h
}

func (m *metrics) noted(r *egressv1.Record) {
	m.verdicts.Add(context.Background(), 1, metric.WithAttributes(attribute.String("verdict", verdicts[r.GetVerdict()]), attribute.String("reason", r.GetReason())))
}

var verdicts = map[egressv1.Verdict]string{egressv1.Verdict_VERDICT_ALLOWED: "allowed", egressv1.Verdict_VERDICT_DENIED: "denied",
	egressv1.Verdict_VERDICT_RESET: "reset", egressv1.Verdict_VERDICT_FAILED: "failed"}

func (m *metrics) asked(verdict string) {
	m.questions.Add(context.Background(), 1, metric.WithAttributes(attribute.String("verdict", verdict)))
}

func (m *metrics) dialed(d time.Duration, err error) {
	m.dial.Record(context.Background(), d.Seconds(), metric.WithAttributes(attribute.Bool("ok", err == nil)))
}

func (m *metrics) inForce(d time.Duration) { m.applied.Record(context.Background(), d.Seconds()) }

func (m *metrics) opened(family string, open bool) {
	n := int64(-1)
	if open {
		n = 1
	}
	m.doors.Add(context.Background(), n, metric.WithAttributes(attribute.String("family", family)))
}

// watch shows the figures of the gate's parts.
func (m *metrics) watch(g *gate) error {
	type figure struct {
		of func(session.Figures, proxy.Stats) int64
		metric.Int64Observable
	}
	var figures []figure
	var all []metric.Observable
	for _, x := range []struct {
		name, unit, doc string
		of              func(session.Figures, proxy.Stats) int64
		grows           bool
	}{
		{"sessions", "", "Sessions that are bound.", func(f session.Figures, _ proxy.Stats) int64 { return f.Sessions }, false},
		{"open", "", "Connections and requests that are open by a rule.", func(f session.Figures, _ proxy.Stats) int64 { return f.Open }, false},
		{"bytes.out", "By", "Bytes from sandboxes.", func(f session.Figures, _ proxy.Stats) int64 { return int64(f.BytesOut) }, true},
		{"bytes.in", "By", "Bytes to sandboxes.", func(f session.Figures, _ proxy.Stats) int64 { return int64(f.BytesIn) }, true},
		{"connections", "", "Connections of sandboxes.", func(_ session.Figures, s proxy.Stats) int64 { return s.Open }, false},
		{"nobody", "", "Connections that came from an address which is nobody's.", func(_ session.Figures, s proxy.Stats) int64 { return int64(s.NoIdentity) }, true},
		{"panics", "", "Connections that met a fault in the gate.", func(_ session.Figures, s proxy.Stats) int64 { return int64(s.Panics) }, true},
		{"unrecorded", "", "Connections whose end could not be recorded.", func(_ session.Figures, s proxy.Stats) int64 { return int64(s.Unrecorded) }, true},
		{"audit.waiting", "By", "Audit records that are not on the bus yet.", func(session.Figures, proxy.Stats) int64 { return g.spool.Waiting() }, false},
		{"audit.lost", "", "Audit records that were forgotten because there was no room.", func(session.Figures, proxy.Stats) int64 { return int64(g.spool.Lost()) }, true},
		{"authority.left", "s", "How long the authority to open TLS with holds yet; 0: there is none.", func(session.Figures, proxy.Stats) int64 { return int64(g.minter.Left().Seconds()) }, false},
		{"policy.generation", "", "Generation of the newest policy that this gate judges by.", func(session.Figures, proxy.Stats) int64 { n, _, _ := g.policies.state(); return int64(n) }, false},
		{"policy.silent", "s", "How long nothing was heard of the policies: what was last known holds.", func(session.Figures, proxy.Stats) int64 {
			_, _, d := g.policies.state()
			return int64(d.Seconds())
		}, false},
	} {
		var o metric.Int64Observable
		var err error
		if x.grows {
			o, err = m.meter.Int64ObservableCounter("berth.egress."+x.name, metric.WithUnit(x.unit), metric.WithDescription(x.doc))
		} else {
			o, err = m.meter.Int64ObservableGauge("berth.egress."+x.name, metric.WithUnit(x.unit), metric.WithDescription(x.doc))
		}
		if err != nil {
			return errs.Wrap("make metrics", "", err)
		}
		figures, all = append(figures, figure{x.of, o}), append(all, o)
	}
	var err error
	m.registered, err = m.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		f, s := g.table.Figures(), g.proxy.Stats()
		for _, x := range figures {
			o.ObserveInt64(x.Int64Observable, x.of(f, s))
		}
		return nil
	}, all...)
	return errs.Wrap("make metrics", "", err)
}

func (m *metrics) close() {
	if m.registered != nil {
		_ = m.registered.Unregister()
	}
}
