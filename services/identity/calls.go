package identity

import (
	"context"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

// callLifecycle hands an admitted request on.
func (x *exchange) callLifecycle(ctx context.Context) ([]core.Command, error) {
	v := x.state.Verified
	switch x.state.Asked.Verb {
	case core.Open:
		began := time.Now()
		ask := x.state.Asked.Body.Open
		wait := time.Until(x.state.Asked.StoredAt.Add(core.Wait(ask)))
		ctx, cancel := context.WithTimeout(ctx, max(wait, 0)+callMargin)
		defer cancel()
		reply, err := bus.Invoke[*lifecyclev1.OpenReply](ctx, x.conn, "lifecycle", "open", &lifecyclev1.OpenRequest{Verified: v, Ask: ask})
		if err != nil {
			return nil, err
		}
		x.opened = reply
		x.inner(reply.GetWake().GetTiming(), began)
		return x.decide(ctx, core.Awake{Session: reply.GetWake().GetSession(), State: reply.GetWake().GetState(), Revoked: x.acting.Revoked(v.GetActor())})
	case core.Close:
		reply, err := bus.Invoke[*lifecyclev1.CloseReply](ctx, x.conn, "lifecycle", "close", &lifecyclev1.CloseRequest{Verified: v})
		if err != nil {
			return nil, err
		}
		x.reply.Outcome = &identityv1.Reply_Close{Close: &identityv1.CloseReply{Session: reply.GetSession(), State: reply.GetState()}}
	case core.Delete:
		reply, err := bus.Invoke[*lifecyclev1.DeleteReply](ctx, x.conn, "lifecycle", "delete", &lifecyclev1.DeleteRequest{Verified: v})
		if err != nil {
			return nil, err
		}
		x.reply.Outcome = &identityv1.Reply_Delete{Delete: &identityv1.DeleteReply{Session: reply.GetSession(), State: reply.GetState()}}
	}
	return nil, nil
}

// callMargin lets lifecycle's own answer arrive before our time is up.
const callMargin = 2 * time.Second

// inner takes over the steps of lifecycle and those below it.
func (x *exchange) inner(t *corev1.Timing, began time.Time) {
	offset := began.Sub(x.started)
	x.step("identity.lifecycle", began)
	for _, s := range t.GetSteps() {
		x.steps = append(x.steps, &corev1.Step{Name: s.GetName(), Start: durationpb.New(offset + s.GetStart().AsDuration()), Took: s.GetTook()})
	}
}

// mint gets a grant for the session that was just opened.
func (x *exchange) mint(ctx context.Context, ref *corev1.SessionRef) error {
	// The wake may have taken minutes: whoever was shut out meanwhile gets no grant.
	if err := x.currentPolicy().StillMay(x.state); err != nil {
		return err
	}
	began := time.Now()
	wake, env := x.opened.GetWake(), x.state.Asked.Envelope
	reply, err := bus.Invoke[*credentialsv1.MintReply](ctx, x.conn, "credentials", "mint", &credentialsv1.MintRequest{
		Session: ref, Actor: x.state.Actor(), Host: wake.GetHost(), ProofKey: env.GetProofKey(), ReplyKey: x.box.Public(),
		TokenVerifiedAt: timestamppb.New(x.state.Asked.StoredAt), TokenExpiresAt: timestamppb.New(x.expires),
		Verbs: x.state.Asked.Body.Open.GetVerbs(),
	})
	if err != nil {
		return err
	}
	token, err := x.box.Open(reply.GetSender(), reply.GetSealedGrant())
	if err != nil {
		return errs.E("open minted grant", errkind.Internal, ref.GetSession(), err)
	}
	x.step("identity.mint", began)
	terms := x.opened.GetTerms()
	if terms == nil {
		terms = wake.GetTerms()
	}
	x.reply.Outcome = &identityv1.Reply_Open{Open: &identityv1.OpenReply{
		Session: ref, Origin: wake.GetOrigin(), RestoredAsOf: wake.GetRestoredAsOf(),
		Endpoint: &identityv1.Endpoint{Host: wake.GetHost(), HostKey: wake.GetHostKey(),
			Subject: subjects.Prefix + "box." + ref.GetSession() + "." + grant.EpochOf(ref.GetEpoch()).String()},
		Grant: string(token), GrantExpires: reply.GetExpiresAt(), Place: x.place(terms),
		Timing: &corev1.Timing{Total: durationpb.New(time.Since(x.started)), Steps: x.steps},
	}}
	return nil
}

// place states what the sandbox is, in the words of /run/berth/session.json.
func (x *exchange) place(t *corev1.Terms) *identityv1.Place {
	persists := "every file outside /tmp, /run, /proc, /sys and /dev"
	if t.GetPersistence() == corev1.Persistence_PERSISTENCE_EPHEMERAL {
		persists = "nothing"
	}
	wake := x.opened.GetWake()
	return &identityv1.Place{
		Tier: strings.ToLower(strings.TrimPrefix(t.GetTier().String(), "TIER_")), Limits: t.GetLimits(), Persists: persists,
		Idle: t.GetIdle(), Network: network(t.GetTier()), Template: t.GetTemplate(), SessionName: string(x.state.Name),
		Origin: wake.GetOrigin(), RestoredAsOf: wake.GetRestoredAsOf(), ImageDigest: wake.GetImageDigest(),
	}
}

// network is what a sandbox of the tier can have: named, what its egress policy names; none, nothing.
func network(t corev1.Tier) string {
	switch t {
	case corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_KATA, corev1.Tier_TIER_MICROVM:
		return "named"
	}
	return "none"
}

// renew has credentials renew the grant. The grant crosses the bus sealed.
func (x *exchange) renew(ctx context.Context, c core.CallRenew) error {
	env, ask := x.state.Asked.Envelope, x.state.Asked.Body.Renew
	secret := &credentialsv1.RenewSecret{
		Grant: ask.GetGrant(), Proof: ask.GetProof(), Actor: c.Actor, RequestId: env.GetRequestId(), Time: env.GetTime(),
	}
	if !c.Verified.IsZero() {
		secret.TokenVerifiedAt, secret.TokenExpiresAt = timestamppb.New(c.Verified), timestamppb.New(c.Expires)
	}
	raw, err := proto.Marshal(secret)
	if err != nil {
		return errs.E("renew grant", errkind.Internal, "", err)
	}
	key, err := x.credentialsKey(ctx)
	if err != nil {
		return err
	}
	sealed, err := x.box.Seal(key, raw)
	if err != nil {
		return errs.Wrap("renew grant", "", err)
	}
	reply, err := bus.Invoke[*credentialsv1.RenewReply](ctx, x.conn, "credentials", "renew",
		&credentialsv1.RenewRequest{Sealed: sealed, Sender: x.box.Public(), ReplyKey: x.box.Public()})
	if err != nil {
		if errs.Is(err, errkind.Invalid) {
			x.forgetCredentialsKey() // its key may have been replaced
		}
		return err
	}
	if err := x.mayKeep(ask.GetGrant()); err != nil {
		return err
	}
	token, err := x.box.Open(reply.GetSender(), reply.GetSealedGrant())
	if err != nil {
		return errs.E("open renewed grant", errkind.Internal, "", err)
	}
	x.reply.Outcome = &identityv1.Reply_Renew{Renew: &identityv1.RenewReply{Grant: string(token), GrantExpires: reply.GetExpiresAt()}}
	return nil
}

// mayKeep holds a renewed grant back from whom nobody may act for any more, or
// not this frontend: also where credentials could not be told yet that such
// grants end. It is asked once credentials has found the old grant good, so
// that what it says is true, and a forged one learns nothing.
func (x *exchange) mayKeep(token string) error {
	c, err := grant.Unverified(token)
	if err != nil {
		return nil
	}
	if err := x.currentPolicy().MayKeep(core.Principal{Tenant: c.Tenant, Issuer: c.Principal.Issuer, Subject: c.Principal.Subject}); err != nil {
		return err
	}
	return core.StillActs(x.acting.Revoked(&corev1.Actor{Tenant: string(c.Tenant), Issuer: c.Principal.Issuer, Subject: c.Principal.Subject, Frontend: string(c.Frontend)}))
}

// credentialsKey is the curve key of credentials, asked for once.
func (s *service) credentialsKey(ctx context.Context) (string, error) {
	s.mu.Lock()
	key := s.credsKey
	s.mu.Unlock()
	if key != "" {
		return key, nil
	}
	reply, err := bus.Invoke[*credentialsv1.JwksReply](ctx, s.conn, "credentials", "jwks", &credentialsv1.JwksRequest{})
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.credsKey = reply.GetCurveKey()
	return s.credsKey, nil
}

func (s *service) forgetCredentialsKey() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.credsKey = ""
}

