package core

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Bounds of a request.
const (
	MaxBody    = 16 << 10
	maxToken   = 16 << 10
	maxSubject = 255
	maxNote    = 256
	maxWait    = 10 * time.Minute
	// maxAge is how old an envelope may be when the bus stores it.
	maxAge = 2 * time.Minute
	// skew is how far another clock may differ from ours.
	skew = 30 * time.Second
)

// NewAudit makes the record of a request before anything but its subject is
// known; Decide fills in the rest.
func NewAudit(a Asked, err error, now time.Time) *identityv1.Audit {
	rec := &identityv1.Audit{
		Verb: printable(a.Verb), RequestId: printable(a.Envelope.GetRequestId()), Door: a.Door, Admitted: err == nil, At: stamp(now),
		Actor: &corev1.Actor{Tenant: string(a.Tenant), Frontend: string(a.Frontend)},
	}
	if err != nil {
		rec.Failure = FailureOf(err)
	}
	return rec
}

// FailureOf is the failure that a refusal becomes on the wire.
func FailureOf(err error) *corev1.Failure {
	if r, ok := err.(*Refusal); ok {
		return &corev1.Failure{Kind: r.Kind.String(), Reason: r.Reason}
	}
	return &corev1.Failure{Kind: errkind.Internal.String(), Reason: "an unexpected fault"}
}

// printable keeps absurd input out of records.
func printable(s string) string {
	if s == "" || ids.IsToken(s) {
		return s
	}
	return "(malformed)"
}

func stamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t) }

// asked screens a request before its token is looked at.
func asked(s State) (State, []Command, error) {
	a := s.Asked
	if err := screenVerb(a.Verb, a.Door); err != nil {
		return s, nil, err
	}
	if err := screenEnvelope(a); err != nil {
		return s, nil, err
	}
	if err := s.Policy.shutFrontend(FrontendID{a.Tenant, a.Frontend}); err != nil {
		return s, nil, err
	}
	name, err := screenBody(a)
	if err != nil {
		return s, nil, err
	}
	s.Name = name
	if a.Verb == OperatorAttach {
		return s.operator()
	}
	if a.Envelope.GetToken() == "" {
		if a.Verb != Renew {
			return s, nil, refuse(errkind.Unauthenticated, "there is no token of the user in the request")
		}
		return s, []Command{CallRenew{Actor: s.Actor()}}, nil
	}
	return s, []Command{VerifyToken{}}, nil
}

func screenVerb(verb, door string) error {
	switch verb {
	case Open, Close, Delete:
		return nil
	case OperatorAttach:
		if door == Console {
			return nil
		}
	case Renew, Status, Frontends, RevokeFrontend, AdminSessions, AdminAttach, AdminSuspend:
		if door == Direct {
			return nil
		}
		return refuse(errkind.Invalid, "%s has the direct door only", verb)
	}
	return refuse(errkind.Invalid, "there is no such verb")
}

func screenEnvelope(a Asked) error {
	e := a.Envelope
	if e.GetVerb() != a.Verb {
		return refuse(errkind.Invalid, "the verb in the envelope is not that of the subject")
	}
	if _, err := ids.ParseRequestID(e.GetRequestId()); err != nil {
		return refuse(errkind.Invalid, "the request id must be 1 to %d characters of a-z, 0-9, _ and -", ids.MaxToken)
	}
	if len(e.GetToken()) > maxToken {
		return refuse(errkind.TooLarge, "the token is %d bytes long, at most %d are allowed", len(e.GetToken()), maxToken)
	}
	if len(e.GetBody()) > MaxBody {
		return refuse(errkind.TooLarge, "the body is %d bytes long, at most %d are allowed", len(e.GetBody()), MaxBody)
	}
	if sum := sha256.Sum256(e.GetBody()); !bytes.Equal(sum[:], e.GetBodyHash()) {
		return refuse(errkind.Invalid, "the body hash in the envelope is not the SHA-256 of the body")
	}
	needsProof := a.Verb == Open || a.Verb == Renew || a.Verb == AdminAttach || a.Verb == OperatorAttach
	if n := len(e.GetProofKey()); n != ed25519.PublicKeySize && (needsProof || n != 0) {
		return refuse(errkind.Invalid, "the proof key is %d bytes long, an Ed25519 public key has %d", n, ed25519.PublicKeySize)
	}
	if e.GetTime() == nil || e.GetTime().CheckValid() != nil {
		return refuse(errkind.Invalid, "the envelope is not dated")
	}
	at := e.GetTime().AsTime()
	if at.After(a.StoredAt.Add(skew)) {
		return refuse(errkind.Invalid, "the envelope is dated in the future; set the clock of the client")
	}
	if a.StoredAt.Sub(at) > maxAge {
		return refuse(errkind.Expired, "the envelope was more than %s old when the request was stored; make a new one", maxAge)
	}
	return nil
}

