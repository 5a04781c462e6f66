package identity

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/envelope"
)

// message is a request as it came.
type message struct {
	body        []byte
	contentType string
}

// outcome is what became of a request. reply is always set and says the same
// as err.
type outcome struct {
	reply    *identityv1.SealedReply
	err      error
	deadline time.Time // after it nobody waits any more; zero for none
}

// exchange is one request under way.
type exchange struct {
	*service
	view    *view // that it began with
	state   core.State
	started time.Time
	steps   []*corev1.Step
	expires time.Time // of the user's token
	opened  *lifecyclev1.OpenReply
	reply   *identityv1.Reply
}

// handle is what both doors lead to.
func (s *service) handle(ctx context.Context, asked core.Asked, m message) outcome {
	v := s.view()
	x := &exchange{service: s, view: v, state: core.State{Policy: s.policy(v)}, started: time.Now(), reply: &identityv1.Reply{}}
	env, asJSON, err := x.unseal(ctx, m)
	if err != nil {
		s.reject(ctx, asked, err)
		return outcome{reply: &identityv1.SealedReply{Failure: s.failure(err)}, err: err}
	}
	asked.Envelope = env
	if len(env.GetBody()) <= core.MaxBody { // core refuses longer ones
		var berr error
		if asked.Body, berr = envelope.Body(asked.Verb, env); berr != nil {
			asked.Body.Fault = reasonOf(berr)
		}
	}
	x.reply.RequestId = env.GetRequestId()
	if err = x.run(ctx, asked); err != nil {
		x.reply.Outcome = &identityv1.Reply_Failure{Failure: s.failure(err)}
	}
	out := outcome{err: err}
	if asked.Verb == core.Open {
		out.deadline = asked.StoredAt.Add(core.Wait(asked.Body.Open))
	}
	if out.reply, err = s.sealReply(env.GetReplyKey(), x.reply, asJSON); err != nil && out.err == nil {
		out.err = err
	}
	return out
}

// unseal opens a request with the first live curve key that fits.
func (x *exchange) unseal(ctx context.Context, m message) (*identityv1.Envelope, bool, error) {
	_, span := obs.Start(ctx, "identity.unseal")
	defer x.step("identity.unseal", time.Now())
	env, asJSON, err := x.unsealed(m)
	obs.End(span, err)
	return env, asJSON, err
}

func (x *exchange) unsealed(m message) (*identityv1.Envelope, bool, error) {
	req, err := envelope.Request(m.body, m.contentType)
	if err != nil {
		return nil, false, err
	}
	plain, err := x.openEnvelope(req.GetSealed())
	if err != nil {
		return nil, false, err
	}
	env, asJSON, err := envelope.Parse(plain)
	if err != nil {
		return nil, false, err
	}
	if _, err := seal.ParsePublic(env.GetReplyKey()); err != nil {
		return nil, false, &core.Refusal{Kind: errkind.Invalid, Reason: "the reply key in the envelope is no public curve key"}
	}
	return env, asJSON, nil
}

// openEnvelope opens with the first live curve key that fits.
func (s *service) openEnvelope(sealed []byte) ([]byte, error) {
	for _, k := range s.curve {
		if plain, err := k.OpenEnvelope(sealed); err == nil {
			return plain, nil
		}
	}
	return nil, &core.Refusal{Kind: errkind.Invalid, Reason: "the sealed envelope cannot be opened; it must be sealed to the key that identity.keys returns"}
}

// sealReply seals an answer to the key in the envelope, whoever carried it.
func (s *service) sealReply(key string, reply *identityv1.Reply, asJSON bool) (*identityv1.SealedReply, error) {
	var plain []byte
	var err error
	if asJSON {
		plain, err = protojson.Marshal(reply)
	} else {
		plain, err = proto.Marshal(reply)
	}
	if err == nil {
		var sealed []byte
		if sealed, err = s.box.Envelope(key, plain); err == nil {
			return &identityv1.SealedReply{Sealed: sealed, Sender: s.box.Public()}, nil
		}
	}
	err = errs.E("seal answer", errkind.Internal, "", err)
	return &identityv1.SealedReply{Failure: s.failure(err)}, err
}

// run decides and does until there is an outcome.
func (x *exchange) run(ctx context.Context, asked core.Asked) error {
	cmds, err := x.decide(ctx, asked)
	for err == nil && len(cmds) > 0 {
		var next []core.Command
		next, err = x.do(ctx, cmds[0])
		cmds = append(cmds[1:], next...)
	}
	return err
}

func (x *exchange) decide(ctx context.Context, ev core.Event) ([]core.Command, error) {
	next, cmds, err := core.Decide(x.state, ev, time.Now())
	x.state = next
	if err == nil {
		return cmds, nil
	}
	for _, c := range cmds {
		if a, ok := c.(core.Audit); ok {
			x.record(ctx, a.Record)
		}
	}
	return nil, err
}

