// Package core decides, without any I/O, whether a request is let in, as
// whom, and what is asked of whom on its behalf. It guarantees that nothing
// is handed on before every check has passed; that the tenant comes from the
// registry and equals the one that the bus login proves; that issuer and
// subject are taken byte for byte; and that session keys are derived, never
// believed.
package core

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Verbs of both doors; renew and status have the direct door only.
const (
	Open   = "open"
	Close  = "close"
	Delete = "delete"
	Renew  = "renew"
	Status = "status"
)

// Doors.
const (
	Direct  = "direct"
	Durable = "durable"
)

// Policy is what identity goes by. It does not change while a request is
// decided.
type Policy struct {
	Entries []Entry
	// SessionKeys are the live versions of the derivation key, newest first.
	SessionKeys [][]byte
	// Tenants and Frontends are known ones; one that is missing is not suspended. Users are suspended ones.
	Tenants   map[ids.Tenant]TenantRules
	Frontends map[FrontendID]LoginRules
	Users     map[Principal]UserRules
}

// Entry maps an issuer and an audience to a tenant.
type Entry struct {
	Issuer   string
	Audience string
	Tenant   ids.Tenant
	// Plan of users whose token names none.
	Plan  string
	Floor corev1.Tier
	// Frontends that may carry such tokens; empty means every one of the tenant.
	Frontends []ids.Frontend
	// Tolerance is how far the issuer's clock may differ: zero means 30 s, less than zero not at all.
	Tolerance time.Duration
	// PlanClaim names the claim whose values Plans maps to plans; empty means none.
	PlanClaim string
	Plans     map[string]string
	// GroupsClaim names the claim that lists groups; tokens with one of AdminGroups are of administrators.
	GroupsClaim string
	AdminGroups []string
}

// Token holds the facts of a token whose signature is good.
type Token struct {
	Issuer    string
	Subject   string
	Audience  []string
	Expires   time.Time
	NotBefore time.Time // zero when absent
	IssuedAt  time.Time // zero when absent
	// Acting is who acts for the subject, by the outermost act claim (RFC 8693); empty: nobody.
	Acting string
	// Claims are the rest; nil means none.
	Claims Claims
}

// State is one request under way.
type State struct {
	Policy   Policy
	Asked    Asked
	Name     ids.SessionName
	Verified *lifecyclev1.Verified
	// On is the session of another user that is attached to.
	On *schedulerv1.SessionRecord
}

