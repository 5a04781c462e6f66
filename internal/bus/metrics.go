package bus

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

var (
	servedSeconds  = obs.Histogram("berth.rpc.served", "Time to answer an RPC, by method and kind of outcome.")
	handledSeconds = obs.Histogram("berth.bus.handled", "Time to handle a stored message, by consumer and kind of outcome.")
	deadTotal      = obs.Counter("berth.bus.dead", "Messages that went to BERTH_DEAD, by consumer.")
)

func recordServed(ctx context.Context, method string, began time.Time, err error) {
	if servedSeconds.Enabled(ctx) {
		servedSeconds.Record(ctx, time.Since(began).Seconds(), metric.WithAttributes(
			attribute.String("method", method), attribute.String("kind", errs.Kind(err).String())))
	}
}

func recordHandled(ctx context.Context, consumer string, began time.Time, err error) {
	if handledSeconds.Enabled(ctx) {
		handledSeconds.Record(ctx, time.Since(began).Seconds(), metric.WithAttributes(
			attribute.String("consumer", consumer), attribute.String("kind", errs.Kind(err).String())))
	}
}

func recordDead(ctx context.Context, consumer string) {
	deadTotal.Add(ctx, 1, metric.WithAttributes(attribute.String("consumer", consumer)))
}
