package bus

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Headers of a dead message; its other headers and its body are the original's.
const (
	DeadReason     = "Berth-Dead-Reason"
	DeadConsumer   = "Berth-Dead-Consumer"
	DeadSubject    = "Berth-Dead-Subject"
	DeadStream     = "Berth-Dead-Stream"
	DeadSeq        = "Berth-Dead-Seq"
	DeadDeliveries = "Berth-Dead-Deliveries"
	DeadStored     = "Berth-Dead-Stored" // when the original was stored
)

const deadStream = "BERTH_DEAD"

// DeadLetter is one message of BERTH_DEAD.
type DeadLetter struct {
	Sequence   uint64      `json:"sequence"` // in BERTH_DEAD
	Service    string      `json:"service"`
	Consumer   string      `json:"consumer"`
	Reason     string      `json:"reason"`
	Stream     string      `json:"stream"` // of the original, as are those below
	Subject    string      `json:"subject"`
	StreamSeq  uint64      `json:"stream_sequence"`
	Deliveries int         `json:"deliveries"`
	Stored     time.Time   `json:"stored"`
	Died       time.Time   `json:"died"`
	Header     nats.Header `json:"header"`
	Body       []byte      `json:"body"`
}

// bury copies a message to BERTH_DEAD and only then ends it. While the copy
// fails the message stays where it is.
func (k *Consumer) bury(ctx context.Context, m *Msg, reason string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ackTimeout)
	defer cancel()
	if _, err := k.conn.js.PublishMsg(ctx, k.deadMsg(m, reason)); err != nil {
		k.log.Error("cannot copy a message to "+deadStream+"; it stays", "subject", m.Subject, "reason", reason, "error", err)
		k.nak(m, k.spec.Backoff[len(k.spec.Backoff)-1])
		return
	}
	recordDead(ctx, k.spec.Durable)
	k.log.Warn("message went to "+deadStream, "subject", m.Subject, "sequence", m.Sequence, "reason", reason)
	if _, err := k.conn.nc.RequestWithContext(ctx, m.ack, []byte("+TERM "+headerText(reason, 256))); err != nil {
		k.log.Warn("end of a dead message not confirmed", "subject", m.Subject, "error", err)
	}
}

func (k *Consumer) deadMsg(m *Msg, reason string) *nats.Msg {
	h := nats.Header{
		// once per original, also if a crash comes between copy and end
		jetstream.MsgIDHeader: {fmt.Sprintf("dead-%s-%d-%s", m.Stream, m.Sequence, k.spec.Durable)},
	}
	for key, v := range m.Header {
		if !strings.HasPrefix(key, "Nats-") { // they would command the server again
			h[key] = v
		}
	}
	set := func(key, v string) { h[key] = []string{v} }
	set(DeadReason, headerText(reason, 1024))
	set(DeadConsumer, k.spec.Durable)
	set(DeadSubject, m.Subject)
	set(DeadStream, m.Stream)
	set(DeadSeq, strconv.FormatUint(m.Sequence, 10))
	set(DeadDeliveries, strconv.Itoa(m.Deliveries))
	set(DeadStored, m.Stored.UTC().Format(time.RFC3339Nano))
	return &nats.Msg{Subject: subjects.Dead(k.conn.self.Service), Header: h, Data: m.Data}
}

// headerText keeps a header value on one line and bounded.
func headerText(s string, limit int) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "")
	}
	return s
}

type retryRequest struct {
	Sequence uint64 `json:"sequence"`
}

// HandleRetry serves the method "retry": it handles a dead message again with
// the handler of the consumer that gave it up, and removes it from BERTH_DEAD
// if that goes well.
func (s *Service) HandleRetry(consumers ...*Consumer) error {
	s.mu.Lock()
	for _, k := range consumers {
		s.retries[k.spec.Durable] = k
	}
	s.mu.Unlock()
	return s.HandleRaw("retry", s.retry)
}

