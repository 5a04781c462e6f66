package sdk

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// AdminSession is what an administrator of a tenant may know of a user's session.
type AdminSession struct {
	// Handle opens nothing, and says nothing of session key, user or name.
	Handle     string
	State      State
	Template   string
	Tier       Tier
	ChangedAt  time.Time
	Generation string
}

// AdminFilter selects sessions of the administrator's tenant; the zero value is all of them. A user is
// named by issuer and subject together.
type AdminFilter struct {
	User            TokenSource // the administrator; nil: that of the Config
	Issuer, Subject string
}

// AdminSessions lists sessions of the administrator's tenant, all pages of them.
func (c *Client) AdminSessions(ctx context.Context, f AdminFilter) ([]AdminSession, error) {
	var out []AdminSession
	for after := ""; ; {
		r, err := c.userAsk(ctx, "list the tenant's sessions", "admin_sessions", UserSession{User: f.User},
			&identityv1.AdminSessionsRequest{After: after, Limit: 1000, Issuer: f.Issuer, Subject: f.Subject})
		if err != nil {
			return nil, err
		}
		for _, s := range r.GetAdminSessions().GetSessions() {
			out = append(out, AdminSession{Handle: s.GetHandle(), State: stateOf(s.GetState()), Template: s.GetTemplate(), Tier: tierOf(s.GetTier()),
				ChangedAt: timeOf(s.GetChangedAt()), Generation: stamp(s.GetGeneration())})
		}
		if after = r.GetAdminSessions().GetNext(); after == "" {
			return out, nil
		}
	}
}

// Attach says to which session somebody attaches who is not its user, and why. Whose session it is and
// its generation must be as they are, or nothing happens.
type Attach struct {
	User TokenSource // the administrator; nil: that of the Config. Operators have none.
	// Handle is of AdminSessions; operators name Tenant and Key instead.
	Handle      string
	Tenant, Key string
	// Issuer and Subject are the user whose session it must be.
	Issuer, Subject string
	Generation      string
	// Reason is for the user, who can read it: 1 to 256 bytes.
	Reason string
	// Verbs are what the handle is to be good for; empty: VerbRead.
	Verbs []Verb
}

// AdminAttach gives an administrator a handle of a user's active session for two minutes. It wakes
// nothing, and cannot be renewed; the user's frontends see the event "attached". The handle's Close,
// Delete and Reopen are refused: use Detach.
//
// Errors: ErrRefused (switched off for the tenant), ErrNotFound, ErrConflict (another user's, another
// generation, or not active), ErrDenied (no administrator).
func (c *Client) AdminAttach(ctx context.Context, a Attach) (*Session, error) {
	const op = "attach to session"
	s, ask, err := c.attaching(op, a)
	if err != nil {
		return nil, err
	}
	r, err := c.do(ctx, aAsk(op, a.User, s, ask))
	if err != nil {
		s.stop()
		return nil, err
	}
	return s.attachedTo(op, r.GetAdminAttach())
}

func aAsk(op string, user TokenSource, s *Session, body proto.Message) ask {
	return ask{op: op, verb: "admin_attach", id: ids.NewRequestID(), user: user, proof: s.proof.Public().(ed25519.PublicKey), limit: 30 * time.Second,
		body: func(time.Time) proto.Message { return body }}
}

// OperatorAttach is AdminAttach for an operator's login, of any tenant, by session key.
func (c *Client) OperatorAttach(ctx context.Context, a Attach) (*Session, error) {
	const op = "attach to session"
	if c.me.Role != subjects.RoleOperator {
		return nil, invalid(op, "%s is no operator", c.me.Name())
	}
	s, body, err := c.attaching(op, a)
	if err != nil {
		return nil, err
	}
	r, err := c.operatorAttach(ctx, op, s, body)
	if err != nil {
		s.stop()
		return nil, err
	}
	return s.attachedTo(op, r)
}

