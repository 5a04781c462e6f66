package hostagent

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
)

// meters count what a host does. The zero value is not usable; newMeters makes one.
type meters struct {
	wakes, sleeps metric.Float64Histogram
	streams       metric.Float64Histogram
	ended         metric.Int64Counter
}

func newMeters() meters {
	return meters{
		wakes:   obs.Histogram("berth.host.wake.seconds", "Time of a wake on this host, by outcome."),
		sleeps:  obs.Histogram("berth.host.sleep.seconds", "Time of a sleep on this host, by outcome."),
		streams: obs.Histogram("berth.host.stream.seconds", "Time of an operation of the data plane to its end, by operation and outcome."),
		ended:   obs.Counter("berth.host.sandbox.ended", "Sandboxes that ended without being asked."),
	}
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

func (m meters) lost(what string) {
	m.ended.Add(context.Background(), 1, metric.WithAttributes(attribute.String("what", what)))
}

func (m meters) stream(op string, took time.Duration, err error) {
	m.streams.Record(context.Background(), took.Seconds(), metric.WithAttributes(attribute.String("op", op)), outcome(err))
}
