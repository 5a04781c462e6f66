package core

import (
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

// Verbs of a tenant's administrators, and the one of operators.
const (
	AdminSessions  = "admin_sessions"
	AdminAttach    = "admin_attach"
	AdminSuspend   = "admin_suspend"
	OperatorAttach = "operator_attach"
)

// Console is the door of operators: their login says who asks, there is no
// token of a user.
const Console = "operator"

// Roles of an actor who is no user.
const (
	RoleAdministrator = "administrator"
	RoleOperator      = "operator"
)

// The principal that operators' grants name; no issuer of users has such an URL.
const (
	OperatorIssuer  = grant.OperatorIssuer
	OperatorSubject = "operator"
)

const (
	// AttachFor is how long a grant of who attaches lives; it is never renewed.
	AttachFor = 2 * time.Minute
	maxReason = 256
	maxCursor = 256
	maxHandle = 64
	// maxShutOut is how many users of a tenant its administrators may have shut
	// out at once. A subject need not be one that ever came, and all tenants
	// share one registry.
	maxShutOut = 256
)

func administrative(verb string) bool {
	return verb == AdminSessions || verb == AdminAttach || verb == AdminSuspend
}

// ListSessions: list the tenant's sessions by handle.
type ListSessions struct {
	Tenant ids.Tenant
	Ask    *identityv1.AdminSessionsRequest
}

// FindSession: look the session up that is to be attached to, by handle among
// those of the principal named, or by its key; Found tells.
type FindSession struct {
	Tenant ids.Tenant
	Ask    *identityv1.AdminAttachRequest
}

// CallSuspend: shut out a user, or let them in again.
type CallSuspend struct {
	What      *identityv1.Suspension
	Suspended bool
}

// TellAttached: publish the event, and go on only once it is stored.
type TellAttached struct{ Event *identityv1.Attached }

// MintAttach: have credentials mint the grant.
type MintAttach struct {
	Record  *schedulerv1.SessionRecord
	HostKey string
	Actor   *corev1.Actor
	Verbs   []string
}

func (ListSessions) command() {}
func (FindSession) command()  {}
func (CallSuspend) command()  {}
func (TellAttached) command() {}
func (MintAttach) command()   {}

// Found is what scheduler has of the session; Record is nil if there is none.
type Found struct {
	Record  *schedulerv1.SessionRecord
	HostKey string
}

func (Found) event() {}

// administer decides a request of an administrator whose token was verified.
// No session key is derived: nothing here can open a session.
func (s State) administer(entry Entry, tok Token) (State, []Command, error) {
	actor := s.actorOf(entry, tok)
	s.Verified = &lifecyclev1.Verified{Actor: actor, RequestId: s.Asked.Envelope.GetRequestId(), StoredAt: stamp(s.Asked.StoredAt)}
	if !entry.Administrator(tok) {
		return s, nil, refuse(errkind.Denied, "this needs a token of an administrator of the tenant")
	}
	actor.Role = RoleAdministrator
	switch s.Asked.Verb {
	case AdminSessions:
		return s, []Command{ListSessions{entry.Tenant, s.Asked.Body.AdminSessions}}, nil
	case AdminAttach:
		if !s.Policy.Tenants[entry.Tenant].AdminAttach {
			return s, nil, refuse(errkind.Refused, "attaching to users' sessions is switched off for this tenant")
		}
		return s, []Command{FindSession{entry.Tenant, s.Asked.Body.AdminAttach}}, nil
	}
	return s.suspendUser(entry.Tenant)
}

// suspendUser shuts out one user of the administrator's own tenant. What an
// operator did stays: an administrator neither lifts nor replaces it.
func (s State) suspendUser(t ids.Tenant) (State, []Command, error) {
	ask, actor := s.Asked.Body.AdminSuspend, s.Actor()
	whom := Principal{t, ask.GetIssuer(), ask.GetSubject()}
	if !slices.ContainsFunc(s.Policy.Entries, func(e Entry) bool { return e.Tenant == t && e.Issuer == whom.Issuer }) {
		return s, nil, refuse(errkind.NotFound, "the tenant has no such issuer")
	}
	if ask.GetSuspended() && whom.Issuer == actor.GetIssuer() && whom.Subject == actor.GetSubject() {
		return s, nil, refuse(errkind.Invalid, "an administrator cannot shut themselves out")
	}
	had, out := s.Policy.Users[whom]
	switch {
	case out && had.By == RoleOperator:
		return s, nil, refuse(errkind.Denied, "an operator has shut this user out; only an operator can change that")
	case !out && ask.GetSuspended() && s.Policy.shutOutBy(t, RoleAdministrator) >= maxShutOut:
		return s, nil, refuse(errkind.Refused, "the tenant's administrators have shut out %d users, more are not allowed; let some in again, or ask an operator", maxShutOut)
	}
	return s, []Command{CallSuspend{Suspended: ask.GetSuspended(), What: &identityv1.Suspension{Tenant: string(t),
		Issuer: whom.Issuer, Subject: whom.Subject, Reason: ask.GetReason(), By: RoleAdministrator}}}, nil
}

// operator screens a request of an operator, whose login the bus has proved.
func (s State) operator() (State, []Command, error) {
	ask := s.Asked.Body.AdminAttach
	s.Verified = &lifecyclev1.Verified{RequestId: s.Asked.Envelope.GetRequestId(), StoredAt: stamp(s.Asked.StoredAt),
		Actor: &corev1.Actor{Tenant: ask.GetTenant(), Issuer: OperatorIssuer, Subject: OperatorSubject, Frontend: string(grant.OperatorFrontend), Role: RoleOperator}}
	return s, []Command{FindSession{ids.Tenant(ask.GetTenant()), ask}}, nil
}

// found compares what scheduler has with what was expected: all of it, or
// nothing happens. Then the user's side is told before there is a grant.
func found(s State, e Found) (State, []Command, error) {
	ask, actor, r := s.Asked.Body.AdminAttach, s.Actor(), e.Record
	if r == nil {
		return s, nil, refuse(errkind.NotFound, "there is no such session of this user")
	}
	ref, of := r.GetSession(), r.GetActor()
	if ref.GetTenant() != actor.GetTenant() || of.GetTenant() != actor.GetTenant() {
		return s, nil, refuse(errkind.Internal, "a session of another tenant was found")
	}
	if of.GetIssuer() != ask.GetIssuer() || of.GetSubject() != ask.GetSubject() {
		return s, nil, refuse(errkind.Conflict, "the session is not of the user named")
	}
	s.On = r
	switch {
	case !proto.Equal(ref.GetGeneration(), ask.GetGeneration()):
		return s, nil, refuse(errkind.Conflict, "the session has another generation than the one named; look it up again")
	case r.GetState() != corev1.State_STATE_ACTIVE:
		return s, nil, refuse(errkind.Conflict, "the session is not active (%s); nobody wakes a user's session to attach to it", stateWord(r.GetState()))
	case ref.GetEpoch().GetIndex() == 0 || r.GetHost() == "" || e.HostKey == "":
		return s, nil, refuse(errkind.Internal, "the session is active without an epoch, a host or the host's key")
	}
	verbs := attachVerbs(ask.GetVerbs())
	by := &corev1.Actor{Tenant: actor.GetTenant(), Role: actor.GetRole()}
	if by.Role == RoleAdministrator {
		by = proto.CloneOf(actor)
	}
	at := s.Asked.StoredAt
	return s, []Command{
		TellAttached{&identityv1.Attached{Session: ref, By: by, Reason: ask.GetReason(), Verbs: verbs, At: stamp(at), Until: stamp(at.Add(AttachFor))}},
		MintAttach{Record: r, HostKey: e.HostKey, Actor: actor, Verbs: verbs},
	}, nil
}

func stateWord(s corev1.State) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "STATE_"))
}

