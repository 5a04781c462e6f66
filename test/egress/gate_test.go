package egress

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/test/testenv"
)

const clusterPolicy = `rules:
  - name: service
    allow: {hosts: [service.example.test], ports: [7080], protocol: http}
    addresses: [%s/32]
`

// TestWhatCarriesEgressMayGo: the gate of a host, its agent and the host itself each go and come back. While
// one is away nothing leaves that should not; afterwards what is allowed leaves again, wherever the session is.
func TestWhatCarriesEgressMayGo(t *testing.T) {
	e := testenv.Cluster(t, "--tiers", "container", "--hosts", "2", "--schedulers", "1", "--nats", "1")
	root := e.Member("identity").Show().Address
	hits := serveAt(t, root)
	for _, gate := range []string{"gate-1", "gate-2"} {
		named(t, e, gate, root)
	}
	apply(t, e, fmt.Sprintf(clusterPolicy, root))
	w := &world{t: t, env: e, in: &internet{}, tier: "container"}
	w.session = w.open("acme", probe(t))
	words := []string{"fetch", "addr=service.example.test:7080", "host=service.example.test:7080", "family=4"}
	w.eventually(t, passed, words...)

	gate := strings.Replace(w.session.Host(), "host", "gate", 1)
	t.Run("a-gate-that-is-gone-lets-nothing-out", func(t *testing.T) {
		e := e.For(t)
		e.Member(gate).Hold()
		before := hits.Load()
		for _, words := range [][]string{words, {"lookup", "name=service.example.test"}, {"dial", "addr=" + root + ":7080"}, {"dial", "addr=198.18.0.1:7080"}} {
			if o := w.try(t, words...); !o.refused() {
				t.Errorf("%s: %s", strings.Join(words, " "), o)
			}
		}
		if n := hits.Load() - before; n != 0 {
			t.Errorf("%d connections went out", n)
		}
		e.Member(gate).Restart()
		w.eventually(t, passed, words...)
	})
	t.Run("an-agent-that-starts-again-keeps-the-links", func(t *testing.T) {
		e.For(t).Member(w.session.Host()).Kill()
		w.eventually(t, passed, words...)
	})
	t.Run("another-host-lets-out-the-same", func(t *testing.T) {
		if _, err := w.session.Checkpoint(t.Context()); err != nil { // what was never saved waits for its host
			t.Fatal(err)
		}
		e.For(t).Member(w.session.Host()).Hold()
		was := w.session.Host()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var err error
		for w.session.Host() == was && ctx.Err() == nil {
			if err = w.session.Reopen(ctx); err != nil {
				time.Sleep(200 * time.Millisecond)
			}
		}
		if w.session.Host() == was {
			t.Fatalf("the session stays on %s: %v", was, err)
		}
		w.eventually(t, passed, words...)
	})
}

// serveAt answers HTTP at the machine's own end of the cluster's network, and counts.
func serveAt(t *testing.T, addr string) *atomic.Int64 {
	t.Helper()
	var hits atomic.Int64
	l, err := net.Listen("tcp", net.JoinHostPort(addr, "7080"))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		hits.Add(1)
		fmt.Fprintln(w, "here")
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return &hits
}

// named tells a gate the address of the service, which nobody knew before the cluster had a network.
func named(t *testing.T, e *testenv.Env, gate, addr string) {
	t.Helper()
	file := filepath.Join(e.Dir, "run", gate+".yaml")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var cfg map[string]any
	if err := yaml.Unmarshal(raw, &cfg); err != nil {
		t.Fatal(err)
	}
	cfg["hosts"] = map[string][]string{"service.example.test": {addr}}
	if raw, err = yaml.Marshal(cfg); err == nil {
		err = os.WriteFile(file, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.Member(gate).Restart()
}
