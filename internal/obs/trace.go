// Package obs is how Berth's processes are watched: OpenTelemetry traces and
// metrics, and structured logs that carry trace ids. It guarantees that it
// costs next to nothing when nothing is configured, and that a trace goes on
// across the bus through the headers traceparent and tracestate, which are
// written in lower case because NATS headers are case-sensitive.
package obs

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const scope = "github.com/berth-dev/berth"

// carrier is a NATS header (or any map of that shape) with exact-case keys.
type carrier map[string][]string

func (c carrier) Get(key string) string {
	if v := c[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

func (c carrier) Set(key, value string) { c[key] = []string{value} }

func (c carrier) Keys() []string {
	out := make([]string, 0, len(c))
	for k := range c {
		out = append(out, k)
	}
	return out
}

var w3c = propagation.TraceContext{}

// Inject writes the trace context of ctx into a message header.
func Inject(ctx context.Context, header map[string][]string) {
	if trace.SpanContextFromContext(ctx).IsValid() {
		w3c.Inject(ctx, carrier(header))
	}
}

// Extract returns ctx with the remote trace context that header carries.
func Extract(ctx context.Context, header map[string][]string) context.Context {
	if len(header["traceparent"]) == 0 {
		return ctx
	}
	return w3c.Extract(ctx, carrier(header))
}

// Tracer returns the process's tracer.
func Tracer() trace.Tracer { return otel.Tracer(scope) }

// Start begins a span below the one in ctx.
func Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	return Tracer().Start(ctx, name, opts...)
}

// StartLinked begins a new trace that is linked to the one that header
// carries: for work that begins after a message waited.
func StartLinked(ctx context.Context, name string, header map[string][]string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	opts = append(opts, trace.WithNewRoot())
	remote := trace.SpanContextFromContext(Extract(context.Background(), header))
	if remote.IsValid() {
		opts = append(opts, trace.WithLinks(trace.Link{SpanContext: remote}))
	}
	return Tracer().Start(ctx, name, opts...)
}

// End ends a span, marking it failed if err is not nil.
func End(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}
