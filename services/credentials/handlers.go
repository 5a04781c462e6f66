package credentials

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

// sealedGrant is what an answer to identity carries.
type sealedGrant struct {
	sealed  []byte
	expires *timestamppb.Timestamp
}

func (s *service) mint(ctx context.Context, _ bus.Request, req *credentialsv1.MintRequest) (*credentialsv1.MintReply, error) {
	const op = "credentials.mint"
	on, err := sessionOf(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	actor, err := actorOf(req.GetActor())
	if err != nil {
		return nil, errs.Wrap(op, string(on.Session), err)
	}
	host, err := ids.ParseHost(req.GetHost())
	if err != nil {
		return nil, errs.Wrap(op, string(on.Session), err)
	}
	if len(req.GetProofKey()) != ed25519.PublicKeySize {
		return nil, errs.Errorf(op, errkind.Invalid, "the proof key is %d bytes long, it must be %d", len(req.GetProofKey()), ed25519.PublicKeySize)
	}
	if req.GetTokenVerifiedAt() == nil || actor.Issuer == "" || actor.Subject == "" {
		return nil, errs.E(op, errkind.Invalid, string(on.Session), "a grant needs a principal whose token was verified")
	}
	verbs, err := grant.ParseVerbs(req.GetVerbs())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, string(on.Session), err)
	}
	ttl := req.GetTtl()
	if ttl != nil && (ttl.CheckValid() != nil || ttl.AsDuration() == 0) {
		return nil, errs.E(op, errkind.Invalid, string(on.Session), "the life of the grant is no proper time")
	}
	out, err := s.sign(ctx, op, req.GetReplyKey(), core.Mint{
		Session: on, Actor: actor, Host: host, Confirm: grant.Confirm(req.GetProofKey()),
		Verified: req.GetTokenVerifiedAt().AsTime(), ID: newGrantID(), Verbs: verbs, Once: req.GetOnce(), TTL: ttl.AsDuration(),
	})
	if err != nil {
		return nil, err
	}
	return &credentialsv1.MintReply{SealedGrant: out.sealed, Sender: s.box.Public(), ExpiresAt: out.expires}, nil
}

func (s *service) renew(ctx context.Context, _ bus.Request, req *credentialsv1.RenewRequest) (*credentialsv1.RenewReply, error) {
	const op = "credentials.renew"
	raw, err := s.box.Open(req.GetSender(), req.GetSealed())
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	var in credentialsv1.RenewSecret
	if err := proto.Unmarshal(raw, &in); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", "the sealed renewal is malformed")
	}
	actor, err := actorOf(in.GetActor())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	old, err := s.proven(&in, time.Now())
	if err != nil {
		err = errs.E(op, grant.KindOf(err), "", err)
		s.record(ctx, []core.Command{core.Audit{What: "refused", Session: core.Session{Generation: core.Generation{Tenant: actor.Tenant}},
			Actor: actor, Reason: err.Error()}})
		return nil, err
	}
	ev := core.Renew{Old: old, Actor: actor, ID: newGrantID()}
	if in.GetTokenVerifiedAt() != nil {
		ev.Verified = in.GetTokenVerifiedAt().AsTime()
	}
	out, err := s.sign(ctx, op, req.GetReplyKey(), ev)
	if err != nil {
		return nil, err
	}
	return &credentialsv1.RenewReply{SealedGrant: out.sealed, Sender: s.box.Public(), ExpiresAt: out.expires}, nil
}

// proven checks the grant of a renewal and that its holder asks.
func (s *service) proven(in *credentialsv1.RenewSecret, now time.Time) (grant.Claims, error) {
	v, err := s.check()
	if err != nil {
		return grant.Claims{}, err
	}
	old, err := v.Authenticate(in.GetGrant(), now)
	if err != nil {
		return grant.Claims{}, err
	}
	key, err := old.ProofKey()
	if err != nil {
		return grant.Claims{}, err
	}
	r := grant.Renewal{RequestID: in.GetRequestId(), Grant: in.GetGrant(), Time: in.GetTime().AsTime()}
	return old, r.Verify(key, in.GetProof(), now)
}

// sign decides on a grant and seals it to identity.
func (s *service) sign(ctx context.Context, op, replyKey string, ev core.Event) (sealedGrant, error) {
	cmds, err := s.decide(ev)
	s.record(ctx, cmds)
	if err != nil {
		return sealedGrant{}, refused(op, err)
	}
	for _, c := range cmds {
		sign, ok := c.(core.Sign)
		if !ok {
			continue
		}
		s.mu.Lock()
		secret := s.secrets[sign.Key]
		s.mu.Unlock()
		if secret == nil {
			return sealedGrant{}, errs.E(op, errkind.Unavailable, string(sign.Key), "the signing key is gone; try again")
		}
		token, err := grant.Sign(sign.Claims, sign.Key, secret)
		if err != nil {
			return sealedGrant{}, errs.E(op, grant.KindOf(err), "", err)
		}
		sealed, err := s.box.Seal(replyKey, []byte(token))
		if err != nil {
			return sealedGrant{}, errs.E(op, errkind.Invalid, "", err)
		}
		return sealedGrant{sealed, timestamppb.New(sign.Claims.ExpiresAt())}, nil
	}
	return sealedGrant{}, errs.E(op, errkind.Internal, "", "nothing was decided")
}

