package obs

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric/noop"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	tracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
)

// collector is an OTLP receiver that remembers names.
type collector struct {
	tracepb.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans map[string]bool
}

func (c *collector) Export(_ context.Context, r *tracepb.ExportTraceServiceRequest) (*tracepb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range r.GetResourceSpans() {
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				c.spans[s.GetName()] = true
			}
		}
	}
	return &tracepb.ExportTraceServiceResponse{}, nil
}

type metricsCollector struct {
	metricspb.UnimplementedMetricsServiceServer
	mu      sync.Mutex
	metrics map[string]bool
}

func (c *metricsCollector) Export(_ context.Context, r *metricspb.ExportMetricsServiceRequest) (*metricspb.ExportMetricsServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rm := range r.GetResourceMetrics() {
		for _, sm := range rm.GetScopeMetrics() {
			for _, m := range sm.GetMetrics() {
				c.metrics[m.GetName()] = true
			}
		}
	}
	return &metricspb.ExportMetricsServiceResponse{}, nil
}

// TestTracesAndMetricsReachACollector over real OTLP.
func TestTracesAndMetricsReachACollector(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	traces, metrics := &collector{spans: map[string]bool{}}, &metricsCollector{metrics: map[string]bool{}}
	srv := grpc.NewServer()
	tracepb.RegisterTraceServiceServer(srv, traces)
	metricspb.RegisterMetricsServiceServer(srv, metrics)
	go func() { _ = srv.Serve(l) }()
	defer srv.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	defer otel.SetTracerProvider(tracenoop.NewTracerProvider())
	defer otel.SetMeterProvider(noop.NewMeterProvider())
	tele, err := Setup(ctx, "test", "1", Config{OTLPEndpoint: "http://" + l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	_, span := Start(ctx, "a step")
	End(span, nil)
	counter, err := Meter().Int64Counter("berth.test.count")
	if err != nil {
		t.Fatal(err)
	}
	counter.Add(ctx, 1)
	if err := tele.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	traces.mu.Lock()
	defer traces.mu.Unlock()
	metrics.mu.Lock()
	defer metrics.mu.Unlock()
	if !traces.spans["a step"] || !metrics.metrics["berth.test.count"] {
		t.Errorf("the collector got spans %v and metrics %v", traces.spans, metrics.metrics)
	}
}
