package identity

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/envelope"
)

// keys answers with the curve key that requests are sealed to; a body is
// ignored.
func (s *service) keys(_ context.Context, r bus.Request, _ []byte) ([]byte, error) {
	return bus.Encode(&identityv1.KeysReply{CurveKey: s.curve[0].Public()}, r.ContentType)
}

// direct is the direct door. Refusals are sealed answers, not errors of the
// bus, because they tell about the user.
func (s *service) direct(ctx context.Context, r bus.Request, body []byte) ([]byte, error) {
	asked := core.Asked{Door: core.Direct, Tenant: r.Caller.Tenant, Frontend: r.Caller.Frontend, Verb: r.Method, StoredAt: time.Now()}
	out := s.handle(ctx, asked, message{body: body, contentType: r.ContentType})
	return bus.Encode(out.reply, contentType(r.ContentType))
}

// contentType is how an answer is encoded: as the request was, and protobuf
// where that makes no sense.
func contentType(of string) string {
	if asJSON, err := envelope.IsJSON(of); err == nil && asJSON {
		return bus.JSON
	}
	return bus.Protobuf
}

// stored is the durable door. nil acknowledges: the outcome is committed or
// final, and was answered. An error has the message handled again.
func (s *service) stored(ctx context.Context, m *bus.Msg, most int) error {
	on, err := subjects.ParseRequest(m.Subject)
	if err != nil {
		return errs.E("take request", errkind.Invalid, "", err)
	}
	asked := core.Asked{Door: core.Durable, Tenant: on.Tenant, Frontend: on.Frontend, Verb: on.Verb, StoredAt: m.Stored}
	replyTo := m.Header.Get(bus.HeaderReply)
	if replyTo != "" && !on.Caller().InInbox(replyTo) {
		s.reject(ctx, asked, &core.Refusal{Kind: errkind.Denied, Reason: "the reply subject is outside of the frontend's own inbox; the answer was not sent"})
		replyTo = ""
	}
	ct := contentTypeOf(m)
	out := s.handle(ctx, asked, message{body: m.Data, contentType: ct})
	again := out.err != nil && kindOf(out.err).Disposition() == errkind.Nak && (out.deadline.IsZero() || time.Now().Before(out.deadline))
	if again && m.Deliveries < most && !m.Retried {
		return errs.E("handle request", kindOf(out.err), "", out.err)
	}
	if err := s.answer(ctx, replyTo, out.reply, ct); err != nil {
		return err
	}
	if again {
		// The last time: to BERTH_DEAD, where an operator can retry it.
		return errs.E("handle request", kindOf(out.err), "", out.err)
	}
	return nil
}

func contentTypeOf(m *bus.Msg) string {
	for _, h := range []string{bus.HeaderContentType, "ce-datacontenttype"} {
		if v := m.Header.Get(h); v != "" {
			return v
		}
	}
	return ""
}

// answer publishes an answer of the durable door. Whoever asked may be gone,
// so nobody waits for it to arrive.
func (s *service) answer(ctx context.Context, to string, reply *identityv1.SealedReply, ct string) error {
	if to == "" || ctx.Err() != nil {
		return ctx.Err()
	}
	ct = contentType(ct)
	body, err := bus.Encode(reply, ct)
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: to, Data: body, Header: nats.Header{bus.HeaderContentType: {ct}}}
	if err := s.conn.NATS().PublishMsg(msg); err != nil {
		return errs.E("answer request", errkind.Unavailable, "", err)
	}
	return nil
}
