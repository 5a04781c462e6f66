package sdk

import (
	"context"
	"iter"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// AuditRecord is one record of the audit log.
type AuditRecord struct {
	Service string // egress, credentials or identity
	Tenant  string // empty: of none
	Session string // key; empty: of none
	ID      string // ce-id
	Time    time.Time
	// Body is egressv1.Record, credentialsv1.Audit or identityv1.Audit; nil when this version does not know it.
	Body proto.Message
	Raw  []byte
}

// AuditFilter selects records. The zero value selects all from now on.
type AuditFilter struct {
	Service string
	Tenant  string
	Session string // key
	// Since also yields the stored records of so long ago.
	Since time.Duration
	// Stop ends after the stored records of Since.
	Stop bool
}

// Audit yields records of the audit log in the order of the bus until ctx ends or the loop is left
// (operators only). Nothing is lost while the connection is down.
//
// Errors: ErrInvalid, ErrDenied.
func (c *Client) Audit(ctx context.Context, f AuditFilter) (iter.Seq2[AuditRecord, error], error) {
	const op = "read the audit log"
	for _, tok := range []string{f.Service, f.Tenant, f.Session} {
		if tok != "" && !ids.IsToken(tok) {
			return nil, invalid(op, "%q is no service, tenant or session key", tok)
		}
	}
	subject := subjects.Prefix + "audit." + or(f.Service, "*") + "." + or(f.Tenant, "*") + "." + or(f.Session, "*")
	msgs, err := c.storedMessages(ctx, op, selection{stream: auditStream, subject: subject, since: f.Since, stop: f.Stop})
	if err != nil {
		return nil, err
	}
	return func(yield func(AuditRecord, error) bool) {
		for msg, err := range msgs {
			if err != nil {
				yield(AuditRecord{}, err)
				return
			}
			if r, ok := auditOf(msg.Subject(), msg.Headers(), msg.Data()); ok && !yield(r, nil) {
				return
			}
		}
	}, nil
}

const auditStream = "BERTH_AUDIT"

// auditOf reads a message of the stream BERTH_AUDIT.
func auditOf(subject string, h nats.Header, data []byte) (AuditRecord, bool) {
	s, err := subjects.ParseAudit(subject)
	if err != nil {
		return AuditRecord{}, false
	}
	r := AuditRecord{Service: s.Service, Tenant: string(s.Tenant), Session: string(s.Session), ID: h.Get("ce-id"), Raw: data}
	if t, err := time.Parse(time.RFC3339Nano, h.Get("ce-time")); err == nil {
		r.Time = t
	}
	body := map[string]proto.Message{"egress": &egressv1.Record{}, "credentials": &credentialsv1.Audit{}, "identity": &identityv1.Audit{}}[s.Service]
	if body != nil && decode(&nats.Msg{Header: h, Data: data}, body) == nil {
		r.Body = body
	}
	return r, true
}

// selection of stored messages.
type selection struct {
	stream, subject string
	since           time.Duration
	stop            bool
}

// storedMessages reads a stream itself through an ordered consumer.
func (c *Client) storedMessages(ctx context.Context, op string, s selection) (iter.Seq2[jetstream.Msg, error], error) {
	js, err := jetstream.New(c.nc)
	if err != nil {
		return nil, wrap(op, err)
	}
	start := time.Now().Add(-s.since)
	in, done := c.whileLetIn(ctx)
	read := false // by the caller, who ends the watch
	defer func() {
		if !read {
			done()
		}
	}()
	cons, err := js.OrderedConsumer(in, s.stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{s.subject}, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &start})
	if err != nil {
		return nil, wrap(op, causeOf(in, err))
	}
	info, err := cons.Info(in)
	if err != nil {
		return nil, wrap(op, causeOf(in, err))
	}
	if s.stop && info.NumPending == 0 && info.Delivered.Consumer == 0 {
		return func(func(jetstream.Msg, error) bool) {}, nil
	}
	it, err := cons.Messages()
	if err != nil {
		return nil, wrap(op, err)
	}
	read = true
	return func(yield func(jetstream.Msg, error) bool) {
		defer done()
		defer it.Stop()
		for {
			msg, err := it.Next(jetstream.NextContext(in))
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				yield(nil, wrap(op, causeOf(in, err)))
				return
			}
			if !yield(msg, nil) {
				return
			}
			if meta, err := msg.Metadata(); s.stop && err == nil && meta.NumPending == 0 {
				return
			}
		}
	}, nil
}
