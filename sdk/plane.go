package sdk

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/seal"
)

// opening is one attempt to start a stream.
type opening struct {
	raw     []byte // sealed, encoded
	subject string
}

// sign makes a signed and sealed opening for op.
func (s *Session) sign(op *boxv1.Operation, access access, deliver string) (opening, error) {
	var o opening
	raw, err := proto.Marshal(op)
	if err != nil {
		return o, err
	}
	pub := s.replyKey.Public()
	nonce := make([]byte, grant.NonceBytes)
	if _, err := rand.Read(nonce); err != nil {
		return o, err
	}
	o.subject = access.subject + ".open"
	claim := grant.Opening{Subject: o.subject, Nonce: nonce, Time: time.Now(), Operation: raw,
		Deliver: deliver, ReplyKey: pub, Grant: access.grant}
	sealed, sender, err := sealTo(s.sender, &boxv1.Opening{
		Grant: access.grant, Proof: claim.Sign(s.proof), Nonce: nonce, Time: timestamppb.New(claim.Time),
		Operation: raw, Deliver: deliver, ReplyKey: pub, Credit: window,
	}, access.hostKey)
	if err != nil {
		return o, err
	}
	o.raw, err = proto.Marshal(&boxv1.OpenRequest{Sealed: sealed, Sender: sender})
	return o, err
}

// open starts a stream, or gets the result of a short operation (then the
// stream is nil). repeatable says that the operation may be sent again after
// a time-out, or a connection that was lost under way, without harm.
func (s *Session) open(ctx context.Context, name string, op *boxv1.Operation, repeatable bool) (*stream, *boxv1.Result, error) {
	if err := s.alive(); err != nil {
		return nil, nil, wrap(name, err)
	}
	ctx, span := s.c.span(ctx, "berth box "+name)
	defer span.End()
	started := time.Now()
	renewed := false
	for n := 0; ; n++ {
		st, res, err := s.knock(ctx, op)
		if err == nil {
			return st, res, nil
		}
		switch kind := KindOf(wrap("", err)); {
		case ctx.Err() != nil:
			return nil, nil, wrap(name, causeOf(ctx, err))
		case kind == errkind.Expired && !renewed || kind == errkind.Unauthenticated && !renewed && s.stale():
			renewed = true
			if rerr := s.renew(ctx); rerr != nil {
				return nil, nil, wrap(name, rerr)
			}
			continue
		case errors.Is(err, nats.ErrNoResponders):
			if n == 0 || n == 4 {
				if gone := s.gone(ctx); gone != nil {
					return nil, nil, wrap(name, gone)
				}
			}
		case kind == errkind.Unavailable && isAnswer(err):
		case (kind == errkind.Deadline || errors.Is(err, nats.ErrDisconnected)) && !isAnswer(err) && repeatable:
			// no answer came, or the connection went before one could
		default:
			return nil, nil, wrap(name, err)
		}
		if time.Since(started) > s.c.cfg.Timeout {
			return nil, nil, wrap(name, err)
		}
		if perr := pause(ctx, n); perr != nil {
			return nil, nil, wrap(name, perr)
		}
	}
}

// isAnswer reports whether err was said by the host and not by this side.
func isAnswer(err error) bool {
	e := (*Error)(nil)
	return errors.As(err, &e) && e.Cause == nil
}

// knock makes one attempt.
func (s *Session) knock(ctx context.Context, op *boxv1.Operation) (st *stream, res *boxv1.Result, err error) {
	deliver, access := newDeliver(s.c), s.access()
	o, err := s.sign(op, access, deliver)
	if err != nil {
		return nil, nil, err
	}
	st = newStream(s.c)
	st.leave = s.attend(access.epoch, st.finish)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	over := st.ctx
	defer context.AfterFunc(over, func() { cancel(context.Cause(over)) })()
	defer func() {
		if err != nil || st.id == "" {
			st.close(nil)
			st = nil
		}
	}()
	if streams(op) {
		if err := st.listen(deliver); err != nil {
			return st, nil, err
		}
	}
	msg, err := s.c.request(ctx, o.subject, o.raw)
	if err != nil {
		return st, nil, err
	}
	reply, err := openBoxReply(msg, s.replyKey)
	if err != nil {
		return st, nil, err
	}
	if reply.GetStream() != "" {
		st.begin(access.subject+".in", reply)
	}
	return st, reply.GetResult(), nil
}

// streams reports whether the operation is answered by frames.
func streams(op *boxv1.Operation) bool {
	switch op.GetOp().(type) {
	case *boxv1.Operation_Exec, *boxv1.Operation_ExecAttach, *boxv1.Operation_ReadFile,
		*boxv1.Operation_WriteFile, *boxv1.Operation_Watch, *boxv1.Operation_Checkpoint,
		*boxv1.Operation_Export, *boxv1.Operation_Import:
		return true
	}
	return false
}

func openBoxReply(msg *nats.Msg, key *seal.Box) (*boxv1.OpenReply, error) {
	if err := headerError("", msg.Header); err != nil {
		return nil, err
	}
	s := &boxv1.SealedOpenReply{}
	if err := decode(msg, s); err != nil {
		return nil, err
	}
	if len(s.GetSealed()) == 0 {
		if f := s.GetFailure(); f != nil {
			return nil, failed("", f)
		}
		return nil, &Error{Kind: errkind.Internal, Reason: "the host's answer is empty"}
	}
	r := &boxv1.OpenReply{}
	if err := openSealed(s.GetSealed(), s.GetSender(), key.OpenEnvelope, r); err != nil {
		return nil, err
	}
	if f := r.GetFailure(); f != nil {
		return nil, failed("", f)
	}
	return r, nil
}

// short runs an operation that has one result.
func (s *Session) short(ctx context.Context, name string, op *boxv1.Operation, repeatable bool) (*boxv1.Result, error) {
	st, res, err := s.open(ctx, name, op, repeatable)
	if err != nil {
		return nil, err
	}
	if st == nil {
		return res, nil
	}
	defer st.close(nil)
	for {
		f, err := st.recv(ctx)
		if err != nil {
			st.close(&boxv1.Cancel{})
			return nil, wrap(name, err)
		}
		if r := f.GetResult(); r != nil {
			return r, nil
		}
	}
}