// Refusal is why a request is not let in.
type Refusal struct {
	Kind   errkind.Kind
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

func refuse(kind errkind.Kind, format string, args ...any) error {
	return &Refusal{kind, fmt.Sprintf(format, args...)}
}

// Event is what the shell learned.
type Event interface{ event() }

// Asked: a request came through a door and its envelope was opened. Exactly
// one of the bodies is set, as the verb says.
type Asked struct {
	Door     string
	Tenant   ids.Tenant // of the subject
	Frontend ids.Frontend
	Verb     string // of the subject
	StoredAt time.Time
	Envelope *identityv1.Envelope
	Body     Body
}

// Body is the decoded body of the envelope.
type Body struct {
	Open   *identityv1.OpenRequest
	Close  *identityv1.CloseRequest
	Delete *identityv1.DeleteRequest
	Renew  *identityv1.RenewRequest
	Status *identityv1.StatusRequest
	// Of delegation.go and admin.go; an operator's request has AdminAttach too.
	Frontends      *identityv1.FrontendsRequest
	RevokeFrontend *identityv1.RevokeFrontendRequest
	AdminSessions  *identityv1.AdminSessionsRequest
	AdminAttach    *identityv1.AdminAttachRequest
	AdminSuspend   *identityv1.AdminSuspendRequest
	// Fault says why the body could not be decoded.
	Fault string
}

// TokenGood: the signature of the token was verified with a key of its issuer.
type TokenGood struct {
	Token Token
	// Revoked: its user took from the frontend the right to act for them.
	Revoked bool
}

// TokenBad: it was not; Kind is Unavailable if the issuer's keys could not be
// fetched.
type TokenBad struct {
	Kind   errkind.Kind
	Reason string
}

// Awake: lifecycle opened the session. State is the session's own now: other
// than active when the answer is the stored one of an earlier request.
type Awake struct {
	Session *corev1.SessionRef
	State   corev1.State
	// Revoked: meanwhile the user took from the frontend the right to act for them.
	Revoked bool
}

func (Asked) event()     {}
func (TokenGood) event() {}
func (TokenBad) event()  {}
func (Awake) event()     {}

// Command is what the shell has to do next.
type Command interface{ command() }

// VerifyToken: check the signature of the envelope's token.
type VerifyToken struct{}

// CallLifecycle: hand the request on; the verb says which method.
type CallLifecycle struct{}

// CallRenew: have credentials renew the grant. Actor has no issuer and no
// subject when no live token came along.
type CallRenew struct {
	Actor    *corev1.Actor
	Verified time.Time
	Expires  time.Time
}

// CallList: ask scheduler for the principal's own sessions.
type CallList struct{ Actor *corev1.Actor }

// Mint: have credentials mint a grant for the session.
type Mint struct{ Session *corev1.SessionRef }

// Audit: record what was decided. An admission comes before what follows from
// it and has a Once: the same request has the same id at each repetition.
type Audit struct {
	Record *identityv1.Audit
	Once   []byte
}

func (VerifyToken) command()   {}
func (CallLifecycle) command() {}
func (CallRenew) command()     {}
func (CallList) command()      {}
func (Mint) command()          {}
func (Audit) command()         {}

// Decide takes one request one step on. With an error comes only the command
// to record it, and the request has ended.
func Decide(s State, ev Event, now time.Time) (State, []Command, error) {
	var cmds []Command
	var err error
	switch e := ev.(type) {
	case Asked:
		s.Asked = e
		s, cmds, err = asked(s)
	case TokenGood:
		s, cmds, err = tokenGood(s, e)
	case TokenBad:
		err = refuse(e.Kind, "%s", e.Reason)
	case Awake:
		cmds, err = awake(s, e)
	case Found:
		s, cmds, err = found(s, e)
	default:
		err = refuse(errkind.Internal, "unknown event %T", ev)
	}
	if err != nil {
		return s, []Command{s.audit(err, now)}, err
	}
	if s.admits(ev) { // recorded before anything acts on it
		cmds = slices.Insert(cmds, 0, Command(s.audit(nil, now)))
	}
	return s, cmds, nil
}

// admits reports whether ev was the last check before the request is handed
// on.
func (s State) admits(ev Event) bool {
	switch ev.(type) {
	case TokenGood:
		return s.Asked.Verb != AdminAttach
	case Found:
		return true
	case Asked:
		return s.Asked.Verb == Renew && s.Asked.Envelope.GetToken() == ""
	}
	return false
}

// Actor is whoever is known so far: the frontend from the subject, the
// principal once its token was verified.
func (s State) Actor() *corev1.Actor {
	if s.Verified != nil {
		return s.Verified.GetActor()
	}
	return &corev1.Actor{Tenant: string(s.Asked.Tenant), Frontend: string(s.Asked.Frontend)}
}

// Session is the derived key of the session, if it is known already.
func (s State) Session() ids.SessionKey {
	if keys := s.Verified.GetKeys(); len(keys) > 0 {
		return ids.SessionKey(keys[0])
	}
	return ""
}

func (s State) audit(err error, now time.Time) Audit {
	rec := NewAudit(s.Asked, err, now)
	rec.Actor, rec.Session = s.Actor(), string(s.Session())
	s.about(rec)
	a := Audit{Record: rec}
	if err == nil {
		a.Once = s.once()
	}
	return a
}

// once identifies a request that was admitted: who asked for what, under which
// request id. The body names the session, so that a new version of the session
// key changes nothing. The scheduler answers an open, a close or a delete that
// was asked for before with what came of it, for as long as the record is known;
// any other verb acts once more for each envelope, and is recorded for each.
func (s State) once() []byte {
	a, who := s.Asked, s.Actor()
	h := sha256.New()
	if a.Verb != Open && a.Verb != Close && a.Verb != Delete {
		at := a.Envelope.GetTime()
		writeField(h, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, uint64(at.GetSeconds())), uint32(at.GetNanos())))
		writeField(h, []byte(a.Envelope.GetReplyKey()))
		writeField(h, a.Envelope.GetProofKey())
	}
	for _, f := range [][]byte{[]byte("berth/v1/admission"), []byte(a.Door), []byte(a.Tenant), []byte(a.Frontend), []byte(who.GetIssuer()), []byte(who.GetSubject()),
		[]byte(a.Envelope.GetRequestId()), BodyHash(a.Verb, a.Envelope.GetBody())} {
		writeField(h, f)
	}
	return h.Sum(nil)
}

