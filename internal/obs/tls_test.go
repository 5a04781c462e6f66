package obs

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric/noop"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
	tracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/berth-dev/berth/internal/certs"
)

// issue keeps certificates of one authority in files.
func issue(t *testing.T, leaves ...certs.Leaf) (bundle string, paths []string) {
	t.Helper()
	ca, err := certs.OpenCA(t.TempDir(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leaves {
		path := filepath.Join(t.TempDir(), l.Name+".pem")
		if err := ca.Keep(path, l, time.Now()); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	return ca.BundleFile(), paths
}

var here = []netip.Addr{netip.MustParseAddr("127.0.0.1")}

// Spans say who works on what: a collector that cannot be verified gets none,
// and one that demands a certificate is shown it.
func TestACollectorIsVerifiedAndShownACertificate(t *testing.T) {
	bundle, own := issue(t, certs.Leaf{Role: certs.RoleService, Name: "collector", IPs: here}, certs.Leaf{Role: certs.RoleService, Name: "identity", ClientOnly: true})
	foreign, _ := issue(t)
	src, err := certs.OpenFiles(own[0], own[0], bundle, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := (Config{}).Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	traces := &collector{spans: map[string]bool{}}
	srv := grpc.NewServer(grpc.Creds(credentials.NewTLS(certs.Server(src, tls.RequireAndVerifyClientCert))))
	tracepb.RegisterTraceServiceServer(srv, traces)
	go func() { _ = srv.Serve(l) }()
	defer srv.Stop()
	defer otel.SetTracerProvider(tracenoop.NewTracerProvider())
	defer otel.SetMeterProvider(noop.NewMeterProvider())
	_, port, _ := strings.Cut(l.Addr().String(), ":")
	for name, c := range map[string]struct {
		cfg  Config
		want bool
	}{
		"good":           {Config{OTLPEndpoint: "https://127.0.0.1:" + port, OTLPCA: bundle, OTLPCert: own[1], OTLPKey: own[1]}, true},
		"no certificate": {Config{OTLPEndpoint: "https://127.0.0.1:" + port, OTLPCA: bundle}, false},
		"foreign root":   {Config{OTLPEndpoint: "https://127.0.0.1:" + port, OTLPCA: foreign, OTLPCert: own[1], OTLPKey: own[1]}, false},
		"machine's root": {Config{OTLPEndpoint: "https://127.0.0.1:" + port, OTLPCert: own[1], OTLPKey: own[1]}, false},
		"another name":   {Config{OTLPEndpoint: "https://127.0.0.2:" + port, OTLPCA: bundle, OTLPCert: own[1], OTLPKey: own[1]}, false},
	} {
		patience := 20 * time.Second
		if !c.want {
			patience = time.Second // nothing may arrive, also after a while
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		tele := &Telemetry{}
		if err := tele.setupTraces(ctx, nil, c.cfg); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_, span := Start(ctx, name)
		End(span, nil)
		err := tele.Shutdown(ctx)
		cancel()
		traces.mu.Lock()
		got := traces.spans[name]
		traces.mu.Unlock()
		if got != c.want || (err == nil) != c.want {
			t.Errorf("%s: a span arrived: %v, %v", name, got, err)
		}
	}
}

func TestAnotherMachineIsNotSpokenWithInTheClear(t *testing.T) {
	for _, bad := range []string{"http://collector:4317", "http://10.0.0.1:4317", "collector:4317", "ftp://x", "https://"} {
		if _, err := (Config{OTLPEndpoint: bad}).otlpTLS(); err == nil {
			t.Errorf("%s is taken for a good endpoint", bad)
		}
	}
	for _, good := range []string{"http://localhost:4317", "http://127.0.0.1:4317", "http://[::1]:4317"} {
		if _, err := (Config{OTLPEndpoint: good}).otlpTLS(); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	if l, err := (Config{}).Listen("0.0.0.0:0"); err == nil {
		l.Close()
		t.Error("metrics are served to other machines in the clear")
	}
}

func TestMetricsAreServedOverTLS(t *testing.T) {
	bundle, own := issue(t, certs.Leaf{Role: certs.RoleService, Name: "pool", IPs: here})
	l, err := Config{MetricsCert: own[0], MetricsKey: own[0]}.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	roots, err := certs.OpenFiles("", "", bundle, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{TLSClientConfig: certs.ByName(roots, "127.0.0.1")}}
	resp, err := client.Get("https://" + l.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.TLS.Version != tls.VersionTLS13 {
		t.Errorf("it speaks TLS version %x", resp.TLS.Version)
	}
}
