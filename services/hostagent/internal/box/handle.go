package box

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

// call is one opening that was found good.
type call struct {
	box      *Box
	reply    string // where the answer goes
	replyKey string
	deliver  string
	credit   uint32
	claims   grant.Claims
	answered bool
	counted  bool // still among the openings under way
}

// handle runs one opening to the end of its stream.
func (b *Box) handle(m *nats.Msg) {
	ctx, span := obs.Start(obs.Extract(b.ctx, m.Header), "box.open", trace.WithSpanKind(trace.SpanKindServer))
	c, op, err := b.verify(ctx, m)
	if err != nil {
		b.openings.Add(-1)
		obs.End(span, err)
		return
	}
	c.counted = true
	span.SetAttributes(attribute.String("berth.op", opName(op)))
	began := time.Now()
	err = b.run(ctx, c, op)
	b.srv.cfg.Ended(opName(op), time.Since(began), err)
	c.settled()
	if err != nil && !c.answered {
		err = errors.Join(err, b.answer(c.reply, c.replyKey, &boxv1.OpenReply{Failure: failure(err)}))
	}
	obs.End(span, err)
}

// settled takes the call from the openings under way: its answer is out.
func (c *call) settled() {
	if c.counted {
		c.counted = false
		c.box.openings.Add(-1)
	}
}

// verify opens the seal and checks grant, proof, age and nonce. What is wrong is answered here:
// sealed once the reply key is known, else in the clear.
func (b *Box) verify(ctx context.Context, m *nats.Msg) (*call, *boxv1.Operation, error) {
	req, err := decodeRequest(m.Data)
	if err != nil {
		b.refuse(m.Reply, err)
		return nil, nil, err
	}
	plain, err := b.srv.key.OpenEnvelope(req.GetSealed())
	if err != nil {
		err = errs.E(opOpen, errkind.Unauthenticated, "", "the opening is not sealed to this host")
		b.refuse(m.Reply, err)
		return nil, nil, err
	}
	o, err := decodeOpening(plain)
	if err != nil {
		b.refuse(m.Reply, err)
		return nil, nil, err
	}
	op, claims, err := b.believe(ctx, m, o)
	if err != nil {
		if aerr := b.answer(m.Reply, o.GetReplyKey(), &boxv1.OpenReply{Failure: failure(err)}); aerr != nil {
			b.refuse(m.Reply, err)
		}
		return nil, nil, err
	}
	return &call{box: b, reply: m.Reply, replyKey: o.GetReplyKey(), deliver: o.GetDeliver(), credit: o.GetCredit(), claims: claims}, op, nil
}

// believe checks what the client claims: its grant, proof and nonce, where the answer goes, and that the
// grant is good for the operation.
func (b *Box) believe(ctx context.Context, m *nats.Msg, o *boxv1.Opening) (*boxv1.Operation, grant.Claims, error) {
	none := grant.Claims{}
	op, err := decodeOperation(o.GetOperation())
	if err != nil {
		return nil, none, err
	}
	v, err := b.srv.cfg.Grants.For(ctx, o.GetGrant())
	if err != nil {
		return nil, none, err
	}
	claims, err := b.seen.open(v, input(o, m.Subject), o.GetProof(), b)
	if err != nil {
		return nil, none, err
	}
	if _, err := client(claims, o.GetDeliver(), m.Reply); err != nil {
		return nil, none, err
	}
	if err := claims.Covers(op); err != nil {
		return nil, none, err
	}
	b.holders.hold(claims)
	return op, claims, nil
}

// run admits the work and runs the operation. An error that was not answered yet is the answer.
func (b *Box) run(ctx context.Context, c *call, op *boxv1.Operation) error {
	if op.GetPresent() != nil { // its grant was noted already, and showing it is no work
		c.answered = true
		return b.answer(c.reply, c.replyKey, &boxv1.OpenReply{Result: &boxv1.Result{}})
	}
	done, err := b.gate.Admit(ctx)
	if err != nil {
		return err
	}
	if w := op.GetWatch(); w != nil {
		done() // watching is no work: it does not keep the session awake
		return b.watchFiles(ctx, c, w)
	}
	defer done()
	switch o := op.GetOp().(type) {
	case *boxv1.Operation_Exec:
		return b.exec(ctx, c, o.Exec)
	case *boxv1.Operation_ExecAttach:
		return b.attach(ctx, c, o.ExecAttach)
	case *boxv1.Operation_ReadFile:
		return b.readFile(ctx, c, o.ReadFile)
	case *boxv1.Operation_WriteFile:
		return b.writeFile(ctx, c, o.WriteFile)
	case *boxv1.Operation_Export:
		return b.export(ctx, c)
	case *boxv1.Operation_Import:
		return b.importFiles(ctx, c, o.Import)
	case *boxv1.Operation_Checkpoint:
		return b.checkpoint(ctx, c, o.Checkpoint.GetKey())
	}
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	result, err := b.short(ctx, op)
	if err != nil {
		return err
	}
	c.answered = true
	return b.answer(c.reply, c.replyKey, &boxv1.OpenReply{Result: result})
}

// begin answers the opening with a new stream. window is what the client may send at once.
func (b *Box) begin(ctx context.Context, c *call, window uint32, result *boxv1.Result) (*stream, error) {
	st := newStream(ctx, ids.NewStreamID(), c.deliver, c.credit, window)
	st.publish, st.claims = b.srv.cfg.Bus.Publish, c.claims
	b.mu.Lock()
	switch {
	case b.closed:
		b.mu.Unlock()
		return nil, context.Cause(b.ctx)
	case len(b.streams) >= maxStreams:
		b.mu.Unlock()
		return nil, errs.Errorf(opOpen, errkind.Exhausted, "the session has %d open streams, more are not allowed", maxStreams)
	}
	b.streams[st.id] = st
	b.mu.Unlock()
	b.srv.open.Add(1)
	if err := b.revoked(c.claims); err != nil {
		b.end(st, nil)
		return nil, err
	}
	c.answered = true
	c.settled()
	reply := &boxv1.OpenReply{Stream: st.id.String(), Credit: window, Result: result}
	err := b.answer(c.reply, c.replyKey, reply)
	if err != nil {
		b.end(st, err)
		return nil, err
	}
	return st, nil
}

// end forgets a stream. If it has not said its last frame, err is it.
func (b *Box) end(st *stream, err error) {
	if err != nil && !errors.Is(err, errCancelled) && !errors.Is(err, errGone) {
		st.fail(err)
	}
	st.mute(errCancelled)
	b.mu.Lock()
	delete(b.streams, st.id)
	b.mu.Unlock()
	b.srv.open.Add(-1)
}

func opName(op *boxv1.Operation) string {
	switch op.GetOp().(type) {
	case *boxv1.Operation_Exec:
		return "exec"
	case *boxv1.Operation_ExecAttach:
		return "exec_attach"
	case *boxv1.Operation_ReadFile:
		return "read_file"
	case *boxv1.Operation_WriteFile:
		return "write_file"
	case *boxv1.Operation_Export:
		return "export"
	case *boxv1.Operation_Import:
		return "import"
	case *boxv1.Operation_Watch:
		return "watch"
	case *boxv1.Operation_Checkpoint:
		return "checkpoint"
	case *boxv1.Operation_Present:
		return "present"
	}
	return "call"
}
