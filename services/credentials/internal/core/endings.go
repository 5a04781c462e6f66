package core

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

const (
	// MinTTL and MaxTTL bound the life of any grant, of any configuration.
	MinTTL = 10 * time.Second
	MaxTTL = time.Hour
	// maxTenantEndings and maxEndings bound the list, in bytes, of one tenant and
	// in all: a host is told all of it in one message. Above, all grants of the
	// tenant that asks end, which one entry says.
	maxTenantEndings = 64 << 10
	maxEndings       = 256 << 10
	// entryBytes is what an entry takes beside its names.
	entryBytes = 64
)

// EndGrants: identity took away what grants were given for.
type EndGrants struct {
	Scope  grant.Scope
	Reason string
}

func (EndGrants) event() {}

// StoreEnding: make an ending durable.
type StoreEnding struct{ Ending grant.Ending }

// DropEnding: no grant that it meets can be alive any more, or another ending
// that is stored says the same.
type DropEnding struct{ Scope grant.Scope }

func (StoreEnding) command() {}
func (DropEnding) command()  {}

// lastEnding is when grants like this one were last ended, zero if never.
func (s State) lastEnding(c grant.Claims) time.Time {
	return s.Ended.Last(c.Tenant, c.Principal, c.Frontend)
}

// endGrants ends every grant of the scope that was issued until now. The entry
// stays for as long as any grant can live, also one of an earlier configuration.
func endGrants(s State, e EndGrants, now time.Time) (State, []Command, error) {
	if err := e.Scope.Check(); err != nil {
		if g := (*grant.Error)(nil); errors.As(err, &g) {
			return s, nil, refuse(g.Kind, "%s", g.Reason)
		}
		return s, nil, err
	}
	end := grant.Ending{Scope: e.Scope, At: now}
	if latest := time.Unix(s.Latest, 0); latest.After(now) { // a grant's iat may be of the next second
		end.At = latest
	}
	end.Until = end.At.Add(MaxTTL + grant.Skew)
	s.Ended.Add(end)
	out := []Command{StoreEnding{s.Ended[e.Scope]}}
	reason := e.Reason
	if merged := s.crowded(e.Scope.Tenant); len(merged) > 0 {
		end.Scope = grant.Scope{Tenant: e.Scope.Tenant}
		s.Ended.Add(end)
		out = []Command{StoreEnding{s.Ended[end.Scope]}}
		for _, m := range merged {
			delete(s.Ended, m)
			out = append(out, DropEnding{m})
		}
		reason += "; so many grants of this tenant were ended that all of them are"
	}
	return s, append(out, Audit{What: "revoked", Session: Session{Generation: Generation{Tenant: e.Scope.Tenant}},
		Actor:  Actor{Tenant: e.Scope.Tenant, Frontend: e.Scope.Frontend, Issuer: e.Scope.Issuer, Subject: e.Scope.Subject},
		Reason: "grants until now: " + reason}), nil
}

// crowded returns the entries of a tenant, but the one for all of it, when the
// list is too long.
func (s State) crowded(t ids.Tenant) []grant.Scope {
	all, own := 0, 0
	var mine []grant.Scope
	for e := range s.Ended {
		n := entryBytes + len(e.Tenant) + len(e.Issuer) + len(e.Subject) + len(e.Frontend)
		all += n
		if e.Tenant == t && e != (grant.Scope{Tenant: t}) {
			own += n
			mine = append(mine, e)
		}
	}
	if own <= maxTenantEndings && all <= maxEndings {
		return nil
	}
	sortScopes(mine)
	return mine
}

// dropEndings forgets what is over.
func (s State) dropEndings(now time.Time) []Command {
	var over []grant.Scope
	for scope, e := range s.Ended {
		if now.After(e.Until) {
			over = append(over, scope)
		}
	}
	sortScopes(over)
	var out []Command
	for _, scope := range over {
		delete(s.Ended, scope)
		out = append(out, DropEnding{scope})
	}
	return out
}

func sortScopes(s []grant.Scope) {
	slices.SortFunc(s, func(a, b grant.Scope) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Issuer, b.Issuer), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Frontend, b.Frontend))
	})
}
