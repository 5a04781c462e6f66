package obs

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

const spanDelay = 200 * time.Millisecond

// maxSpansFile bounds the file of spans; when it is full it starts anew and
// the old one is kept beside it as <file>.old.
const maxSpansFile = 64 << 20

// Span is one finished span as the store keeps it.
type Span struct {
	Trace    string         `json:"trace"`
	ID       string         `json:"id"`
	Parent   string         `json:"parent,omitempty"`
	Links    []string       `json:"links,omitempty"` // <trace>/<span>
	Name     string         `json:"name"`
	Kind     string         `json:"kind"`
	Start    time.Time      `json:"start"`
	Micros   int64          `json:"us"`
	Error    string         `json:"error,omitempty"`
	Attrs    map[string]any `json:"attrs,omitempty"`
	Resource string         `json:"service,omitempty"`
}

// SpanStore is a span exporter that appends spans to a file as lines of JSON
// and keeps the latest in memory, so that one machine can show a trace with
// no collector.
type SpanStore struct {
	mu   sync.Mutex
	path string
	file *os.File
	size int64
	keep int
	ring []Span
}

// NewSpanStore opens the file (empty: none) and keeps up to keep spans.
func NewSpanStore(path string, keep int) (*SpanStore, error) {
	s := &SpanStore{path: path, keep: keep}
	if path == "" {
		return s, nil
	}
	return s, s.open()
}

func (s *SpanStore) open() error {
	f, err := os.OpenFile(s.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open file of spans: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return fmt.Errorf("open file of spans: %w", err)
	}
	s.file, s.size = f, st.Size()
	return nil
}

// ExportSpans implements the exporter.
func (s *SpanStore) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ro := range spans {
		span := fromSDK(ro)
		if s.keep > 0 {
			if len(s.ring) >= s.keep {
				s.ring = append(s.ring[:0], s.ring[len(s.ring)-s.keep/2:]...)
			}
			s.ring = append(s.ring, span)
		}
		if err := s.write(span); err != nil {
			return err
		}
	}
	return nil
}

func (s *SpanStore) write(span Span) error {
	if s.file == nil {
		return nil
	}
	line, err := json.Marshal(span)
	if err != nil {
		return err
	}
	if s.size > maxSpansFile {
		s.file.Close()
		if err := os.Rename(s.path, s.path+".old"); err != nil {
			return err
		}
		if err := s.open(); err != nil {
			return err
		}
	}
	n, err := s.file.Write(append(line, '\n'))
	s.size += int64(n)
	return err
}

// Shutdown implements the exporter.
func (s *SpanStore) Shutdown(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	s.file = nil
	return err
}

// Trace returns the spans of one trace that are in memory, in order of end.
func (s *SpanStore) Trace(id string) []Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Span
	for _, sp := range s.ring {
		if sp.Trace == id {
			out = append(out, sp)
		}
	}
	return out
}

// All returns the spans that are in memory, in order of end.
func (s *SpanStore) All() []Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Span(nil), s.ring...)
}

func fromSDK(ro sdktrace.ReadOnlySpan) Span {
	sp := Span{
		Trace: ro.SpanContext().TraceID().String(), ID: ro.SpanContext().SpanID().String(),
		Name: ro.Name(), Kind: ro.SpanKind().String(), Start: ro.StartTime(),
		Micros: ro.EndTime().Sub(ro.StartTime()).Microseconds(), Error: ro.Status().Description,
	}
	if ro.Parent().IsValid() {
		sp.Parent = ro.Parent().SpanID().String()
	}
	for _, l := range ro.Links() {
		sp.Links = append(sp.Links, l.SpanContext.TraceID().String()+"/"+l.SpanContext.SpanID().String())
	}
	if attrs := ro.Attributes(); len(attrs) > 0 {
		sp.Attrs = make(map[string]any, len(attrs))
		for _, a := range attrs {
			sp.Attrs[string(a.Key)] = a.Value.AsInterface()
		}
	}
	for _, a := range ro.Resource().Attributes() {
		if a.Key == "service.name" {
			sp.Resource = a.Value.AsString()
		}
	}
	return sp
}
