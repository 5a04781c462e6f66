package core

import (
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// Verbs with which a user sees, and settles, who may act for them.
const (
	Frontends      = "frontends"
	RevokeFrontend = "revoke_frontend"
)

// CallFrontends: list which frontends acted for the actor.
type CallFrontends struct{ Actor *corev1.Actor }

// CallRevokeFrontend: take the right to act for the actor from a frontend, or
// give it back.
type CallRevokeFrontend struct {
	Actor    *corev1.Actor
	Frontend ids.Frontend
	Allow    bool
}

func (CallFrontends) command()      {}
func (CallRevokeFrontend) command() {}

// delegated judges whether the frontend may act for the user of a token whose
// entry was found. A frontend acts for a user with the user's own token, or
// with one that was exchanged for this very frontend (RFC 8693): then the
// outermost act claim, the party that acts now, is the one that the registry
// has for the frontend's login. Actors nested in it are of the past and count
// for nothing (section 4.1).
func (s State) delegated(tok Token, revoked bool) error {
	f := s.Asked.Frontend
	if subjects.IsUserFrontend(f) && f != subjects.UserFrontend(tok.Issuer, tok.Subject) {
		return refuse(errkind.Denied, "a user's own login carries the tokens of that user alone")
	}
	if err := StillActs(revoked); err != nil {
		return err
	}
	if tok.Acting == "" {
		return nil
	}
	switch allowed := s.Policy.Frontends[FrontendID{s.Asked.Tenant, f}].Acting; {
	case allowed == "":
		return refuse(errkind.Denied, "the token was exchanged for a party that acts for its user, and this frontend carries users' own tokens only")
	case allowed != tok.Acting:
		return refuse(errkind.Denied, "the token was exchanged for another party than this frontend")
	case s.Asked.Verb == RevokeFrontend:
		return refuse(errkind.Denied, "who may act for a user is settled with the user's own token, not with an exchanged one")
	case administrative(s.Asked.Verb):
		return refuse(errkind.Denied, "an administrator asks with a token of their own, not with an exchanged one")
	}
	return nil
}

// StillActs refuses a frontend from which the user took the right to act for
// them.
func StillActs(revoked bool) error {
	if revoked {
		return refuse(errkind.Denied, "the user has taken from this frontend the right to act for them")
	}
	return nil
}

// stillWelcome refuses to mint for a session that was asked for by a frontend
// from which the user took the right while it woke.
func stillWelcome(revoked bool) error {
	if revoked {
		return refuse(errkind.Denied, "the user has taken from this frontend the right to act for them, while the session woke")
	}
	return nil
}

// settleFrontends is what a user wants to know, or done, about frontends. It
// is about no session, so that no key is derived.
func (s State) settleFrontends(entry Entry, tok Token) (State, []Command, error) {
	actor := s.actorOf(entry, tok)
	s.Verified = &lifecyclev1.Verified{Actor: actor, RequestId: s.Asked.Envelope.GetRequestId(), StoredAt: stamp(s.Asked.StoredAt)}
	if s.Asked.Verb == Frontends {
		return s, []Command{CallFrontends{actor}}, nil
	}
	ask := s.Asked.Body.RevokeFrontend
	return s, []Command{CallRevokeFrontend{Actor: actor, Frontend: ids.Frontend(ask.GetFrontend()), Allow: ask.GetAllow()}}, nil
}

// actorOf is the user of a verified token, the frontend that carried it, and
// who acts.
func (s State) actorOf(entry Entry, tok Token) *corev1.Actor {
	return &corev1.Actor{
		Tenant: string(entry.Tenant), Issuer: tok.Issuer, Subject: tok.Subject, Frontend: string(s.Asked.Frontend), Acting: tok.Acting,
	}
}

func screenRevokeFrontend(name string) error {
	f, err := ids.ParseFrontend(name)
	if err != nil {
		return refuse(errkind.Invalid, "the frontend's name must be 1 to %d characters of a-z, 0-9, _ and -", ids.MaxToken)
	}
	if subjects.IsUserFrontend(f) {
		return refuse(errkind.Refused, "a user's own login cannot be taken away; it acts for that user alone")
	}
	return nil
}