func (s *service) revoke(ctx context.Context, _ bus.Request, req *credentialsv1.RevokeRequest) (*credentialsv1.RevokeReply, error) {
	const op = "credentials.revoke"
	g, err := generationOf(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	cmds, err := s.decide(core.Revoke{Generation: g, Reason: req.GetReason()})
	if err != nil {
		return nil, refused(op, err)
	}
	for _, c := range cmds {
		if c, ok := c.(core.EndGeneration); ok {
			err = errors.Join(err, s.store.end(ctx, c.Generation, c.Until))
		}
	}
	if err != nil {
		return nil, errs.Wrap(op, string(g.Session), err)
	}
	s.record(ctx, cmds)
	return &credentialsv1.RevokeReply{}, nil
}

func (s *service) dataKey(ctx context.Context, r bus.Request, req *credentialsv1.DataKeyRequest) (*credentialsv1.DataKeyReply, error) {
	const op = "credentials.datakey"
	on, err := sessionOf(req.GetSession())
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	if _, err := seal.ParsePublic(req.GetHostKey()); err != nil {
		return nil, errs.E(op, errkind.Invalid, string(on.Session), err)
	}
	record, err := s.ask(ctx, on.Generation)
	if err != nil {
		return nil, errs.Wrap(op, string(on.Session), err)
	}
	cmds, err := s.decide(core.DataKey{Host: r.Caller.Host, Session: on, Record: record})
	if err != nil {
		s.record(ctx, cmds)
		return nil, refused(op, err)
	}
	key, err := s.store.dataKey(ctx, on.Generation, func(ctx context.Context) error { return s.over(ctx, on.Generation) })
	if err != nil {
		return nil, errs.Wrap(op, string(on.Session), err)
	}
	s.record(ctx, cmds)
	defer clear(key)
	sealed, err := seal.SealTo(seal.Public(req.GetHostKey()), key, rand.Reader)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, string(on.Session), err)
	}
	return &credentialsv1.DataKeyReply{SealedKey: sealed}, nil
}

// ask asks scheduler, which alone knows, who owns a session now. An event on
// a stream would be older than the wake that it tells of.
func (s *service) ask(ctx context.Context, g core.Generation) (core.Record, error) {
	reply, err := bus.Invoke[*schedulerv1.ShowReply](ctx, s.conn, "scheduler", "show",
		&schedulerv1.ShowRequest{Tenant: string(g.Tenant), Session: string(g.Session)})
	if errs.Is(err, errkind.NotFound) {
		return core.Record{}, nil
	}
	if err != nil {
		return core.Record{}, err
	}
	rec := reply.GetRecord()
	on, err := sessionOf(rec.GetSession())
	if err != nil {
		return core.Record{}, nil // never placed, so nobody owns it
	}
	state := rec.GetState()
	return core.Record{Found: true, Session: on, Host: ids.Host(rec.GetHost()),
		Awake:   state == corev1.State_STATE_WAKING || state == corev1.State_STATE_ACTIVE || state == corev1.State_STATE_SLEEPING,
		Ending:  state == corev1.State_STATE_SLEEPING,
		Deleted: state == corev1.State_STATE_DELETING || state == corev1.State_STATE_DELETED}, nil
}

// over is of kind Superseded if a generation has ended: it was revoked here, or
// scheduler, whose answer is as of now, says so. That the epoch moved on does
// not end it: its key may be in use.
func (s *service) over(ctx context.Context, g core.Generation) error {
	s.mu.Lock()
	_, revoked := s.state.Revoked[g]
	s.mu.Unlock()
	if revoked {
		return errs.E("data key", errkind.Superseded, name(g), "the session was deleted")
	}
	record, err := s.ask(ctx, g)
	if err == nil && record.Ended(g) {
		return errs.E("data key", errkind.Superseded, name(g), "the session was deleted")
	}
	return err
}

func refused(op string, err error) error {
	var r *core.Refusal
	if errors.As(err, &r) {
		return errs.E(op, r.Kind, "", r.Reason)
	}
	return errs.Wrap(op, "", err)
}

// newGrantID is unused before and small, as tokens of subjects are.
func newGrantID() string { return "g" + string(ids.NewRequestID())[1:] }

func generationOf(ref *corev1.SessionRef) (core.Generation, error) {
	t, err1 := ids.ParseTenant(ref.GetTenant())
	k, err2 := ids.ParseSessionKey(ref.GetSession())
	g := core.Generation{Tenant: t, Session: k, Generation: grant.GenerationOf(ref.GetGeneration())}
	if err := errors.Join(err1, err2); err != nil {
		return core.Generation{}, err
	}
	if g.Generation.IsZero() {
		return core.Generation{}, errs.E("", errkind.Invalid, string(k), "the session is named without its generation")
	}
	return g, nil
}

func sessionOf(ref *corev1.SessionRef) (core.Session, error) {
	g, err := generationOf(ref)
	if err != nil {
		return core.Session{}, err
	}
	e := grant.EpochOf(ref.GetEpoch())
	if e.IsZero() {
		return core.Session{}, errs.E("", errkind.Invalid, string(g.Session), "the session is named without its epoch")
	}
	return core.Session{Generation: g, Epoch: e}, nil
}

func actorOf(a *corev1.Actor) (core.Actor, error) {
	t, err1 := ids.ParseTenant(a.GetTenant())
	f, err2 := ids.ParseFrontend(a.GetFrontend())
	if a.GetRole() == "operator" && a.GetFrontend() == string(grant.OperatorFrontend) { // which is no frontend's name
		f, err2 = grant.OperatorFrontend, nil
	}
	return core.Actor{Tenant: t, Frontend: f, Issuer: a.GetIssuer(), Subject: a.GetSubject(),
		Acting: a.GetActing(), Role: a.GetRole()}, errors.Join(err1, err2)
}
