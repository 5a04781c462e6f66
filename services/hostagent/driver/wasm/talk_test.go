package wasm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// box is a sandbox with the guest protocol open.
type box struct {
	d    *Driver
	sb   driver.Sandbox
	spec driver.Spec
	conn *hostend.Conn
}

// openDriver opens a driver that stops everything at the end of the test.
func openDriver(t testing.TB, h *host) *Driver {
	t.Helper()
	d := h.Open(t).(*Driver)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		found, err := d.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, f := range found {
			if err := d.Stop(ctx, f.ID); err != nil {
				t.Error(err)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if left := h.Left(t); len(left) > 0 {
			t.Errorf("left on the host: %v", left)
		}
	})
	return d
}

// open makes a sandbox of the session with this number and attaches to its guest.
func (h *host) open(t testing.TB, d *Driver, session int) *box {
	t.Helper()
	spec := h.Spec(t, session, 1)
	spec.Init, spec.Guest = nil, h.cfg.Program
	spec.Limits.MemoryBytes = h.memory
	return attach(t, d, spec)
}

func attach(t testing.TB, d *Driver, spec driver.Spec) *box {
	t.Helper()
	sb, err := d.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	ch, err := hostend.OpenFIFOs(sb.Channel.Stdin, sb.Channel.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := hostend.Attach(t.Context(), ch, ch, hostend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(); _ = ch.Close() })
	return &box{d: d, sb: sb, spec: spec, conn: conn}
}

// ended is all that a call gave.
type ended struct {
	out, err string
	exit     hostend.Exit
	took     time.Duration
}

var calls atomic.Int64

// begin starts a call and returns its stream.
func (b *box) begin(t testing.TB, spec hostend.ExecSpec) (*hostend.ExecStream, error) {
	t.Helper()
	if spec.Key == "" {
		spec.Key = fmt.Sprintf("call-%d", calls.Add(1))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return b.conn.StartExec(ctx, spec)
}

// call runs a call to its end.
func (b *box) call(t testing.TB, argv ...string) ended {
	t.Helper()
	began := time.Now()
	s, err := b.begin(t, hostend.ExecSpec{Argv: argv})
	if err != nil {
		t.Fatalf("%v: %v", argv, err)
	}
	e := finish(t, s)
	e.took = time.Since(began)
	return e
}

func finish(t testing.TB, s *hostend.ExecStream) ended {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var e ended
	var out, bad strings.Builder
	for {
		ev, err := s.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			e.out, e.err = out.String(), bad.String()
			return e
		case err != nil:
			t.Fatalf("%s: %v", s.Key(), err)
		case ev.Exit != nil:
			e.exit = *ev.Exit
		case ev.Stream == hostend.Stdout:
			out.Write(ev.Data)
		default:
			bad.Write(ev.Data)
		}
	}
}

// code is the exit code, or -1 if there is none.
func (e ended) code() int {
	if e.exit.Code == nil {
		return -1
	}
	return *e.exit.Code
}

// want checks how a call ended and what it said on standard error.
func (e ended) want(t testing.TB, code int, say string) {
	t.Helper()
	if e.code() != code || !strings.Contains(e.err, say) {
		t.Errorf("got code %d (signal %d), want %d; standard error %.300q, want %q; output %.100q", e.code(), e.exit.Signal, code, e.err, say, e.out)
	}
}

func mode(m uint32) *uint32 { return &m }
