// Package upstream reaches what a sandbox was allowed to reach. It guarantees that a name is looked up when
// it is dialled and not before, that every address is checked against what no sandbox may reach before it is
// dialled, and that the address which was checked is the one that is dialled.
package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// Dialer dials. Errors are *session.Refusal with reason private, unresolved or unreachable.
type Dialer interface {
	// Dial looks name up and dials the first address that answers; allowed are private ranges that the
	// operator let this rule reach.
	Dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (net.Conn, netip.Addr, error)
}

// Config of a dialer.
type Config struct {
	// Resolvers are DNS servers; empty: those of the host, read again when they change.
	Resolvers []netip.AddrPort
	// Static has the addresses of names for which no server is asked.
	Static map[authority.Name][]netip.Addr
	// Timeout bounds the lookup and the dial together; default 10 s.
	Timeout time.Duration
	// Own returns the host's addresses; default: those of its interfaces.
	Own func() []netip.Addr
	// Dialed, if set, is told how long each dial took, with its lookup.
	Dialed func(time.Duration, error)
}

// headStart is how long an address is tried before the next one is tried beside it.
const headStart = 250 * time.Millisecond

// dialer implements Dialer.
type dialer struct {
	cfg   Config
	names *resolver
	own   *own
}

// New makes a dialer.
func New(cfg Config) Dialer {
	if cfg.Timeout <= 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.Own == nil {
		cfg.Own = interfaces
	}
	return &dialer{cfg: cfg, names: newResolver(cfg.Resolvers, cfg.Static), own: &own{read: cfg.Own}}
}

// Dial implements Dialer.
func (d *dialer) Dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (conn net.Conn, at netip.Addr, err error) {
	began := time.Now()
	if d.cfg.Dialed != nil {
		defer func() { d.cfg.Dialed(time.Since(began), err) }()
	}
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout)
	defer cancel()
	all, err := d.names.lookup(ctx, name)
	if err != nil {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unresolved, Text: fmt.Sprintf("%s could not be looked up: %v", name, err)}
	}
	good := make([]netip.Addr, 0, len(all))
	for _, a := range all {
		if Check(a, allowed, d.own.addresses()) == nil {
			good = append(good, a)
		}
	}
	if len(good) == 0 {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Private,
			Text: fmt.Sprintf("%s leads to addresses that no sandbox may reach unless the rule names them", name)}
	}
	conn, at, err = race(ctx, interleave(good), port)
	if err != nil {
		return nil, netip.Addr{}, &session.Refusal{Reason: policy.Unreachable, Text: fmt.Sprintf("%s does not answer on port %d: %v", name, port, plain(err))}
	}
	return conn, at, nil
}

// plain is the cause of a dial's error without the addresses, which are not the sandbox's to know.
func plain(err error) string {
	var no syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "it took too long"
	case errors.As(err, &no):
		return no.Error()
	}
	return "it cannot be dialled"
}

// interleave alternates the families, IPv6 first.
func interleave(all []netip.Addr) []netip.Addr {
	var four, six []netip.Addr
	for _, a := range all {
		if a.Is4() {
			four = append(four, a)
		} else {
			six = append(six, a)
		}
	}
	out := make([]netip.Addr, 0, len(all))
	for i := range max(len(four), len(six)) {
		if i < len(six) {
			out = append(out, six[i])
		}
		if i < len(four) {
			out = append(out, four[i])
		}
	}
	return out
}

// answer of one attempt.
type answer struct {
	conn net.Conn
	at   netip.Addr
	err  error
}

// race dials one address after the other, each with a head start, and keeps the first that answers.
func race(ctx context.Context, all []netip.Addr, port uint16) (net.Conn, netip.Addr, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer)
	attempt := func(a netip.Addr) {
		conn, err := dial(ctx, netip.AddrPortFrom(a, port))
		select {
		case answers <- answer{conn, a, err}:
		case <-ctx.Done():
			if conn != nil {
				conn.Close()
			}
		}
	}
	next, open := 0, 0
	timer := time.NewTimer(0)
	defer timer.Stop()
	var last error
	for {
		select {
		case <-ctx.Done():
			return nil, netip.Addr{}, ctx.Err()
		case <-timer.C:
			if next < len(all) {
				go attempt(all[next])
				next, open = next+1, open+1
				timer.Reset(headStart)
			}
		case r := <-answers:
			open--
			if r.err == nil {
				return r.conn, r.at, nil
			}
			last = r.err
			if next < len(all) {
				timer.Reset(0)
			} else if open == 0 {
				return nil, netip.Addr{}, last
			}
		}
	}
}

// dial dials exactly this address: what the socket connects to is compared before and after.
func dial(ctx context.Context, at netip.AddrPort) (net.Conn, error) {
	wrong := func(got string) error {
		return fmt.Errorf("the address that was checked is %s, not %s", at, got)
	}
	d := net.Dialer{FallbackDelay: -1, KeepAlive: 30 * time.Second,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			if got, err := netip.ParseAddrPort(address); err != nil || got.Addr().Unmap() != at.Addr().Unmap() || got.Port() != at.Port() {
				return wrong(address)
			}
			return nil
		}}
	conn, err := d.DialContext(ctx, "tcp", at.String())
	if err != nil {
		return nil, err
	}
	got, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok || got.AddrPort().Addr().Unmap() != at.Addr().Unmap() {
		conn.Close()
		return nil, wrong(conn.RemoteAddr().String())
	}
	return conn, nil
}