// attachVerbs are what the grant is good for, sorted, each once; looking and
// changing nothing unless more was asked for.
func attachVerbs(asked []string) []string {
	if len(asked) == 0 {
		return []string{"read"}
	}
	out := slices.Clone(asked)
	slices.Sort(out)
	return slices.Compact(out)
}

func screenAdminSessions(r *identityv1.AdminSessionsRequest) error {
	switch {
	case len(r.GetAfter()) > maxCursor:
		return refuse(errkind.Invalid, "after is not the next of an answer")
	case (r.GetIssuer() == "") != (r.GetSubject() == ""):
		return refuse(errkind.Invalid, "a user is named by issuer and subject together")
	}
	return screenPrincipal(r.GetIssuer(), r.GetSubject())
}

func screenPrincipal(issuer, subject string) error {
	if len(issuer) > 1024 || len(subject) > maxSubject {
		return refuse(errkind.TooLarge, "an issuer has at most 1024 bytes and a subject at most %d", maxSubject)
	}
	return nil
}

// screenAttach checks what both kinds of attaching ask for; a handle is of
// administrators, tenant and session key are of operators.
func screenAttach(r *identityv1.AdminAttachRequest, door string) error {
	if err := screenReason(r.GetReason()); err != nil {
		return err
	}
	if door == Console {
		if _, err := ids.ParseTenant(r.GetTenant()); err != nil || r.GetHandle() != "" {
			return refuse(errkind.Invalid, "an operator names the session by tenant and session key")
		}
		if _, err := ids.ParseSessionKey(r.GetSession()); err != nil {
			return refuse(errkind.Invalid, "the session key is malformed")
		}
	} else if h := r.GetHandle(); h == "" || len(h) > maxHandle || r.GetTenant() != "" || r.GetSession() != "" {
		return refuse(errkind.Invalid, "an administrator names the session by its handle alone")
	}
	if r.GetIssuer() == "" || r.GetSubject() == "" {
		return refuse(errkind.Invalid, "the user whose session it is must be named by issuer and subject")
	}
	if err := screenPrincipal(r.GetIssuer(), r.GetSubject()); err != nil {
		return err
	}
	if r.GetGeneration().GetIndex() == 0 {
		return refuse(errkind.Invalid, "the generation that the session must have is not named")
	}
	return screenVerbs(r.GetVerbs())
}