func (s *Service) retry(ctx context.Context, _ Request, body []byte) ([]byte, error) {
	var req retryRequest
	if err := json.Unmarshal(body, &req); err != nil || req.Sequence == 0 {
		return nil, errs.E("retry", errkind.Invalid, "", `the body must be JSON {"sequence": <sequence in BERTH_DEAD>}`)
	}
	d, err := s.conn.ShowDead(ctx, req.Sequence)
	if err != nil {
		return nil, err
	}
	id := strconv.FormatUint(req.Sequence, 10)
	if d.Service != s.conn.self.Service {
		return nil, errs.E("retry", errkind.Denied, id, "the dead message belongs to "+d.Service)
	}
	s.mu.Lock()
	k := s.retries[d.Consumer]
	s.mu.Unlock()
	if k == nil {
		return nil, errs.E("retry", errkind.NotFound, id, fmt.Sprintf("consumer %q does not run here", d.Consumer))
	}
	m := &Msg{Subject: d.Subject, Header: d.Header, Data: d.Body, Stream: d.Stream,
		Sequence: d.StreamSeq, Deliveries: d.Deliveries + 1, Stored: d.Stored, Retried: true}
	if err := k.handle(ctx, m); err != nil && errs.Kind(err).Disposition() != errkind.Ack {
		return nil, errs.Wrap("retry", id, err)
	}
	if err := s.conn.deleteMsg(ctx, deadStream, req.Sequence, false); err != nil {
		return nil, errs.Wrap("retry: handled, but cannot remove it from "+deadStream, id, err)
	}
	return []byte(`{"ok":true}`), nil
}

// RetryDead has the owning service handle a dead message again. For operators.
func (c *Conn) RetryDead(ctx context.Context, seq uint64) error {
	d, err := c.ShowDead(ctx, seq)
	if err != nil {
		return err
	}
	body, err := json.Marshal(retryRequest{seq})
	if err != nil {
		return err
	}
	_, err = c.CallRaw(ctx, subjects.RPC(d.Service, "retry", c.self), body, JSON)
	return err
}

// ShowDead reads one dead message.
func (c *Conn) ShowDead(ctx context.Context, seq uint64) (DeadLetter, error) {
	return c.getDead(ctx, map[string]any{"seq": seq})
}

// ListDead reads up to limit dead messages of a service (empty: of all),
// oldest first.
func (c *Conn) ListDead(ctx context.Context, service string, limit int) ([]DeadLetter, error) {
	filter := subjects.Prefix + "dead.*"
	if service != "" {
		filter = subjects.Dead(service)
	}
	var out []DeadLetter
	for next := uint64(1); len(out) < limit; next = out[len(out)-1].Sequence + 1 {
		d, err := c.getDead(ctx, map[string]any{"seq": next, "next_by_subj": filter})
		if errs.Is(err, errkind.NotFound) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, d)
	}
	return out, nil
}

func (c *Conn) getDead(ctx context.Context, req map[string]any) (DeadLetter, error) {
	var resp struct {
		Message struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := c.api(ctx, "STREAM.MSG.GET."+deadStream, req, &resp); err != nil {
		return DeadLetter{}, errs.Wrap("read dead message", fmt.Sprint(req["seq"]), err)
	}
	m := resp.Message
	h := nats.Header{}
	if len(m.Header) > 0 {
		var err error
		if h, err = nats.DecodeHeadersMsg(m.Header); err != nil {
			return DeadLetter{}, errs.E("read dead message", errkind.DataLoss, strconv.FormatUint(m.Seq, 10), err)
		}
	}
	service, err := subjects.ParseDead(m.Subject)
	if err != nil {
		return DeadLetter{}, errs.E("read dead message", errkind.DataLoss, strconv.FormatUint(m.Seq, 10), err)
	}
	d := DeadLetter{Sequence: m.Seq, Service: service, Died: m.Time, Body: m.Data, Header: nats.Header{},
		Reason: h.Get(DeadReason), Consumer: h.Get(DeadConsumer), Subject: h.Get(DeadSubject), Stream: h.Get(DeadStream)}
	d.StreamSeq, _ = strconv.ParseUint(h.Get(DeadSeq), 10, 64)
	d.Deliveries, _ = strconv.Atoi(h.Get(DeadDeliveries))
	d.Stored, _ = time.Parse(time.RFC3339Nano, h.Get(DeadStored))
	for k, v := range h {
		if !strings.HasPrefix(k, "Berth-Dead-") && !strings.HasPrefix(k, "Nats-") {
			d.Header[k] = v
		}
	}
	return d, nil
}
