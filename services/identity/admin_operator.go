package identity

import (
	"context"
	"crypto/sha256"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/envelope"
)

// operatorAttach is the door of operators. The bus proves who asks, by the
// subject that only an operator's login may publish on; what is asked, and the
// grant in the answer, cross it sealed.
func (s *service) operatorAttach(ctx context.Context, _ bus.Request, q *identityv1.OperatorAttachRequest) (*identityv1.OperatorAttachReply, error) {
	const op = "operator attach"
	asked := core.Asked{Door: core.Console, Frontend: core.RoleOperator, Verb: core.OperatorAttach, StoredAt: time.Now()}
	in, err := s.unsealAttach(q)
	if err != nil {
		s.reject(ctx, asked, err)
		return nil, errs.E(op, kindOf(err), "", reasonOf(err))
	}
	if t, err := ids.ParseTenant(in.GetAsk().GetTenant()); err == nil {
		asked.Tenant = t
	}
	body, err := proto.Marshal(in.GetAsk())
	if err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	sum := sha256.Sum256(body)
	asked.Body.AdminAttach = in.GetAsk()
	asked.Envelope = &identityv1.Envelope{RequestId: in.GetRequestId(), Verb: core.OperatorAttach, Body: body, BodyHash: sum[:], Time: in.GetTime(),
		ReplyKey: in.GetReplyKey(), ProofKey: in.GetProofKey()}
	v := s.view()
	x := &exchange{service: s, view: v, state: core.State{Policy: s.policy(v)}, started: time.Now(), reply: &identityv1.Reply{RequestId: in.GetRequestId()}}
	if err := x.run(ctx, asked); err != nil {
		x.reply.Outcome = &identityv1.Reply_Failure{Failure: s.failure(err)}
	}
	sealed, err := s.sealReply(in.GetReplyKey(), x.reply, false)
	if err != nil {
		return nil, err
	}
	return &identityv1.OperatorAttachReply{Sealed: sealed.GetSealed()}, nil
}

// unsealAttach opens a request; no error of it quotes what came in.
func (s *service) unsealAttach(q *identityv1.OperatorAttachRequest) (*identityv1.OperatorAttach, error) {
	if len(q.GetSealed()) > envelope.MaxRequest {
		return nil, &core.Refusal{Kind: errkind.TooLarge, Reason: "the request is too large"}
	}
	plain, err := s.openEnvelope(q.GetSealed())
	if err != nil {
		return nil, err
	}
	in, err := envelope.OperatorAttach(plain)
	if err != nil {
		return nil, err
	}
	if _, err := seal.ParsePublic(in.GetReplyKey()); err != nil {
		return nil, &core.Refusal{Kind: errkind.Invalid, Reason: "the reply key in the request is no public curve key"}
	}
	return in, nil
}
