package web

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// upload is the body of a request on its way out: counted, and searched for placeholders.
type upload struct {
	x    *exchange
	body io.ReadCloser
	scan *bodyScan
	out  http.Header // trailers as they go out
	size int64
	// whole: all of it came.
	whole atomic.Bool
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	n, err := u.body.Read(p)
	u.size += int64(n)
	if errors.Is(err, io.EOF) || u.size == u.x.r.ContentLength {
		u.whole.Store(true)
	}
	if n > 0 {
		no := u.x.count(n, 0)
		if no == nil && u.scan.hit(p[:n]) {
			no = refuse(policy.Placeholder, "")
		}
		if no != nil {
			u.x.body.CompareAndSwap(nil, no)
			return 0, no
		}
	}
	if errors.Is(err, io.EOF) {
		if no := u.trailers(); no != nil {
			u.x.body.CompareAndSwap(nil, no)
			return 0, no
		}
	}
	return n, err
}

// trailers fills in those that were announced.
func (u *upload) trailers() *session.Refusal {
	for name := range u.out {
		vs := u.x.r.Trailer[name]
		for _, v := range vs {
			if b, _ := basic(v); holds(v, u.scan.marks) || holds(b, u.scan.marks) {
				return refuse(policy.Placeholder, "")
			}
		}
		u.out[name] = vs
	}
	return nil
}

// Close implements io.Closer.
func (u *upload) Close() error { return u.body.Close() }

func (x *exchange) outgoing() (*http.Request, *session.Refusal) {
	u, no := x.url()
	if no != nil {
		return nil, no
	}
	r := &http.Request{Method: x.r.Method, URL: u, Host: x.hostField(), Header: x.header, ProtoMajor: 1, ProtoMinor: 1}
	for name := range x.r.Trailer {
		if checkTrailer(name) != nil {
			return nil, refuse(policy.Malformed, "The request has a trailer that may be none.")
		}
		if r.Trailer == nil {
			r.Trailer = http.Header{}
		}
		r.Trailer[name] = nil
	}
	if x.r.ContentLength != 0 && x.r.Body != nil {
		scan := &bodyScan{marks: x.marks()}
		for _, p := range x.places {
			scan.own = append(scan.own, p.Placeholder)
		}
		r.ContentLength = x.r.ContentLength
		x.upload = &upload{x: x, body: x.r.Body, scan: scan, out: r.Trailer}
		r.Body = x.upload
	}
	ctx := httptrace.WithClientTrace(x.ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		x.address.Store(addressOf(i.Conn))
	}})
	return r.WithContext(ctx), nil
}

// roundTrip sends the request and waits for the head of the answer.
func (x *exchange) roundTrip() (*http.Response, *session.Refusal) {
	r, no := x.outgoing()
	if no != nil {
		return nil, no
	}
	t, err := x.pool.transport(x.ALPN == "h2", x.decision.Addresses)
	if err != nil {
		return nil, refuse(policy.NoLease, "")
	}
	resp, err := t.RoundTrip(r)
	if err == nil {
		return resp, nil
	}
	if no := x.bodyRefusal(); no != nil {
		return nil, no
	}
	if x.ctx.Err() != nil { // nobody waits for an answer
		panic(http.ErrAbortHandler)
	}
	return nil, x.failed(err)
}

// bodyRefusal is why the body of the request did not go on.
func (x *exchange) bodyRefusal() *session.Refusal {
	if no := x.body.Load(); no != nil {
		return no
	}
	if x.strict != nil {
		if err := x.strict.bodyBroken(); err != nil {
			return refuse(policy.Malformed, sentence(err))
		}
	}
	return nil
}

// failed tells what went wrong upstream. The error itself is not told: it can quote the host.
func (x *exchange) failed(err error) *session.Refusal {
	var no *session.Refusal
	var cert *tls.CertificateVerificationError
	var unknown x509.UnknownAuthorityError
	var wrong x509.HostnameError
	var timeout net.Error
	switch {
	case errors.As(err, &no):
		return no
	case errors.As(err, &cert), errors.As(err, &unknown), errors.As(err, &wrong):
		return refuse(policy.Certificate, "")
	case errors.As(err, &timeout) && timeout.Timeout():
		return refuse(policy.Unreachable, "The host does not answer in time.")
	}
	return refuse(policy.Unreachable, "The host does not answer in HTTP, or ended the connection.")
}