func tokenGood(s State, e TokenGood) (State, []Command, error) {
	tok := e.Token
	entry, err := s.match(tok)
	if err != nil {
		return s, nil, err
	}
	if live, err := timely(tok, s.Asked.StoredAt, entry.skewOf()); err != nil {
		if live || s.Asked.Verb != Renew {
			return s, nil, err
		}
		// An expired token adds nothing to a renewal and takes nothing away.
		return s, []Command{CallRenew{Actor: s.Actor()}}, nil
	}
	if err := s.Policy.shutUser(Principal{entry.Tenant, tok.Issuer, tok.Subject}); err != nil {
		return s, nil, err
	}
	if err := s.delegated(tok, e.Revoked); err != nil {
		return s, nil, err
	}
	switch {
	case administrative(s.Asked.Verb):
		return s.administer(entry, tok)
	case s.Asked.Verb == Frontends, s.Asked.Verb == RevokeFrontend:
		return s.settleFrontends(entry, tok)
	}
	plan, err := entry.planOf(tok)
	if err != nil {
		return s, nil, err
	}
	actor := s.actorOf(entry, tok)
	keys := make([]string, 0, len(s.Policy.SessionKeys))
	for _, k := range s.Policy.SessionKeys {
		keys = append(keys, string(ids.DeriveSessionKey(k, tok.Issuer, entry.Tenant, tok.Subject, s.Name)))
	}
	if named := s.Asked.Body.Open.GetSessionKey(); named != "" && !slices.Contains(keys, named) {
		return s, nil, refuse(errkind.Denied, "the session key in the request is not that of this user and session name")
	}
	if wish := s.Asked.Body.Open.GetPlan(); wish != "" && wish != plan {
		return s, nil, refuse(errkind.Refused, "the plan asked for is not the one that this user has")
	}
	s.Verified = &lifecyclev1.Verified{
		Actor: actor, RequestId: s.Asked.Envelope.GetRequestId(), BodyHash: BodyHash(s.Asked.Verb, s.Asked.Envelope.GetBody()),
		StoredAt: stamp(s.Asked.StoredAt), Keys: keys, SessionName: string(s.Name), Plan: plan, TenantFloor: entry.Floor,
	}
	switch s.Asked.Verb {
	case Renew:
		return s, []Command{CallRenew{Actor: actor, Verified: s.Asked.StoredAt, Expires: tok.Expires}}, nil
	case Status:
		return s, []Command{CallList{actor}}, nil
	}
	return s, []Command{CallLifecycle{}}, nil
}

// match finds the registry's entry for a token, and refuses a token that the
// frontend may not carry.
func (s State) match(tok Token) (Entry, error) {
	e, err := s.Policy.Find(tok)
	if err != nil {
		return Entry{}, err
	}
	if e.Tenant != s.Asked.Tenant {
		return Entry{}, refuse(errkind.Denied, "the token belongs to another tenant than the frontend that carried it")
	}
	if len(e.Frontends) > 0 && !slices.Contains(e.Frontends, s.Asked.Frontend) {
		return Entry{}, refuse(errkind.Denied, "this frontend may not carry tokens of this issuer")
	}
	return e, nil
}

// timely judges the token at the time that the request was stored. live is
// false only if the token has merely expired.
func timely(tok Token, stored time.Time, skew time.Duration) (live bool, err error) {
	switch {
	case tok.Expires.IsZero():
		return true, refuse(errkind.Unauthenticated, "the token never expires; such tokens are not accepted")
	case tok.NotBefore.After(stored.Add(skew)):
		return true, refuse(errkind.Unauthenticated, "the token is not valid yet")
	case tok.IssuedAt.After(stored.Add(skew)):
		return true, refuse(errkind.Unauthenticated, "the token was issued in the future")
	case !stored.Before(tok.Expires.Add(skew)):
		return false, refuse(errkind.Unauthenticated, "the token had expired when the request was stored; sign in again")
	}
	return true, nil
}

// awake lets a grant be minted for a session that is active, and only then: a
// replay may come long after its session slept, failed or was deleted.
func awake(s State, e Awake) ([]Command, error) {
	ref := e.Session
	if err := stillWelcome(e.Revoked); err != nil {
		return nil, err
	}
	if ref.GetTenant() != s.Verified.GetActor().GetTenant() || !slices.Contains(s.Verified.GetKeys(), ref.GetSession()) {
		return nil, refuse(errkind.Internal, "another session was opened than the one asked for")
	}
	if ref.GetGeneration().GetIndex() == 0 || ref.GetEpoch().GetIndex() == 0 {
		return nil, refuse(errkind.Internal, "the session was opened without a generation or an epoch")
	}
	if e.State != corev1.State_STATE_ACTIVE {
		return nil, refuse(errkind.Superseded, "this request opened the session before, and it is not active any more (%s); open it again with a new request id",
			strings.ToLower(strings.TrimPrefix(e.State.String(), "STATE_")))
	}
	return []Command{Mint{ref}}, nil
}

// BodyHash is the hash that makes a request id good for one body only:
// SHA-256 over domain, verb and body, each with its length before it.
func BodyHash(verb string, body []byte) []byte {
	h := sha256.New()
	for _, f := range [][]byte{[]byte("berth/v1/request"), []byte(verb), body} {
		writeField(h, f)
	}
	return h.Sum(nil)
}

// writeField writes a field after its length.
func writeField(h hash.Hash, f []byte) {
	h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(f))))
	h.Write(f)
}
