package obs

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	promexp "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/credentials"
)

// Config says where traces and metrics go. With the zero value nothing is
// recorded.
type Config struct {
	OTLPEndpoint string `yaml:"otlp_endpoint"` // "https://host:4317", or "http://..." on this machine; empty: none
	OTLPCA       string `yaml:"otlp_ca"`       // PEM file of the roots that the collector is verified by; default: the machine's own
	OTLPCert     string `yaml:"otlp_cert"`     // PEM files that are shown to the collector; empty: nothing
	OTLPKey      string `yaml:"otlp_key"`
	MetricsCert  string `yaml:"metrics_cert"` // PEM files for serving metrics to other machines
	MetricsKey   string `yaml:"metrics_key"`
	Stdout       bool   `yaml:"stdout"`     // write every span to standard error
	SpansFile    string `yaml:"spans_file"` // append every span as one line of JSON; empty: none
	KeepSpans    int    `yaml:"keep_spans"` // keep so many spans in memory; 0: none
	Prometheus   bool   `yaml:"prometheus"` // collect for MetricsHandler
}

// Telemetry is what Setup started.
type Telemetry struct {
	traces  *sdktrace.TracerProvider
	metrics *sdkmetric.MeterProvider
	handler http.Handler
	spans   *SpanStore
}

// Setup makes the process's tracer and meter. service is the process's name.
func Setup(ctx context.Context, service, version string, cfg Config) (*Telemetry, error) {
	t := &Telemetry{handler: http.NotFoundHandler()}
	res := resource.NewSchemaless(
		attribute.String("service.name", service), attribute.String("service.version", version))
	if err := t.setupTraces(ctx, res, cfg); err != nil {
		return nil, errors.Join(err, t.Shutdown(ctx))
	}
	if err := t.setupMetrics(ctx, res, cfg); err != nil {
		return nil, errors.Join(err, t.Shutdown(ctx))
	}
	return t, nil
}

func (t *Telemetry) setupTraces(ctx context.Context, res *resource.Resource, cfg Config) error {
	opts := []sdktrace.TracerProviderOption{sdktrace.WithResource(res)}
	none := len(opts)
	if cfg.OTLPEndpoint != "" {
		conf, err := cfg.otlpTLS()
		if err != nil {
			return err
		}
		to := []otlptracegrpc.Option{otlptracegrpc.WithEndpointURL(cfg.OTLPEndpoint)}
		if conf != nil {
			to = append(to, otlptracegrpc.WithTLSCredentials(credentials.NewTLS(conf)))
		}
		exp, err := otlptracegrpc.New(ctx, to...)
		if err != nil {
			return fmt.Errorf("export traces to %s: %w", cfg.OTLPEndpoint, err)
		}
		opts = append(opts, sdktrace.WithBatcher(exp))
	}
	if cfg.Stdout {
		exp, err := stdouttrace.New(stdouttrace.WithWriter(os.Stderr))
		if err != nil {
			return fmt.Errorf("write traces to standard error: %w", err)
		}
		opts = append(opts, sdktrace.WithBatcher(exp))
	}
	if cfg.SpansFile != "" || cfg.KeepSpans > 0 {
		store, err := NewSpanStore(cfg.SpansFile, cfg.KeepSpans)
		if err != nil {
			return err
		}
		t.spans = store
		opts = append(opts, sdktrace.WithBatcher(store, sdktrace.WithBatchTimeout(spanDelay)))
	}
	if len(opts) == none {
		return nil
	}
	t.traces = sdktrace.NewTracerProvider(opts...)
	otel.SetTracerProvider(t.traces)
	otel.SetTextMapPropagator(w3c)
	return nil
}

func (t *Telemetry) setupMetrics(ctx context.Context, res *resource.Resource, cfg Config) error {
	opts := []sdkmetric.Option{sdkmetric.WithResource(res)}
	none := len(opts)
	if cfg.OTLPEndpoint != "" {
		conf, err := cfg.otlpTLS()
		if err != nil {
			return err
		}
		to := []otlpmetricgrpc.Option{otlpmetricgrpc.WithEndpointURL(cfg.OTLPEndpoint)}
		if conf != nil {
			to = append(to, otlpmetricgrpc.WithTLSCredentials(credentials.NewTLS(conf)))
		}
		exp, err := otlpmetricgrpc.New(ctx, to...)
		if err != nil {
			return fmt.Errorf("export metrics to %s: %w", cfg.OTLPEndpoint, err)
		}
		opts = append(opts, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exp)))
	}
	if cfg.Prometheus {
		reg := prometheus.NewRegistry()
		reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		exp, err := promexp.New(promexp.WithRegisterer(reg))
		if err != nil {
			return fmt.Errorf("collect metrics: %w", err)
		}
		t.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
		opts = append(opts, sdkmetric.WithReader(exp))
	}
	if len(opts) == none {
		return nil
	}
	t.metrics = sdkmetric.NewMeterProvider(opts...)
	otel.SetMeterProvider(t.metrics)
	return nil
}

// MetricsHandler serves the metrics to Prometheus; 404 if that is off.
func (t *Telemetry) MetricsHandler() http.Handler { return t.handler }

// Spans returns the span store, nil if there is none.
func (t *Telemetry) Spans() *SpanStore { return t.spans }

// Flush exports what is recorded so far.
func (t *Telemetry) Flush(ctx context.Context) error {
	var errs []error
	if t.traces != nil {
		errs = append(errs, t.traces.ForceFlush(ctx))
	}
	if t.metrics != nil {
		errs = append(errs, t.metrics.ForceFlush(ctx))
	}
	return errors.Join(errs...)
}

// Shutdown exports what is left and stops.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	if t.traces != nil {
		errs = append(errs, t.traces.Shutdown(ctx))
	}
	if t.metrics != nil {
		errs = append(errs, t.metrics.Shutdown(ctx))
	}
	return errors.Join(errs...)
}

// Meter returns the process's meter.
func Meter() metric.Meter { return otel.Meter(scope) }

// Counter makes a counter; a bad name is a defect of the caller.
func Counter(name, doc string) metric.Int64Counter {
	c, err := Meter().Int64Counter(name, metric.WithDescription(doc))
	if err != nil {
		panic(err)
	}
	return c
}

// Histogram makes a histogram of seconds; a bad name is a defect of the caller.
func Histogram(name, doc string) metric.Float64Histogram {
	h, err := Meter().Float64Histogram(name, metric.WithDescription(doc), metric.WithUnit("s"),
		metric.WithExplicitBucketBoundaries(.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60))
	if err != nil {
		panic(err)
	}
	return h
}
