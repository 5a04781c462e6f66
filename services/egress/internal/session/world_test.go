package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

const patience = 20 * time.Second

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world is a table whose clock, policy, audit log and outlet are the test's.
type world struct {
	*Table
	t testing.TB

	pol   atomic.Pointer[policy.Policy]
	read  atomic.Pointer[func()] // called once, after a policy was read
	known atomic.Bool
	boot  atomic.Int64
	now   atomic.Int64
	begun atomic.Int64

	mu      sync.Mutex
	full    error
	records []*egressv1.Record
	events  []*egressv1.Event
	notices chan []byte
}

func (w *world) Of(*egressv1.Binding) *policy.Policy {
	p := w.pol.Load()
	if read := w.read.Swap(nil); read != nil {
		(*read)()
	}
	return p
}

func (w *world) Known() bool { return w.known.Load() }

func (w *world) Record(r *egressv1.Record) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.full == nil {
		w.records = append(w.records, r)
	}
	return w.full
}

func (w *world) Ready(string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.full
}

func (w *world) Begin(*egressv1.Record) (func(), error) {
	w.begun.Add(1)
	return func() { w.begun.Add(-1) }, nil
}

func (w *world) Event(_ string, e *egressv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *world) Notice(_ context.Context, _ *egressv1.Binding, raw []byte) error {
	select {
	case w.notices <- raw:
	default:
	}
	return nil
}

func (w *world) fill(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.full = err
}

func (w *world) counts() (records, events int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.records), len(w.events)
}

func newWorld(t testing.TB, doc string) *world {
	w := &world{t: t, notices: make(chan []byte, 100)}
	w.now.Store(time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC).UnixNano())
	w.known.Store(true)
	w.allow(doc, 1)
	w.Table = NewTable(Config{Host: "h1", Policies: w, Audit: w, Outlet: w, MaxConnections: 50, AllConnections: 60,
		Boot: func() time.Duration { return time.Duration(w.boot.Load()) }, Now: func() time.Time { return time.Unix(0, w.now.Load()) },
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	w.Lease(time.Hour)
	return w
}

// allow puts a policy of the cell in force.
func (w *world) allow(doc string, generation uint64) {
	w.t.Helper()
	d, err := policy.Parse([]byte(doc))
	must(w.t, err)
	w.pol.Store(policy.Merge([]policy.Layered{{Scope: &egressv1.Scope{Layer: egressv1.Layer_LAYER_CELL}, Generation: generation, Document: d}}))
}

func binding(n int, epoch uint64) *egressv1.Binding {
	return &egressv1.Binding{Session: &corev1.SessionRef{Tenant: "acme", Session: fmt.Sprintf("s%052d", n), Generation: &corev1.Stamp{Index: 1}, Epoch: &corev1.Stamp{Index: epoch}},
		Sandbox: fmt.Sprintf("b%d-%d", n, epoch), Actor: &corev1.Actor{Tenant: "acme", Subject: "ann"},
		Address4: netip.AddrFrom4([4]byte{100, 64, byte(n >> 8), byte(n)}).String(), Address6: fmt.Sprintf("fd62:6572:7468:1::%x", n)}
}

func (w *world) bind(n int, epoch uint64) *Bound {
	w.t.Helper()
	b, err := w.Bind(binding(n, epoch))
	must(w.t, err)
	return b
}

const pypi = `
contact: it@acme.example
rules:
  - name: pypi
    allow: {hosts: [pypi.org, "*.pythonhosted.org"], ports: [443], protocol: https}
    limits: {requests_per_second: 10, burst: 20, bytes_per_day: 1MiB, connections: 30}
`

func ask(name string) policy.Request {
	return policy.Request{Name: authority.Name(name), Port: 443, Protocol: policy.HTTPS, Method: "GET", Path: "/"}
}

// open opens what the policy allows, and returns what resets it.
func open(t testing.TB, s *Bound, name string) (Live, chan struct{}, error) {
	t.Helper()
	reset := make(chan struct{})
	l, err := s.Open(ask(name), s.Policy().Judge(ask(name)), func() { close(reset) })
	return l, reset, err
}

func refusedAs(t testing.TB, err error, want policy.Reason) {
	t.Helper()
	if r := (*Refusal)(nil); !errors.As(err, &r) || r.Reason != want {
		t.Errorf("got %v, want a refusal with reason %s", err, want)
	}
}

func closed(t testing.TB, c chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatal("it was not reset")
	}
}
