package obs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"
)

func TestOneTraceAcrossTheBusAndALinkAfterAWait(t *testing.T) {
	file := filepath.Join(t.TempDir(), "spans.jsonl")
	tel, err := Setup(context.Background(), "test", "0", Config{SpansFile: file, KeepSpans: 100, Prometheus: true})
	if err != nil {
		t.Fatal(err)
	}
	ctx, root := Start(context.Background(), "open")
	header := map[string][]string{}
	Inject(ctx, header)
	if len(header["traceparent"]) != 1 || header["Traceparent"] != nil {
		t.Fatalf("header %v", header)
	}
	_, child := Start(Extract(context.Background(), header), "wake")
	_, late := StartLinked(context.Background(), "timer", header)
	End(late, nil)
	End(child, errors.New("no room"))
	End(root, nil)
	Counter("berth_test_total", "x").Add(context.Background(), 3)
	if err := tel.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	id := root.SpanContext().TraceID().String()
	if got := tel.Spans().Trace(id); len(got) != 2 || got[0].Error != "no room" || got[0].Parent != got[1].ID {
		t.Fatalf("%+v", got)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	linked := 0
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var s Span
		if err := json.Unmarshal(sc.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Name == "timer" && s.Trace != id && len(s.Links) == 1 && strings.HasPrefix(s.Links[0], id) {
			linked++
		}
	}
	if linked != 1 {
		t.Fatalf("%d linked spans", linked)
	}
	w := httptest.NewRecorder()
	tel.MetricsHandler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(w.Body.String(), "berth_test_total") {
		t.Fatalf("metrics: %.500s", w.Body)
	}
	if err := tel.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func TestLogsCarryTraceIDs(t *testing.T) {
	var b bytes.Buffer
	log, err := NewLogger(&b, LogConfig{Format: "json", Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	log.With("a", 1).WarnContext(trace.ContextWithSpanContext(context.Background(), sc), "hello")
	log.Info("not written")
	if s := b.String(); !strings.Contains(s, sc.TraceID().String()) || strings.Contains(s, "not written") {
		t.Fatal(s)
	}
	for _, bad := range []LogConfig{{Level: "loud"}, {Format: "xml"}} {
		if _, err := NewLogger(&b, bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

func TestSteps(t *testing.T) {
	var s Steps
	err := s.Do(context.Background(), "mkfs", func(context.Context) error { return errors.New("full") })
	if err == nil || len(s.List()) != 1 || s.List()[0].Name != "mkfs" {
		t.Fatal(err, s.List())
	}
}

func BenchmarkStartEndOff(b *testing.B) {
	h := map[string][]string{}
	for b.Loop() {
		ctx, span := Start(context.Background(), "x")
		Inject(ctx, h)
		End(span, nil)
	}
}