func (x *exchange) do(ctx context.Context, cmd core.Command) ([]core.Command, error) {
	switch c := cmd.(type) {
	case core.Audit:
		x.admitted(ctx, c)
		x.acted(c.Record)
		return nil, nil
	case core.VerifyToken:
		return x.verify(ctx)
	case core.CallLifecycle:
		return x.callLifecycle(ctx)
	case core.Mint:
		return nil, x.mint(ctx, c.Session)
	case core.CallRenew:
		return nil, x.renew(ctx, c)
	case core.CallList:
		return nil, x.list(ctx, c.Actor)
	}
	return x.doAbout(ctx, cmd)
}

// doAbout does what is asked about frontends and other users' sessions.
func (x *exchange) doAbout(ctx context.Context, cmd core.Command) ([]core.Command, error) {
	switch c := cmd.(type) {
	case core.CallFrontends:
		return nil, x.listFrontends(ctx, c.Actor)
	case core.CallRevokeFrontend:
		return nil, x.settleFrontend(ctx, c)
	case core.ListSessions:
		return nil, x.listSessions(ctx, c)
	case core.FindSession:
		return x.findSession(ctx, c)
	case core.TellAttached:
		return nil, x.tellAttached(ctx, c.Event)
	case core.MintAttach:
		return nil, x.mintAttach(ctx, c)
	case core.CallSuspend:
		return nil, x.suspendUser(ctx, c)
	}
	return nil, errs.Errorf("handle request", errkind.Internal, "unknown command %T", cmd)
}

func (x *exchange) verify(ctx context.Context) ([]core.Command, error) {
	began := time.Now()
	vctx, span := obs.Start(ctx, "identity.verify")
	tok, err := x.view.tokens.Verify(vctx, x.state.Asked.Envelope.GetToken())
	obs.End(span, err)
	x.step("identity.verify", began)
	if err != nil {
		if errs.Is(err, errkind.Unavailable) {
			x.log.Warn("the keys of an issuer cannot be fetched", "error", err)
			return x.decide(ctx, core.TokenBad{Kind: errkind.Unavailable, Reason: "the issuer of the token cannot be reached now; try again"})
		}
		return x.decide(ctx, core.TokenBad{Kind: errs.Kind(err), Reason: reasonOf(err)})
	}
	x.expires = tok.Expires
	return x.decide(ctx, x.tokenGood(tok))
}

// step notes how long a part took.
func (x *exchange) step(name string, began time.Time) {
	x.steps = append(x.steps, &corev1.Step{Name: name, Start: durationpb.New(began.Sub(x.started)), Took: durationpb.New(time.Since(began))})
}

// reject records a refusal that came before the core saw the request.
func (s *service) reject(ctx context.Context, asked core.Asked, err error) {
	rec := core.NewAudit(asked, err, time.Now())
	rec.Failure = s.failure(err)
	s.record(ctx, rec)
}

// record queues an audit record.
func (s *service) record(ctx context.Context, rec *identityv1.Audit) {
	s.audit.Record(ctx, auditSubject(rec), rec)
}

// admitted records a request before anything acts on it. Whoever repeats the
// request, or handles it after this process died, records it under the same id.
// The id depends on a secret, so no other login can use it first.
func (s *service) admitted(ctx context.Context, a core.Audit) {
	s.audit.RecordAs(ctx, "audit-identity-"+s.derive.tag(a.Once), auditSubject(a.Record), a.Record)
}

func auditSubject(rec *identityv1.Audit) string {
	return subjects.Audit("identity", ids.Tenant(rec.GetActor().GetTenant()), ids.SessionKey(rec.GetSession()))
}

// failure is what a user hears of an error. Faults of the platform are
// logged and not described.
func (s *service) failure(err error) *corev1.Failure {
	var r *core.Refusal
	if errors.As(err, &r) {
		return &corev1.Failure{Kind: r.Kind.String(), Reason: r.Reason}
	}
	kind := errs.Kind(err)
	reason := reasonOf(err)
	switch kind {
	case errkind.Internal:
		s.log.Error("request failed", "kind", kind, "error", err)
		reason = "a fault inside the platform; it was recorded"
	case errkind.DataLoss:
		s.log.Error("request failed", "kind", kind, "error", err)
		reason = "the session's files are damaged or missing; nothing was put in their place, and an operator can see which part it is"
	case errkind.Unsaved:
		s.log.Warn("request failed", "kind", kind, "error", err)
		reason = "the session stopped and its files are whole on their host, but they cannot be saved outside it yet; open it as before, or wait: it is saved when the store is back"
	case errkind.Unavailable, errkind.NotLeader, errkind.Canceled:
		s.log.Warn("request failed", "kind", kind, "error", err)
		reason = "a part of the platform cannot be reached now; try again"
	case errkind.Deadline:
		reason = "it took longer than allowed; ask again with the same request id to learn what became of it"
	}
	return &corev1.Failure{Kind: kind.String(), Reason: reason}
}

// kindOf is the kind of a refusal or of any other error.
func kindOf(err error) errkind.Kind {
	var r *core.Refusal
	if errors.As(err, &r) {
		return r.Kind
	}
	return errs.Kind(err)
}

// reasonOf is the innermost cause: the sentence, without who asked whom.
func reasonOf(err error) string {
	for {
		var e *errs.Error
		if !errors.As(err, &e) || e.Cause == nil {
			return err.Error()
		}
		err = e.Cause
	}
}