// mostListed bounds an answer of status.
const mostListed = 1000

// list answers with the principal's own sessions.
func (x *exchange) list(ctx context.Context, actor *corev1.Actor) error {
	want := x.state.Asked.Body.Status.GetSessionName()
	out := &identityv1.StatusReply{}
	req := &schedulerv1.ListRequest{Tenant: actor.GetTenant(), Issuer: actor.GetIssuer(), Subject: actor.GetSubject(), Limit: 200}
	for len(out.GetSessions()) < mostListed {
		page, err := bus.Invoke[*schedulerv1.ListReply](ctx, x.conn, "lifecycle", "status", req)
		if err != nil {
			return err
		}
		for _, r := range page.GetRecords() {
			own := r.GetActor().GetTenant() == actor.GetTenant() && r.GetActor().GetIssuer() == actor.GetIssuer() && r.GetActor().GetSubject() == actor.GetSubject()
			if own && (want == "" || want == r.GetSessionName()) {
				out.Sessions = append(out.Sessions, &identityv1.SessionStatus{Session: r.GetSession(), SessionName: r.GetSessionName(),
					State: r.GetState(), Terms: r.GetTerms(), ChangedAt: r.GetChangedAt()})
			}
		}
		if page.GetNext() == "" {
			break
		}
		req.After = page.GetNext()
	}
	x.reply.Outcome = &identityv1.Reply_Status{Status: out}
	return nil
}
