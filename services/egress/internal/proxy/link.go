package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// link is a flow that was let through and has its other end.
type link struct {
	*flow
	protocol policy.Protocol
	decision policy.Decision
	live     session.Live
	up       net.Conn
	address  netip.Addr

	out, in atomic.Uint64
	moved   atomic.Int64 // when bytes last moved, nanoseconds since began
	revoked atomic.Bool
	used    atomic.Pointer[session.Refusal] // the rule's bytes are used up
}

// errIdle: nothing moved for too long.
var errIdle = errors.New("nothing moves")

// reach registers the flow by what it is allowed as and dials. nil: it was refused, and that is recorded.
func (f *flow) reach(ctx context.Context, protocol policy.Protocol, by policy.Decision) *link {
	l := &link{flow: f, protocol: protocol, decision: by}
	var err error
	l.live, err = f.session.Open(policy.Request{Name: f.name, Port: f.port, Protocol: protocol}, by, l.revoke)
	if err != nil {
		f.deny(l.refused(err, policy.AuditAway, egressv1.Verdict_VERDICT_DENIED))
		return nil
	}
	ctx, done := context.WithTimeout(ctx, f.Limits.Dial)
	defer done()
	l.up, l.address, err = f.Dialer.Dial(ctx, f.name, f.port, by.Addresses)
	switch {
	case l.revoked.Load():
		if err == nil {
			reset(l.up)
		}
		f.explain = nil
		f.denyOf(refusal{protocol: protocol, decision: f.own(l.why()), verdict: egressv1.Verdict_VERDICT_RESET}, l.live)
	case err != nil:
		f.denyOf(l.refused(err, policy.Unreachable, egressv1.Verdict_VERDICT_FAILED), l.live)
	case !f.cut.add(l.up): // the gate is closing, or it was revoked at this very moment
		l.finish(nil)
	default:
		return l
	}
	return nil
}

// refused is how an error of Open or Dial is recorded. A private address is a refusal, not a failure.
func (l *link) refused(err error, without policy.Reason, v egressv1.Verdict) refusal {
	d := l.own(without)
	d.Rule, d.Layer = l.decision.Rule, l.decision.Layer
	text := ""
	if r := (*session.Refusal)(nil); errors.As(err, &r) {
		d.Reason, text = r.Reason, r.Text
	}
	if d.Reason == policy.Private {
		v = egressv1.Verdict_VERDICT_DENIED
	}
	return refusal{protocol: l.protocol, decision: d, verdict: v, text: text}
}

// revoke is called when it is not allowed any more.
func (l *link) revoke() {
	l.revoked.Store(true)
	l.cut.now()
}

// why it was revoked.
func (l *link) why() policy.Reason {
	if r := (*session.Refusal)(nil); errors.As(l.live.Bytes(0, 0), &r) {
		return r.Reason
	}
	return policy.Revoked
}

// count takes note of bytes that moved.
func (l *link) count(out, in int) error {
	l.out.Add(uint64(out))
	l.in.Add(uint64(in))
	l.moved.Store(int64(time.Since(l.began)))
	err := l.live.Bytes(out, in)
	if r := (*session.Refusal)(nil); errors.As(err, &r) {
		l.used.Store(r)
	}
	return err
}

func (l *link) sent(n int) error { return l.count(n, 0) }
func (l *link) got(n int) error  { return l.count(0, n) }

// send writes what was read before.
func (l *link) send(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	_ = l.up.SetWriteDeadline(time.Now().Add(l.Limits.Handshake))
	n, err := l.up.Write(b)
	if n > 0 {
		if counted := l.sent(n); err == nil {
			err = counted
		}
	}
	return err
}

// answer writes to the client.
func (l *link) answer(b []byte) error {
	_ = l.client.SetWriteDeadline(time.Now().Add(l.Limits.Handshake))
	n, err := l.client.Write(b)
	if n > 0 {
		if counted := l.got(n); err == nil {
			err = counted
		}
	}
	return err
}

// relay moves bytes both ways until both sides have ended theirs. A side that ends its own may still hear the
// other; one that breaks breaks the other.
func (l *link) relay() error {
	l.moved.Store(int64(time.Since(l.began)))
	there := make(chan error, 1)
	go func() { there <- l.way(l.up, l.client, l.sent) }()
	back := l.way(l.client, l.up, l.got)
	return errors.Join(<-there, back)
}

func (l *link) way(dst, src net.Conn, count func(int) error) error {
	var err error
	from, to := rawConn(src), rawConn(dst)
	if from == nil || to == nil {
		err = l.copy(dst, src, count)
	} else {
		err = l.splice(dst, src, to, from, count)
	}
	if err == nil {
		err = closeWrite(dst)
	}
	if err != nil {
		l.cut.now()
	}
	return err
}

// watch keeps the deadline of one direction ahead.
type watch struct {
	l     *link
	set   func(time.Time) error
	armed time.Time
}

func (w *watch) arm() {
	if now := time.Now(); now.Sub(w.armed) > w.l.Limits.Idle/8 {
		w.armed = now
		_ = w.set(now.Add(w.l.Limits.Idle))
	}
}

// still turns a deadline that passed into nil while bytes move the other way.
func (w *watch) still(err error) error {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	if time.Since(w.l.began)-time.Duration(w.l.moved.Load()) >= w.l.Limits.Idle {
		return errIdle
	}
	w.armed = time.Time{}
	return nil
}

// finish records the link and ends it: err is how it ended, nil if both sides were done.
func (l *link) finish(err error) {
	v, d := egressv1.Verdict_VERDICT_ALLOWED, l.decision
	if r := l.used.Load(); r != nil {
		v, d.Reason = egressv1.Verdict_VERDICT_RESET, r.Reason
	}
	if l.revoked.Load() {
		v, d.Reason = egressv1.Verdict_VERDICT_RESET, l.why()
	}
	if r := (*session.Refusal)(nil); v == egressv1.Verdict_VERDICT_ALLOWED && errors.As(err, &r) {
		v, d.Reason = egressv1.Verdict_VERDICT_DENIED, r.Reason
		l.denied.Add(1)
	}
	if err != nil {
		l.cut.now()
	} else {
		_ = l.client.Close()
		_ = l.up.Close()
	}
	rec := l.record(l.protocol, v, d)
	rec.Address, rec.BytesOut, rec.BytesIn = l.address.String(), l.out.Load(), l.in.Load()
	l.note(rec, l.live)
}