// answer passes the answer on.
func (x *exchange) answer(resp *http.Response) *session.Refusal {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		if !x.socket {
			return refuse(policy.Upgrade, "The host changed the protocol and was not asked to.")
		}
		return x.websocket(resp)
	}
	if x.scrub != nil {
		if no := x.readable(resp); no != nil {
			return no
		}
	}
	h := endToEnd(resp.Header)
	h.Del("Alt-Svc")      // HTTP/3 leads nowhere
	h.Del("Berth-Denied") // the gate's own word
	if no := x.scrubHeader(h); no != nil {
		return no
	}
	if no := x.count(0, headSize(h)); no != nil {
		return no
	}
	for name := range resp.Trailer { // it is told with the head
		if x.scrub != nil && x.scrub.inName(name) {
			return refuse(policy.Echo, "")
		}
	}
	to := x.w.Header()
	for k, vs := range h {
		to[k] = vs
	}
	if _, ok := to["Content-Type"]; !ok {
		to["Content-Type"] = nil // net/http would guess
	}
	if resp.ContentLength >= 0 || x.r.Method == http.MethodHead {
		if vs := resp.Header["Content-Length"]; len(vs) == 1 {
			to["Content-Length"] = vs
		}
	}
	for name := range resp.Trailer {
		to.Add("Trailer", name)
	}
	if x.early() || x.raw {
		to.Set("Connection", "close")
	}
	x.status = resp.StatusCode
	x.w.WriteHeader(resp.StatusCode)
	// Where nothing follows, the head is the end of it, which gRPC needs.
	if no := x.download(resp.Body, resp.ContentLength != 0 && x.r.Method != http.MethodHead); no != nil {
		return no
	}
	return x.answerTrailers(resp.Trailer)
}

// early reports whether the answer begins before the body of a request of HTTP/1 has ended. Both then go on
// at once, and the connection ends after them.
func (x *exchange) early() bool {
	if x.strict == nil || x.upload == nil {
		return false
	}
	if !x.upload.whole.Load() {
		_ = http.NewResponseController(x.w).EnableFullDuplex()
		return true
	}
	_, _ = x.r.Body.Read(make([]byte, 1)) // net/http has to see the end
	return false
}

func (x *exchange) answerTrailers(trailer http.Header) *session.Refusal {
	t := trailer.Clone()
	if no := x.scrubHeader(t); no != nil {
		return no
	}
	for k, vs := range t {
		if len(vs) == 0 { // announced and never sent; net/http would wait for it
			continue
		}
		x.w.Header()[http.TrailerPrefix+k] = vs
	}
	return nil
}

// scrubHeader masks secrets in fields. A name of a field cannot be masked.
func (x *exchange) scrubHeader(h http.Header) *session.Refusal {
	if x.scrub == nil {
		return nil
	}
	for k, vs := range h {
		if x.scrub.inName(k) {
			return refuse(policy.Echo, "")
		}
		for i, v := range vs {
			vs[i], _ = x.scrub.text(v)
		}
		if joined := strings.Join(vs, ""); len(vs) > 1 {
			if _, hit := x.scrub.text(joined); hit {
				return refuse(policy.Echo, "")
			}
		}
	}
	return nil
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// download copies the body of an answer as it comes; more: there is one, and its head does not wait for it.
func (x *exchange) download(body io.Reader, more bool) *session.Refusal {
	in := buffers.Get().(*[]byte)
	defer buffers.Put(in)
	var s *scrubStream
	var scrubbed []byte
	if x.scrub != nil {
		s = &scrubStream{scrubber: x.scrub}
	}
	flush := http.NewResponseController(x.w).Flush
	if more {
		_ = flush()
	}
	for {
		n, err := body.Read(*in)
		out := (*in)[:n]
		if n > 0 {
			if no := x.count(0, n); no != nil {
				return no
			}
		}
		if s != nil {
			scrubbed = s.feed(out, scrubbed[:0])
			out = scrubbed
			if err != nil && len(s.seen) > s.gone {
				out = append(out, s.rest(nil)...)
			}
		}
		if len(out) > 0 {
			if _, err := x.w.Write(out); err != nil {
				panic(http.ErrAbortHandler)
			}
			if err == nil {
				_ = flush()
			}
		}
		if err != nil {
			return x.ended(err)
		}
	}
}

// ended tells what the end of an answer's body means.
func (x *exchange) ended(err error) *session.Refusal {
	if errors.Is(err, io.EOF) {
		return nil
	}
	if no := x.bodyRefusal(); no != nil {
		return no
	}
	x.record.Verdict, x.record.Reason = egressv1.Verdict_VERDICT_FAILED, string(policy.Unreachable)
	panic(http.ErrAbortHandler)
}
