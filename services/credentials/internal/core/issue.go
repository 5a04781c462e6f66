package core

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
)

func claimsOf(e Mint) grant.Claims {
	return grant.Claims{
		Issuer: grant.Issuer, ID: e.ID, Tenant: e.Session.Tenant, Frontend: e.Actor.Frontend, Session: e.Session.Session,
		Generation: e.Session.Generation.Generation, Epoch: e.Session.Epoch, Host: e.Host,
		Principal: grant.Principal{Issuer: e.Actor.Issuer, Subject: e.Actor.Subject},
		Confirm:   e.Confirm, AuthTime: e.Verified.Unix(), Verbs: e.Verbs, Once: e.Once,
	}
}

// mint judges a request for a new grant. What was asked before the right to it
// was taken away gets none, however long the answer took.
func mint(s State, e Mint, now time.Time) (State, []Command, error) {
	c, life := claimsOf(e), s.Policy.TTL
	last := s.lastEnding(c)
	switch {
	case !last.IsZero() && !e.Verified.After(last):
		return refused(s, e.Session, e.Actor, refuse(errkind.Denied, "what this grant is for was taken away after it was asked for"))
	case e.TTL != 0 && !e.Once:
		return refused(s, e.Session, e.Actor, refuse(errkind.Invalid, "a grant of a shorter life must be one that cannot be renewed"))
	case e.TTL != 0 && (e.TTL < MinTTL || e.TTL > MaxTTL):
		return refused(s, e.Session, e.Actor, refuse(errkind.Invalid, "a grant lives %s to %s", MinTTL, MaxTTL))
	case e.TTL != 0:
		life = min(life, e.TTL)
	}
	return issue(s, c, life, issuing{"issued", e.Session, e.Actor}, now)
}

func refused(s State, on Session, actor Actor, err error) (State, []Command, error) {
	return s, []Command{Audit{What: "refused", Session: on, Actor: actor, Reason: err.Error()}}, err
}

// issuing is what the record of a grant says.
type issuing struct {
	what  string
	on    Session
	actor Actor
}

// issue gives a grant with these claims its times.
func issue(s State, c grant.Claims, life time.Duration, as issuing, now time.Time) (State, []Command, error) {
	fail := func(kind errkind.Kind, format string, args ...any) (State, []Command, error) {
		return refused(s, as.on, as.actor, refuse(kind, format, args...))
	}
	if as.actor.Tenant != as.on.Tenant {
		return fail(errkind.Denied, "the session belongs to another tenant")
	}
	if _, dead := s.Revoked[as.on.Generation]; dead {
		return fail(errkind.Superseded, "the session was deleted")
	}
	key, ok := s.signing(now)
	if !ok {
		return fail(errkind.Unavailable, "there is no signing key yet; try again in a moment")
	}
	verified := time.Unix(c.AuthTime, 0)
	if verified.After(now.Add(grant.Skew)) {
		return fail(errkind.Invalid, "the user's token was verified in the future")
	}
	if verified.After(now) {
		c.AuthTime = now.Unix()
	}
	expires := now.Add(life)
	if most := verified.Add(s.Policy.MaxAuth); expires.After(most) {
		expires = most
	}
	if !expires.Truncate(time.Second).After(now) {
		return fail(errkind.Expired, "the user signed in more than %s ago; sign in again and open the session", s.Policy.MaxAuth)
	}
	// iat counts seconds: a grant of the very second of an ending is given the next one, or it would
	// be among those that ended.
	c.IssuedAt, c.Expires = now.Unix(), expires.Unix()
	if last := s.lastEnding(c); !last.IsZero() && last.Unix() >= c.IssuedAt {
		c.IssuedAt = last.Unix() + 1
	}
	if c.IssuedAt >= c.Expires {
		return fail(errkind.Unavailable, "the clock was set back, and grants like this one were ended after now; try again later")
	}
	s.Latest = max(s.Latest, c.IssuedAt)
	return s, []Command{
		Sign{key, c},
		Audit{What: as.what, Session: as.on, Actor: as.actor, GrantID: c.ID, Expires: c.ExpiresAt()},
	}, nil
}

func renew(s State, e Renew, now time.Time) (State, []Command, error) {
	on := Session{Generation{e.Old.Tenant, e.Old.Session, e.Old.Generation}, e.Old.Epoch}
	who := e.Actor
	fail := func(reason string) (State, []Command, error) {
		return s, []Command{Audit{What: "refused", Session: on, Actor: who, GrantID: e.Old.ID, Reason: reason}},
			refuse(errkind.Denied, "%s", reason)
	}
	if who.Tenant != e.Old.Tenant || who.Frontend != e.Old.Frontend {
		return fail("the grant was given to another frontend")
	}
	if e.Old.Once {
		return fail("the grant cannot be renewed; ask for a new one")
	}
	if last := s.lastEnding(e.Old); !last.IsZero() && e.Old.IssuedAt <= last.Unix() {
		return fail("the grant was ended before its time")
	}
	named := who.Issuer != "" || who.Subject != ""
	if named && (who.Issuer != e.Old.Principal.Issuer || who.Subject != e.Old.Principal.Subject) {
		return fail("the grant was given to another user")
	}
	who.Issuer, who.Subject = e.Old.Principal.Issuer, e.Old.Principal.Subject
	c := e.Old
	c.ID = e.ID
	if named && e.Verified.Unix() > c.AuthTime {
		c.AuthTime = e.Verified.Unix()
	}
	return issue(s, c, s.Policy.TTL, issuing{"renewed", on, who}, now)
}
