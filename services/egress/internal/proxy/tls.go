package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/internal/hello"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// tls takes a connection whose first byte was TLS's.
func (f *flow) tls(ctx context.Context) {
	switch need, by := f.need(true); need {
	case policy.Refuse:
		f.deny(refusal{protocol: policy.TLS, decision: by})
		return
	case policy.Raw:
		f.raw(ctx, by)
		return
	}
	h, raw, err := hello.Read(&replay{Conn: f.client, head: f.head})
	f.head = raw
	if err != nil {
		f.deny(refusal{protocol: policy.TLS, decision: f.own(policy.Malformed), text: "the TLS hello could not be read"})
		return
	}
	if r := f.names(h); r != "" {
		f.deny(refusal{protocol: policy.TLS, decision: f.own(r)})
		return
	}
	switch need, by := f.need(true); {
	case need == policy.Intercept:
		f.intercept(ctx)
	case need == policy.Pass && h.Hidden: // what is inside may be for another host, and nobody here can see it
		f.deny(refusal{protocol: policy.TLS, decision: f.own(policy.Hidden)})
	case need == policy.Pass:
		f.pass(ctx, by)
	default: // another policy since the first byte
		f.deny(refusal{protocol: policy.TLS, decision: f.own(policy.Revoked)})
	}
}

// names holds what a hello says against the name that the connection is for; empty: they are one. Case alone
// makes no other host; a dot at the end, or another script, is not how SNI is written.
func (f *flow) names(h hello.Hello) policy.Reason {
	switch {
	case !h.Named:
		return policy.NoName
	case lower(h.ServerName) != string(f.name):
		return policy.Mismatch
	}
	return ""
}

func lower(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// pass carries TLS that stays closed.
func (f *flow) pass(ctx context.Context, by policy.Decision) {
	l := f.reach(ctx, policy.TLS, by)
	if l == nil {
		return
	}
	err := l.send(f.head)
	if f.head = nil; err == nil {
		err = l.again()
	}
	if err == nil {
		_ = l.client.SetReadDeadline(time.Time{})
		_ = l.up.SetReadDeadline(time.Time{})
		err = l.relay()
	}
	l.finish(err)
}

// again waits for the server's first answer. When that asks for a second hello, the second must name the same
// host: a server may go by it.
func (l *link) again() error {
	_ = l.up.SetReadDeadline(time.Now().Add(l.Limits.Handshake))
	_ = l.client.SetReadDeadline(time.Now().Add(l.Limits.Handshake))
	again, raw, err := hello.ReadAnswer(l.up)
	if len(raw) > 0 {
		if err := l.answer(raw); err != nil {
			return err
		}
	}
	switch {
	case errors.Is(err, io.EOF): // it ends without a word; so do both sides
		return nil
	case errors.Is(err, hello.ErrMalformed): // no TLS: nobody there reads a second hello
		if again = len(raw) > 0 && raw[0] == hello.First; again {
			return &session.Refusal{Reason: policy.Malformed, Text: err.Error()}
		}
		return nil
	case err != nil || !again:
		return err
	}
	h, raw, err := hello.ReadAgain(l.client, l.send)
	if errors.Is(err, hello.ErrMalformed) {
		if len(raw) > 0 && raw[0] == alert { // it gives up; nothing after that would be looked at
			_ = l.send(raw)
			return errGaveUp
		}
		return &session.Refusal{Reason: policy.Malformed, Text: err.Error()}
	}
	if err != nil {
		return err
	}
	if r := l.names(h); r != "" {
		return &session.Refusal{Reason: r, Text: "the second TLS hello names another host than the first"}
	}
	if h.Hidden {
		return &session.Refusal{Reason: policy.Hidden, Text: "the second TLS hello hides whom it is for"}
	}
	return l.send(raw)
}

// alert is the kind of a TLS record.
const alert = 21

var errGaveUp = errors.New("the client gave up")

// intercept opens TLS with a certificate of the cell's own and hands what is inside to the engine. A hello
// that is hidden does not matter here: the gate offers no ECH, so that a client which only pretends goes on,
// and one that means it gets no further than the outer name, which was checked. There are no session
// tickets: one name's could open another's.
func (f *flow) intercept(ctx context.Context) {
	leaf, err := f.Minter.Leaf(f.name)
	if err != nil {
		f.Log.Error("a certificate could not be made", "error", err)
		f.deny(refusal{protocol: policy.HTTPS, decision: f.own(policy.Certificate), verdict: egressv1.Verdict_VERDICT_FAILED})
		return
	}
	conn := tls.Server(&replay{Conn: f.client, head: f.head}, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}, SessionTicketsDisabled: true,
		GetCertificate: func(info *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if lower(info.ServerName) != string(f.name) {
				return nil, errors.New("the hello names another host")
			}
			return leaf, nil
		},
	})
	f.head = nil
	_ = f.client.SetDeadline(time.Now().Add(f.Limits.Handshake))
	if err := conn.HandshakeContext(ctx); err != nil {
		r := refusal{protocol: policy.HTTPS, decision: f.own(policy.Malformed), text: "the client gave up, or speaks no TLS"}
		if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "remote error" { // mostly it does not trust the cell's root
			r.decision.Reason, r.verdict = policy.Certificate, egressv1.Verdict_VERDICT_FAILED
		}
		f.deny(r)
		return
	}
	f.web(ctx, conn, true, conn.ConnectionState().NegotiatedProtocol)
}
