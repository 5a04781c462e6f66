package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"runtime"

	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	idleSessions   = 5000
	activeSessions = 200
)

// memory is what a session takes in the gate: bound and silent, and with one connection of each kind open on
// which a request was answered. The client's and the host's share, measured without the gate, is taken off.
func (b *bench) memory(ctx context.Context, w *world) error {
	before := held()
	idle, err := w.bind(idleSessions)
	if err != nil {
		return err
	}
	b.set.Add(figures.Result{Name: "memory of an idle session", Value: per(held()-before, idleSessions), Unit: "KiB"}, figures.None)
	w.unbind(idle)
	direct := 0.0
	for _, m := range modes {
		kib, err := w.open(ctx, m, activeSessions)
		if err != nil {
			return err
		}
		if !m.gate {
			direct = kib
			continue
		}
		b.set.Add(figures.Result{Name: "memory of a session with a connection that is " + m.name, Value: kib - direct, Unit: "KiB",
			FloorOf: fmt.Sprintf("without %.3g KiB of client and host", direct)}, figures.None)
	}
	return nil
}

func (w *world) bind(n int) ([]netip.Addr, error) {
	out := make([]netip.Addr, n)
	for i := range out {
		var err error
		if out[i], err = w.gate.Bind(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (w *world) unbind(all []netip.Addr) {
	for _, a := range all {
		w.gate.Unbind(a)
	}
}

// open opens one connection for each of n new sessions and returns what one takes.
func (w *world) open(ctx context.Context, m mode, n int) (float64, error) {
	from, err := w.bind(n)
	if err != nil {
		return 0, err
	}
	defer w.unbind(from)
	// The first one has made what all share.
	if err := w.once(ctx, m, w.from); err != nil {
		return 0, err
	}
	before := held()
	conns := make([]*tls.Conn, n)
	defer func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	for i := range conns {
		c, err := w.asked(ctx, m, from[i])
		if err != nil {
			return 0, err
		}
		conns[i] = c
	}
	return per(held()-before, n), nil
}

func (w *world) once(ctx context.Context, m mode, from netip.Addr) error {
	c, err := w.asked(ctx, m, from)
	if err == nil {
		err = c.Close()
	}
	return err
}

// asked is a connection on which a request was answered.
func (w *world) asked(ctx context.Context, m mode, from netip.Addr) (*tls.Conn, error) {
	c, err := w.dial(ctx, m, from)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(c, "GET /page HTTP/1.1\r\nHost: %s:%d\r\n\r\n", m.host, w.at.Port()); err != nil {
		return nil, err
	}
	buf := make([]byte, 4<<10)
	for got := 0; got < pageBytes; {
		n, err := c.Read(buf)
		if err != nil {
			return nil, err
		}
		got += n
	}
	return c, nil
}

// held is what the process holds after two collections: sync.Pool lets go in the second.
func held() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

func per(bytes int64, n int) float64 { return float64(bytes) / float64(n) / 1024 }
