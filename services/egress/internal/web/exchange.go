package web

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// exchange is one request and its answer.
type exchange struct {
	*link
	e      *Engine
	w      http.ResponseWriter
	r      *http.Request
	ctx    context.Context
	cancel context.CancelFunc

	target   target
	req      policy.Request
	decision policy.Decision
	socket   bool        // it asks for WebSocket
	header   http.Header // as it goes out
	places   []place     // where secrets go
	scrub    *scrubber   // of the secrets that went out; nil: none did

	upload  *upload // nil: the request has no body
	live    session.Live
	record  *egressv1.Record
	out, in atomic.Uint64
	address atomic.Value // string
	body    atomic.Pointer[session.Refusal]
	status  int // of the answer; 0: none was begun
	raw     bool

	mu    sync.Mutex
	over  bool // the handler has returned
	reset bool // it was taken back
}

func refuse(r policy.Reason, text string) *session.Refusal {
	return &session.Refusal{Reason: r, Text: text}
}

// handle serves one request. It panics with http.ErrAbortHandler where the answer must not look complete.
func (e *Engine) handle(l *link, w http.ResponseWriter, r *http.Request) {
	if !l.requests.enter() {
		panic(http.ErrAbortHandler)
	}
	defer l.requests.leave()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	x := &exchange{link: l, e: e, w: w, r: r, ctx: ctx, cancel: cancel, record: &egressv1.Record{
		Protocol: string(l.protocol()), Door: l.Door, Authority: short(r.Host), Method: short(r.Method),
		Began: timestamppb.New(e.Now()),
	}}
	defer x.finish()
	stop := context.AfterFunc(l.ctx, cancel)
	defer stop()
	if !l.pool.begin() {
		x.record.Verdict, x.record.Reason = egressv1.Verdict_VERDICT_DENIED, string(policy.Rate)
		panic(http.ErrAbortHandler)
	}
	defer l.pool.done()
	if no := x.serve(); no != nil {
		x.deny(no)
	}
}

func (l *link) protocol() policy.Protocol {
	if l.Secure {
		return policy.HTTPS
	}
	return policy.HTTP
}

// serve returns why nothing was answered.
func (x *exchange) serve() *session.Refusal {
	if no := x.read(); no != nil {
		return no
	}
	x.decision = x.e.Judge(x.Session, x.req)
	if !x.decision.Allowed {
		return refuse(x.decision.Reason, "")
	}
	x.header = x.forwarded()
	if no := x.examine(); no != nil {
		return no
	}
	live, err := x.Session.Open(x.req, x.decision, x.takeBack)
	if err != nil {
		return x.because(err, policy.AuditAway)
	}
	x.live = live
	if no := x.count(headSize(x.r.Header)+len(x.r.RequestURI), 0); no != nil {
		return no
	}
	if no := x.inject(); no != nil {
		return no
	}
	resp, no := x.roundTrip()
	if no != nil {
		return no
	}
	defer resp.Body.Close()
	return x.answer(resp)
}

// takeBack ends the request from outside: the whole connection of HTTP/1, the stream of HTTP/2.
func (x *exchange) takeBack() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.over {
		return
	}
	x.reset = true
	x.cancel()
	if x.strict != nil {
		x.abort()
		return
	}
	rc := http.NewResponseController(x.w)
	past := time.Unix(1, 0)
	_ = rc.SetReadDeadline(past)
	_ = rc.SetWriteDeadline(past)
}

func (x *exchange) wasReset() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.reset
}

// because turns an error into a refusal.
func (x *exchange) because(err error, otherwise policy.Reason) *session.Refusal {
	var no *session.Refusal
	if errors.As(err, &no) {
		return no
	}
	return refuse(otherwise, "")
}

// count counts bytes, until the session says that it is enough.
func (x *exchange) count(out, in int) *session.Refusal {
	x.out.Add(uint64(out))
	x.in.Add(uint64(in))
	if err := x.live.Bytes(out, in); err != nil {
		return x.because(err, policy.Bytes)
	}
	return nil
}

// headSize is about what the fields take.
func headSize(h http.Header) (n int) {
	for k, vs := range h {
		for _, v := range vs {
			n += len(k) + len(v) + 4
		}
	}
	return n
}

