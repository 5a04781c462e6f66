package sdk

import (
	"context"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace"
)

// span starts a client span with the tracer of the span in ctx; without one
// it costs nothing.
func (c *Client) span(ctx context.Context, name string) (context.Context, trace.Span) {
	tp := trace.SpanFromContext(ctx).TracerProvider()
	return tp.Tracer("github.com/berth-dev/berth/sdk").Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient))
}

// inject writes the W3C traceparent of the span in ctx.
func inject(ctx context.Context, h nats.Header) {
	sc := trace.SpanContextFromContext(ctx)
	if !sc.IsValid() {
		return
	}
	h[headerTrace] = []string{"00-" + sc.TraceID().String() + "-" + sc.SpanID().String() + "-" + sc.TraceFlags().String()}
}
