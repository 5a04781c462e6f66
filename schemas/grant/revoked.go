package grant

import (
	"time"

	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Revocation says that all grants of one generation are dead. Until is when
// the last of them has expired by itself.
type Revocation struct {
	Tenant     ids.Tenant
	Session    ids.SessionKey
	Generation ids.Generation
	Until      time.Time
}

// Ending says that the grants that it matches ended before their time: those
// of Tenant whose every other field is equal or is empty here, and that were
// issued at or before At.
type Ending struct {
	Scope
	At    time.Time
	Until time.Time
}

// Scope is whose grants end. Tenant is needed; Subject needs Issuer. An empty
// field matches all.
type Scope struct {
	Tenant   ids.Tenant
	Issuer   string
	Subject  string
	Frontend ids.Frontend
}

// Check holds a scope to its form; kind Invalid.
func (s Scope) Check() error {
	if _, err := ids.ParseTenant(string(s.Tenant)); err != nil {
		return refuse(errkind.Invalid, "grants are ended for one tenant, and none is named")
	}
	if s.Subject != "" && s.Issuer == "" {
		return refuse(errkind.Invalid, "a subject is named without its issuer")
	}
	if s.Frontend != "" {
		if _, err := ids.ParseFrontend(string(s.Frontend)); err != nil {
			return refuse(errkind.Invalid, "the frontend whose grants are to end has no proper name")
		}
	}
	return nil
}

// scopes are all that match a grant for this principal by this frontend.
func scopes(t ids.Tenant, p Principal, f ids.Frontend) [6]Scope {
	return [6]Scope{
		{Tenant: t}, {Tenant: t, Issuer: p.Issuer}, {Tenant: t, Issuer: p.Issuer, Subject: p.Subject},
		{Tenant: t, Frontend: f}, {Tenant: t, Issuer: p.Issuer, Frontend: f},
		{Tenant: t, Issuer: p.Issuer, Subject: p.Subject, Frontend: f},
	}
}

// Endings is a set of endings, one for each scope; the latest time counts.
type Endings map[Scope]Ending

// Last is the latest time at which grants for this principal by this frontend
// were ended, zero if never.
func (e Endings) Last(t ids.Tenant, p Principal, f ids.Frontend) time.Time {
	var last time.Time
	if len(e) == 0 {
		return last
	}
	for _, s := range scopes(t, p, f) {
		if end, ok := e[s]; ok && end.At.After(last) {
			last = end.At
		}
	}
	return last
}

// Add puts an ending into the set. A later time of the same scope counts.
func (e Endings) Add(end Ending) {
	if had, ok := e[end.Scope]; ok {
		if had.At.After(end.At) {
			end.At = had.At
		}
		if had.Until.After(end.Until) {
			end.Until = had.Until
		}
	}
	e[end.Scope] = end
}

type revokedKey struct {
	tenant     ids.Tenant
	session    ids.SessionKey
	generation ids.Generation
}

// Alive reports, as nil, that no revocation in force meets these claims.
// Kinds: Superseded (the generation was deleted), Denied (the right of the
// user or of the frontend was taken away).
func (v *Verifier) Alive(c Claims) error {
	if _, dead := v.revoked[revokedKey{c.Tenant, c.Session, c.Generation}]; dead {
		return refuse(errkind.Superseded, "the session of this grant was deleted")
	}
	if last := v.ended.Last(c.Tenant, c.Principal, c.Frontend); !last.IsZero() && c.IssuedAt <= last.Unix() {
		return refuse(errkind.Denied, "the grant was ended before its time: what it was given for was taken away")
	}
	return nil
}

// FromReply makes a verifier from the answer of credentials.jwks. A list that
// has an entry without a proper form is refused whole: what it revokes cannot
// be known.
func FromReply(r *credentialsv1.JwksReply) (*Verifier, error) {
	revoked := make([]Revocation, 0, len(r.GetRevoked()))
	for _, g := range r.GetRevoked() {
		at := Revocation{
			Tenant: ids.Tenant(g.GetTenant()), Session: ids.SessionKey(g.GetSession()),
			Generation: GenerationOf(g.GetGeneration()), Until: g.GetUntil().AsTime(),
		}
		if at.Tenant == "" || at.Session == "" || at.Generation.IsZero() {
			return nil, refuse(errkind.Invalid, "the list of revocations has an entry that names no generation")
		}
		revoked = append(revoked, at)
	}
	ended := make([]Ending, 0, len(r.GetEnded()))
	for _, e := range r.GetEnded() {
		end := Ending{Scope: Scope{Tenant: ids.Tenant(e.GetTenant()), Issuer: e.GetIssuer(), Subject: e.GetSubject(),
			Frontend: ids.Frontend(e.GetFrontend())}, At: e.GetAt().AsTime(), Until: e.GetUntil().AsTime()}
		if e.GetAt().CheckValid() != nil {
			return nil, refuse(errkind.Invalid, "the list of revocations has an entry without a time")
		}
		ended = append(ended, end)
	}
	return NewVerifier(r.GetJwks(), revoked, ended)
}
