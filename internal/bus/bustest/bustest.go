// Package bustest starts a real bus for a test: a private store, a free port,
// permissions in force. Everything ends with the test.
package bustest

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
)

// Start starts a bus with the declared streams and consumers. The services,
// the operator and the keeper may log in, and the callers given.
func Start(t testing.TB, callers ...subjects.Caller) *bus.Embedded {
	t.Helper()
	e, err := bus.StartEmbedded(Context(t), bus.EmbeddedConfig{Dir: t.TempDir(), Port: -1, Callers: callers, Log: Log(t)})
	if err != nil {
		t.Fatalf("start bus: %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// Connect logs a caller in.
func Connect(t testing.TB, e *bus.Embedded, c subjects.Caller, opts ...bus.Option) *bus.Conn {
	t.Helper()
	conn, err := e.Connect(Context(t), c, opts...)
	if err != nil {
		t.Fatalf("connect %s: %v", c, err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// Trust has a plain connection of nats.go trust the bus.
func Trust(e *bus.Embedded) nats.Option {
	return nats.RootCAs(filepath.Join(certs.Folder(e.Dir()), "ca.pem"))
}

// Context ends after a minute or with the test.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Log discards, because a bus logs after its test has ended; set
// BERTH_TEST_LOG to see it.
func Log(testing.TB) *slog.Logger { return logger }