func (c *Client) operatorAttach(ctx context.Context, op string, s *Session, body *identityv1.AdminAttachRequest) (*identityv1.AdminAttachReply, error) {
	key, err := c.curveKey(ctx)
	if err != nil {
		return nil, err
	}
	reply, err := newKey()
	if err != nil {
		return nil, wrap(op, err)
	}
	sealed, _, err := sealTo(c.sender, &identityv1.OperatorAttach{Ask: body, ProofKey: s.proof.Public().(ed25519.PublicKey),
		ReplyKey: string(reply.Public()), Time: timestamppb.Now(), RequestId: string(ids.NewRequestID())}, key)
	if err != nil {
		return nil, wrap(op, err)
	}
	out := &identityv1.OperatorAttachReply{}
	if err := c.Call(ctx, "identity", "operator_attach", &identityv1.OperatorAttachRequest{Sealed: sealed}, out); err != nil {
		return nil, err
	}
	r := &identityv1.Reply{}
	if err := openSealed(out.GetSealed(), "", reply.Open, r); err != nil {
		return nil, wrap(op, err)
	}
	if f := r.GetFailure(); f != nil {
		return nil, failed(op, f)
	}
	return r.GetAdminAttach(), nil
}

// attaching makes the handle, which is not good for anything yet, and the request.
func (c *Client) attaching(op string, a Attach) (*Session, *identityv1.AdminAttachRequest, error) {
	g, err := ids.ParseGeneration(a.Generation)
	if err != nil {
		return nil, nil, wrap(op, err)
	}
	body := &identityv1.AdminAttachRequest{Handle: a.Handle, Reason: a.Reason, Issuer: a.Issuer, Subject: a.Subject, Tenant: a.Tenant, Session: a.Key,
		Generation: &corev1.Stamp{Incarnation: g.Incarnation, Index: g.Index}}
	for _, v := range a.Verbs {
		body.Verbs = append(body.Verbs, string(v))
	}
	_, proof, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, wrap(op, err)
	}
	sender, err := seal.RandomBox()
	if err != nil {
		return nil, nil, wrap(op, err)
	}
	reply, err := seal.RandomBox()
	if err != nil {
		return nil, nil, wrap(op, err)
	}
	s := &Session{c: c, proof: proof, sender: sender, replyKey: reply, attending: map[*attendant]struct{}{}, attached: true}
	s.ctx, s.stop = context.WithCancel(c.ctx)
	return s, body, nil
}

// attachedTo makes the handle good for what was granted.
func (s *Session) attachedTo(op string, r *identityv1.AdminAttachReply) (*Session, error) {
	if r.GetEndpoint().GetSubject() == "" || r.GetGrant() == "" {
		s.stop()
		return nil, &Error{Op: op, Kind: errkind.Internal, Reason: "the answer names no endpoint or no grant"}
	}
	s.reply = &identityv1.OpenReply{Session: r.GetSession(), Endpoint: r.GetEndpoint(), Grant: r.GetGrant(), GrantExpires: r.GetGrantExpires()}
	s.grant, s.expires, s.renewed = r.GetGrant(), r.GetGrantExpires().AsTime(), time.Now()
	if err := s.heed(); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func notOurs(op string) error {
	return &Error{Op: op, Kind: errkind.Refused, Reason: "this handle is of another user's session: it is good for a short time, cannot be renewed, and opens and ends nothing"}
}

// AdminSuspend shuts one user of the administrator's tenant out, or lets them in again. Their connections
// and grants end.
func (c *Client) AdminSuspend(ctx context.Context, admin TokenSource, issuer, subject, reason string, suspended bool) error {
	_, err := c.userAsk(ctx, "suspend user", "admin_suspend", UserSession{User: admin},
		&identityv1.AdminSuspendRequest{Issuer: issuer, Subject: subject, Suspended: suspended, Reason: reason})
	return err
}