func screenBody(a Asked) (ids.SessionName, error) {
	b := a.Body
	if b.Fault != "" {
		return "", refuse(errkind.Invalid, "%s", b.Fault)
	}
	switch a.Verb {
	case Open:
		if err := screenOpen(b.Open); err != nil {
			return "", err
		}
		return sessionName(b.Open.GetSessionName())
	case Close:
		return sessionName(b.Close.GetSessionName())
	case Delete:
		return sessionName(b.Delete.GetSessionName())
	case Renew:
		if b.Renew.GetGrant() == "" || len(b.Renew.GetProof()) != ed25519.SignatureSize {
			return "", refuse(errkind.Invalid, "a renewal carries the grant held now and a signature of %d bytes", ed25519.SignatureSize)
		}
		return sessionName(b.Renew.GetSessionName())
	case RevokeFrontend:
		return "", screenRevokeFrontend(b.RevokeFrontend.GetFrontend())
	case AdminSessions:
		return "", screenAdminSessions(b.AdminSessions)
	case AdminAttach, OperatorAttach:
		return "", screenAttach(b.AdminAttach, a.Door)
	case AdminSuspend:
		return "", screenAdminSuspend(b.AdminSuspend)
	}
	return sessionName(b.Status.GetSessionName())
}

func sessionName(s string) (ids.SessionName, error) {
	if s == "" {
		return ids.DefaultSession, nil
	}
	name, err := ids.ParseSessionName(s)
	if err != nil {
		return "", refuse(errkind.Invalid, "the session name must be 1 to %d characters of a-z, 0-9, _ and -", ids.MaxToken)
	}
	return name, nil
}

// defaultWait is how long an open waits for capacity unless it says.
const defaultWait = time.Minute

// Wait is how long an open waits for capacity, as it asked or by default.
func Wait(o *identityv1.OpenRequest) time.Duration {
	if d := o.GetWait().AsDuration(); d > 0 {
		return min(d, maxWait)
	}
	return defaultWait
}

func screenOpen(o *identityv1.OpenRequest) error {
	if t := o.GetTemplate(); t != "" {
		if _, err := ids.ParseTemplate(t); err != nil {
			return refuse(errkind.Invalid, "the template name must be 1 to %d characters of a-z, 0-9, _ and -", ids.MaxToken)
		}
	}
	if k := o.GetSessionKey(); k != "" {
		if _, err := ids.ParseSessionKey(k); err != nil {
			return refuse(errkind.Invalid, "the session key is malformed")
		}
	}
	if _, ok := corev1.Persistence_name[int32(o.GetPersistence())]; !ok {
		return refuse(errkind.Invalid, "there is no such persistence; durable and ephemeral exist")
	}
	if _, ok := corev1.Tier_name[int32(o.GetMinTier())]; !ok {
		return refuse(errkind.Invalid, "there is no such isolation tier")
	}
	if w := o.GetWait(); w != nil && (w.CheckValid() != nil || w.AsDuration() <= 0 || w.AsDuration() > maxWait) {
		return refuse(errkind.Invalid, "the time to wait for capacity must be more than 0 and at most %s", maxWait)
	}
	if o.GetBudgetReservation() != "" {
		return refuse(errkind.Refused, "budget reservations are not offered in this release")
	}
	if err := screenVerbs(o.GetVerbs()); err != nil {
		return err
	}
	for _, note := range []string{o.GetRisk().GetDataClass(), o.GetLegacyReference(), o.GetPlan()} {
		if len(note) > maxNote {
			return refuse(errkind.TooLarge, "data class, plan and legacy reference are at most %d bytes long", maxNote)
		}
	}
	return nil
}
