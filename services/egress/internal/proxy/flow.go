package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/hello"
	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/internal/web"
	"github.com/berth-dev/berth/services/egress/policy"
)

// flow is one connection of a sandbox.
type flow struct {
	*Proxy
	session session.Session
	client  net.Conn
	door    string
	began   time.Time
	cut     cut

	name  authority.Name
	asked string // what was asked for where that is no name
	port  uint16

	// head was read from client and not used yet.
	head []byte
	// greet tells the client that it is let through, explain that it is not; nil: the door has no words, or
	// has said them.
	greet   func() error
	explain func(refusal)
}

// refusal of a connection.
type refusal struct {
	protocol policy.Protocol
	decision policy.Decision
	verdict  egressv1.Verdict // unspecified is denied
	status   int              // of HTTP; 0: as Denial says
	text     string
	dialled  string
}

// transparent: the address that the sandbox dialled stands for a name that it was told, or for nothing.
func (f *flow) transparent(ctx context.Context) {
	to, ok := address(f.client.LocalAddr())
	f.port = to.Port()
	if ok {
		f.name, ok = f.session.NameOf(to.Addr())
	}
	if !ok {
		f.asked = to.Addr().String()
		f.deny(refusal{protocol: policy.TCP, decision: f.own(policy.Literal)})
		return
	}
	f.run(ctx)
}

// run takes a connection whose name and port are known. What it needs is asked again once something was read:
// a client may have taken its time.
func (f *flow) run(ctx context.Context) {
	plain, plainBy := f.need(false)
	sealed, sealedBy := f.need(true)
	never := plain == policy.Refuse && sealed == policy.Refuse
	wait := f.Limits.First
	switch {
	case plain == policy.Raw && sealed == policy.Raw: // it may be the server that speaks first
		f.raw(ctx, plainBy)
		return
	case never && f.explain != nil:
		f.deny(f.never(plainBy, sealedBy))
		return
	case never:
		wait = min(wait, f.Limits.Explain)
	}
	if !f.welcome() {
		return
	}
	first, err := f.first(wait)
	switch {
	case err != nil && never:
		f.deny(f.never(plainBy, sealedBy))
	case errors.Is(err, os.ErrDeadlineExceeded):
		f.deny(refusal{protocol: policy.TCP, decision: f.own(policy.Malformed), text: "the client sent nothing"})
	case err != nil: // it went again, as clients do that try two addresses
	case first == hello.First:
		f.tls(ctx)
	default:
		f.open(ctx, first)
	}
}

// open takes a connection that is not of TLS.
func (f *flow) open(ctx context.Context, first byte) {
	switch need, by := f.need(false); {
	case need == policy.Raw:
		f.raw(ctx, by)
	case first >= 'A' && first <= 'Z':
		f.web(ctx, &replay{Conn: f.client, head: f.head}, false, "") // it judges each request, and can say why not
	case need == policy.Refuse:
		f.deny(refusal{protocol: policy.TCP, decision: by})
	default:
		f.deny(refusal{protocol: policy.TCP, decision: f.own(policy.Protocols)})
	}
}

// need is what the connection takes under the policy as it is now.
func (f *flow) need(tls bool) (policy.Need, policy.Decision) {
	return f.session.Policy().Need(f.name, f.port, tls)
}

// never is the refusal of what neither TLS nor anything else may reach.
func (f *flow) never(plain, sealed policy.Decision) refusal {
	if f.port == 80 {
		return refusal{protocol: policy.HTTP, decision: plain}
	}
	return refusal{protocol: policy.TLS, decision: sealed}
}

// own is a decision of the gate itself.
func (f *flow) own(r policy.Reason) policy.Decision {
	p := f.session.Policy()
	return policy.Decision{Reason: r, Generation: p.Generation(), Ask: p.Ask()}
}

// welcome tells the client, once, that it may go on.
func (f *flow) welcome() bool {
	greet := f.greet
	f.greet, f.explain = nil, nil
	return greet == nil || greet() == nil
}

// first is the first byte; from here on until the deadline is taken away the client has f.Limits.First.
func (f *flow) first(wait time.Duration) (byte, error) {
	if len(f.head) == 0 {
		_ = f.client.SetReadDeadline(time.Now().Add(wait))
		var one [1]byte
		if _, err := io.ReadFull(f.client, one[:]); err != nil {
			return 0, err
		}
		f.head = append(f.head, one[0])
	}
	return f.head[0], nil
}

// web hands over to the engine.
func (f *flow) web(ctx context.Context, c net.Conn, secure bool, alpn string) {
	_ = f.client.SetDeadline(time.Time{})
	f.Web.Serve(ctx, web.Conn{Conn: c, Session: f.session, Door: f.door, Name: f.name, Port: f.port, Secure: secure, ALPN: alpn})
	_ = c.Close()
}

// raw carries bytes as they are.
func (f *flow) raw(ctx context.Context, by policy.Decision) {
	l := f.reach(ctx, policy.TCP, by)
	if l == nil {
		return
	}
	var err error
	if f.welcome() {
		_ = f.client.SetReadDeadline(time.Time{})
		err = l.send(f.head)
		if f.head = nil; err == nil {
			err = l.relay()
		}
	}
	l.finish(err)
}

// deny records a refusal and tells it to the client: in words where the door has some, else by a reset.
func (f *flow) deny(r refusal) { f.denyOf(r, nil) }

// denyOf is deny of what is open, which it ends once that is recorded.
func (f *flow) denyOf(r refusal, open session.Live) {
	f.denied.Add(1)
	if r.verdict == egressv1.Verdict_VERDICT_UNSPECIFIED {
		r.verdict = egressv1.Verdict_VERDICT_DENIED
	}
	rec := f.record(r.protocol, r.verdict, r.decision)
	rec.Address = r.dialled
	f.note(rec, open)
	if explain := f.explain; explain != nil {
		f.greet, f.explain = nil, nil
		explain(r)
		return
	}
	f.cut.now()
}

// note records, and then ends what is open, if something is: that it is open stays in the audit log until it
// has the record.
func (f *flow) note(rec *egressv1.Record, open session.Live) {
	err := f.session.Note(rec)
	if err != nil {
		f.unrecorded.Add(1)
		f.Log.Error("a connection could not be recorded", "door", f.door, "error", err)
	}
	if open == nil {
		return
	}
	if err != nil {
		open.Unrecorded()
	}
	open.Close()
}

func (f *flow) record(protocol policy.Protocol, v egressv1.Verdict, d policy.Decision) *egressv1.Record {
	rec := &egressv1.Record{Protocol: string(protocol), Door: f.door, Authority: string(f.name), Port: uint32(f.port), Verdict: v,
		Rule: d.Rule, Layer: d.Layer, PolicyGeneration: d.Generation, Reason: string(d.Reason), Reported: d.Reported,
		Began: timestamppb.New(f.began), Ended: timestamppb.Now()}
	if f.name == "" {
		rec.Authority = f.asked
	}
	return rec
}

// replay is a connection of which some bytes were read before.
type replay struct {
	net.Conn
	head []byte
}

// Read implements net.Conn.
func (r *replay) Read(p []byte) (int, error) {
	if len(r.head) == 0 {
		return r.Conn.Read(p)
	}
	n := copy(p, r.head)
	if r.head = r.head[n:]; len(r.head) == 0 {
		r.head = nil
	}
	return n, nil
}

// NetConn is the connection itself.
func (r *replay) NetConn() net.Conn { return r.Conn }

// CloseWrite ends this side's bytes.
func (r *replay) CloseWrite() error { return closeWrite(r.Conn) }

func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}
