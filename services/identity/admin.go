package identity

import (
	"context"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/handles"
)

// handleKeyFile in Config.KeyDir holds the key of handles. A new version gives
// sessions new handles; those of live versions go on being understood.
const handleKeyFile = "identity-handle.json"

const (
	listedByDefault = 100
	mostOfAPage     = 1000
	// mostOfOneUser bounds the search for a handle among one user's sessions.
	mostOfOneUser = 10000
)

func (s *service) openHandles(cfg Config) error {
	keys, err := keyfile.Open(filepath.Join(cfg.KeyDir, handleKeyFile))
	if err != nil {
		return err
	}
	secrets := make([][]byte, 0, len(keys))
	for _, k := range keys {
		secrets = append(secrets, k.Secret)
	}
	s.handles, err = handles.New(secrets)
	return err
}

// listSessions shows a page of the tenant's sessions, by handle.
func (x *exchange) listSessions(ctx context.Context, c core.ListSessions) error {
	limit := c.Ask.GetLimit()
	if limit == 0 {
		limit = listedByDefault
	}
	after, err := x.handles.Resume(c.Tenant, c.Ask.GetAfter())
	if err != nil {
		return &core.Refusal{Kind: errkind.Invalid, Reason: "after is not the next of an answer, or too old"}
	}
	page, err := bus.Invoke[*schedulerv1.ListReply](ctx, x.conn, "scheduler", "list", &schedulerv1.ListRequest{Tenant: string(c.Tenant),
		Issuer: c.Ask.GetIssuer(), Subject: c.Ask.GetSubject(), After: string(after), Limit: min(limit, mostOfAPage)})
	if err != nil {
		return err
	}
	out := &identityv1.AdminSessionsReply{}
	for _, r := range page.GetRecords() {
		if r.GetSession().GetTenant() != string(c.Tenant) {
			return errs.E("list sessions", errkind.Internal, "", "a session of another tenant was listed")
		}
		out.Sessions = append(out.Sessions, &identityv1.AdminSession{Handle: x.handles.Of(r.GetSession()), State: r.GetState(),
			Template: r.GetTerms().GetTemplate(), Tier: r.GetTerms().GetTier(), ChangedAt: r.GetChangedAt(), Generation: r.GetSession().GetGeneration()})
	}
	if page.GetNext() != "" {
		if out.Next, err = x.handles.Pause(c.Tenant, ids.SessionKey(page.GetNext())); err != nil {
			return err
		}
	}
	x.reply.Outcome = &identityv1.Reply_AdminSessions{AdminSessions: out}
	return nil
}

// findSession looks up what is to be attached to, and has the core compare it
// with what was expected. A handle is looked for among the sessions of the
// principal named, so that a handle alone says nothing about whose it is.
func (x *exchange) findSession(ctx context.Context, c core.FindSession) ([]core.Command, error) {
	key := c.Ask.GetSession()
	if c.Ask.GetHandle() != "" {
		var err error
		if key, err = x.byHandle(ctx, c); err != nil {
			return nil, err
		}
	}
	if key == "" {
		return x.decide(ctx, core.Found{})
	}
	reply, err := bus.Invoke[*schedulerv1.ShowReply](ctx, x.conn, "scheduler", "show", &schedulerv1.ShowRequest{Tenant: string(c.Tenant), Session: key})
	if errs.Is(err, errkind.NotFound) {
		return x.decide(ctx, core.Found{})
	}
	if err != nil {
		return nil, err
	}
	return x.decide(ctx, core.Found{Record: reply.GetRecord(), HostKey: reply.GetHostKey()})
}

func (x *exchange) byHandle(ctx context.Context, c core.FindSession) (string, error) {
	req := &schedulerv1.ListRequest{Tenant: string(c.Tenant), Issuer: c.Ask.GetIssuer(), Subject: c.Ask.GetSubject(), Limit: mostOfAPage}
	for n := 0; n < mostOfOneUser; n += mostOfAPage {
		page, err := bus.Invoke[*schedulerv1.ListReply](ctx, x.conn, "scheduler", "list", req)
		if err != nil {
			return "", err
		}
		for _, r := range page.GetRecords() {
			if x.handles.Is(c.Ask.GetHandle(), r.GetSession()) {
				return r.GetSession().GetSession(), nil
			}
		}
		if req.After = page.GetNext(); req.After == "" {
			break
		}
	}
	return "", nil
}

// mayStillAttach refuses whoever was shut out while the session was looked up.
func (x *exchange) mayStillAttach() error {
	if x.state.Asked.Door == core.Console { // an operator may look into a tenant that is shut out
		return nil
	}
	return x.currentPolicy().StillMay(x.state)
}

// tellAttached returns once the event that the user's frontend sees is
// stored: without it there is no grant. What can be refused is refused before,
// so that the user reads of nobody who was turned away.
func (x *exchange) tellAttached(ctx context.Context, e *identityv1.Attached) error {
	if err := x.mayStillAttach(); err != nil {
		return err
	}
	_, err := x.conn.Publish(ctx, subjects.Session(ids.Tenant(e.GetSession().GetTenant()), ids.SessionKey(e.GetSession().GetSession()), "attached"), e,
		bus.WithTime(e.GetAt().AsTime()))
	if err != nil {
		return errs.E("tell that somebody attaches", errkind.Unavailable, e.GetSession().GetSession(), err)
	}
	return nil
}

// mintAttach gets the short grant, which cannot be renewed.
func (x *exchange) mintAttach(ctx context.Context, c core.MintAttach) error {
	if err := x.mayStillAttach(); err != nil { // storing the event may have taken seconds
		return err
	}
	ref, env, at := c.Record.GetSession(), x.state.Asked.Envelope, x.state.Asked.StoredAt
	expires := at.Add(core.AttachFor)
	if !x.expires.IsZero() {
		expires = x.expires // of the administrator's token
	}
	reply, err := bus.Invoke[*credentialsv1.MintReply](ctx, x.conn, "credentials", "mint", &credentialsv1.MintRequest{
		Session: ref, Actor: c.Actor, Host: c.Record.GetHost(), ProofKey: env.GetProofKey(), ReplyKey: x.box.Public(),
		TokenVerifiedAt: timestamppb.New(at), TokenExpiresAt: timestamppb.New(expires),
		Verbs: c.Verbs, Once: true, Ttl: durationpb.New(core.AttachFor),
	})
	if err != nil {
		return err
	}
	token, err := x.box.Open(reply.GetSender(), reply.GetSealedGrant())
	if err != nil {
		return errs.E("open minted grant", errkind.Internal, ref.GetSession(), err)
	}
	x.reply.Outcome = &identityv1.Reply_AdminAttach{AdminAttach: &identityv1.AdminAttachReply{
		Session: ref, Grant: string(token), GrantExpires: reply.GetExpiresAt(),
		Endpoint: &identityv1.Endpoint{Host: c.Record.GetHost(), HostKey: c.HostKey,
			Subject: subjects.Prefix + "box." + ref.GetSession() + "." + grant.EpochOf(ref.GetEpoch()).String()},
	}}
	return nil
}

// suspendUser shuts a user out on an administrator's behalf, or lets them in.
func (x *exchange) suspendUser(ctx context.Context, c core.CallSuspend) error {
	c.What.At = timestamppb.New(time.Now())
	if err := x.suspend(ctx, c.What, c.Suspended); err != nil {
		return err
	}
	x.reply.Outcome = &identityv1.Reply_AdminSuspend{AdminSuspend: &identityv1.AdminSuspendReply{}}
	return nil
}