func screenReason(reason string) error {
	if n := len(reason); n == 0 || n > maxReason || strings.TrimSpace(reason) == "" {
		return refuse(errkind.Invalid, "a reason of 1 to %d bytes is needed; the user can read it", maxReason)
	}
	if strings.ContainsFunc(reason, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return refuse(errkind.Invalid, "the reason is one line of text without control characters")
	}
	return nil
}

// screenVerbs refuses what no grant is good for.
func screenVerbs(verbs []string) error {
	if len(verbs) > 16 {
		return refuse(errkind.Invalid, "that are too many verbs; exec, files, ports and read exist")
	}
	for _, v := range verbs {
		if !slices.Contains([]string{"exec", "files", "ports", "read"}, v) {
			return refuse(errkind.Invalid, "a grant has no such verb; exec, files, ports and read exist")
		}
	}
	return nil
}

func screenAdminSuspend(r *identityv1.AdminSuspendRequest) error {
	if r.GetIssuer() == "" || r.GetSubject() == "" {
		return refuse(errkind.Invalid, "the user must be named by issuer and subject")
	}
	if err := screenPrincipal(r.GetIssuer(), r.GetSubject()); err != nil {
		return err
	}
	return screenReason(r.GetReason())
}

// about adds to a record what was asked about another user, and why.
func (s State) about(rec *identityv1.Audit) {
	b := s.Asked.Body
	issuer, subject := b.AdminAttach.GetIssuer(), b.AdminAttach.GetSubject()
	rec.Reason = b.AdminAttach.GetReason()
	if b.AdminSuspend != nil {
		issuer, subject, rec.Reason = b.AdminSuspend.GetIssuer(), b.AdminSuspend.GetSubject(), b.AdminSuspend.GetReason()
	}
	if screenReason(rec.Reason) != nil {
		rec.Reason = ""
	}
	if subject != "" && screenPrincipal(issuer, subject) == nil {
		rec.About = &corev1.Actor{Tenant: rec.GetActor().GetTenant(), Issuer: issuer, Subject: subject}
	}
	if s.On != nil {
		rec.Session = s.On.GetSession().GetSession()
	}
}