// deny answers with why not, or ends what was begun.
func (x *exchange) deny(no *session.Refusal) {
	if x.decision.Generation == 0 { // it was refused before the policy was asked
		p := x.Session.Policy()
		x.decision.Generation, x.decision.Ask = p.Generation(), p.Ask()
	}
	d := x.decision
	d.Allowed, d.Reason = false, no.Reason
	x.record.Reason, x.record.Verdict = string(no.Reason), egressv1.Verdict_VERDICT_DENIED
	switch no.Reason {
	case policy.Unresolved, policy.Unreachable, policy.Certificate, policy.SecretAway, policy.Echo:
		x.record.Verdict = egressv1.Verdict_VERDICT_FAILED
	}
	if x.status != 0 || x.wasReset() {
		x.record.Verdict = egressv1.Verdict_VERDICT_RESET
		panic(http.ErrAbortHandler)
	}
	status, contentType, body := Denial(x.req, d, no.Text, x.r.Header.Get("Accept"))
	h := x.w.Header()
	clear(h)
	h.Set("Berth-Denied", string(no.Reason))
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if status == http.StatusTooManyRequests {
		h.Set("Retry-After", "1")
	}
	if x.strict != nil && (x.raw || no.Reason == policy.Malformed) { // HTTP/2 would end its other streams
		h.Set("Connection", "close")
	}
	x.status = status
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if x.strict == nil {
		defer x.hurry()()
	}
	x.w.WriteHeader(status)
	if x.r.Method != http.MethodHead {
		_, _ = x.w.Write(body)
	}
	if x.strict == nil { // while it is counted: net/http writes what is left after the handler
		_ = http.NewResponseController(x.w).Flush()
	}
}

// hurry bounds how long a client of HTTP/2 that takes no answer can make a refusal wait, and drops what it
// sent.
func (x *exchange) hurry() (written func()) {
	clear(x.r.Header)
	x.header = nil
	_ = http.NewResponseController(x.w).SetWriteDeadline(time.Now().Add(denyTime))
	late := time.AfterFunc(2*denyTime, x.abort) // nothing is read of the connection at all
	return func() { late.Stop() }
}

// finish records what became of it.
func (x *exchange) finish() {
	x.mu.Lock()
	x.over = true
	reset := x.reset
	x.mu.Unlock()
	aborted := recover()
	if reset {
		x.record.Verdict, x.record.Reason = egressv1.Verdict_VERDICT_RESET, string(policy.Revoked)
	}
	err := x.note()
	if x.live != nil { // only now: that it is open stays in the audit log until it has the record
		if err != nil {
			x.live.Unrecorded()
		}
		x.live.Close()
	}
	if err != nil && x.record.Verdict == egressv1.Verdict_VERDICT_ALLOWED {
		x.e.Log.Warn("a request could not be recorded and was reset", "host", x.req.Name.String(), "error", err)
		aborted = http.ErrAbortHandler
	}
	if aborted != nil {
		if aborted != http.ErrAbortHandler {
			x.e.Log.Error("a request ended by a fault of the gate", "host", x.req.Name.String())
		}
		panic(http.ErrAbortHandler)
	}
}

func (x *exchange) note() error {
	r, d := x.record, x.decision
	if r.Verdict == egressv1.Verdict_VERDICT_UNSPECIFIED {
		r.Verdict, r.Reason = egressv1.Verdict_VERDICT_ALLOWED, string(policy.Allowed)
		if x.status == 0 { // the sandbox went away before there was an answer
			r.Verdict, r.Reason = egressv1.Verdict_VERDICT_FAILED, string(policy.Unreachable)
		}
	}
	if x.req.Name != "" {
		r.Authority = string(x.req.Name)
	}
	if x.req.Path != "" {
		r.Path = x.req.Path
	}
	if x.socket {
		r.Protocol = "websocket"
	}
	r.Port, r.Rule, r.Layer, r.PolicyGeneration = uint32(x.req.Port), d.Rule, d.Layer, d.Generation
	r.Reported, r.Status = d.Reported, uint32(x.status)
	r.Address, _ = x.address.Load().(string)
	r.BytesOut, r.BytesIn, r.Ended = x.out.Load(), x.in.Load(), timestamppb.New(x.e.Now())
	return x.Session.Note(r)
}

// short is a text of a client as it is recorded.
func short(s string) string {
	if len(s) > 256 {
		s = s[:256]
	}
	b := []byte(s)
	for i, c := range b {
		if c < ' ' || c >= 0x7f {
			b[i] = '?'
		}
	}
	return string(b)
}
