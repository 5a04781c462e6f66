package core

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// FrontendID names one frontend; its own name is unique only within its tenant.
type FrontendID struct {
	Tenant   ids.Tenant
	Frontend ids.Frontend
}

// Principal is one user as a tenant's issuer names it, byte for byte.
type Principal struct {
	Tenant  ids.Tenant
	Issuer  string
	Subject string
}

// TenantRules are what the registry says of a tenant.
type TenantRules struct {
	// AdminAttach lets administrators of the tenant attach to users' sessions.
	AdminAttach bool
	Suspended   bool
	Why         string
}

// LoginRules are what the registry says of a frontend.
type LoginRules struct {
	// Acting is the subject that tokens exchanged for the frontend have in act.
	Acting    string
	Suspended bool
	Why       string
}

// UserRules are of a user who is suspended.
type UserRules struct {
	Why string
	By  string // operator or administrator
}

// Claims are the claims of a verified token by name.
type Claims interface {
	// Claim is a claim that is text; false when there is none or it is no text.
	Claim(name string) (string, bool)
	// Has tells whether there is one, whatever it is.
	Has(name string) bool
	// List is a claim that lists texts; nil when there is none or it is something else.
	List(name string) []string
}

// skewOf is how far the issuer's clock may differ from ours.
func (e Entry) skewOf() time.Duration {
	switch {
	case e.Tolerance == 0:
		return skew
	case e.Tolerance < 0:
		return 0
	}
	return e.Tolerance
}

// Find is the registry's entry for a token, by its issuer and its audiences
// alone. A token that is good for more than one tenant belongs to none.
func (p Policy) Find(tok Token) (Entry, error) {
	var found []Entry
	for _, e := range p.Entries {
		if e.Issuer == tok.Issuer && slices.Contains(tok.Audience, e.Audience) {
			found = append(found, e)
		}
	}
	if len(found) == 0 {
		return Entry{}, refuse(errkind.Unauthenticated, "the token's issuer and audience are not registered here")
	}
	if slices.ContainsFunc(found, func(e Entry) bool { return e.Tenant != found[0].Tenant }) {
		return Entry{}, refuse(errkind.Unauthenticated, "the token names audiences of more than one tenant")
	}
	if tok.Subject == "" || len(tok.Subject) > maxSubject {
		return Entry{}, refuse(errkind.Unauthenticated, "the token's subject is empty or longer than %d bytes", maxSubject)
	}
	return found[0], nil
}

// Vouched is what a verified token proves about its bearer, whoever carries it.
type Vouched struct {
	Principal     Principal
	Entry         Entry
	Plan          string
	Administrator bool
}

// Vouch judges a verified token at a time, without a request around it: a
// login at the bus, an operator's test of an issuer.
func (p Policy) Vouch(tok Token, at time.Time) (Vouched, error) {
	e, err := p.Find(tok)
	if err != nil {
		return Vouched{}, err
	}
	v := Vouched{Principal: Principal{e.Tenant, tok.Issuer, tok.Subject}, Entry: e, Administrator: e.Administrator(tok)}
	if _, err := timely(tok, at, e.skewOf()); err != nil {
		return Vouched{}, err
	}
	if err := p.shutUser(v.Principal); err != nil {
		return Vouched{}, err
	}
	v.Plan, err = e.planOf(tok)
	return v, err
}

// Administrator tells whether the issuer says, by a group, that the bearer is
// an administrator of the tenant.
func (e Entry) Administrator(tok Token) bool {
	if e.GroupsClaim == "" || tok.Claims == nil {
		return false
	}
	return slices.ContainsFunc(tok.Claims.List(e.GroupsClaim), func(g string) bool { return slices.Contains(e.AdminGroups, g) })
}

// planOf is the plan that the token's claim chooses, or the entry's where the
// token has no such claim.
func (e Entry) planOf(tok Token) (string, error) {
	if e.PlanClaim == "" || tok.Claims == nil {
		return e.Plan, nil
	}
	value, ok := tok.Claims.Claim(e.PlanClaim)
	if plan, known := e.Plans[value]; ok && known {
		return plan, nil
	}
	if tok.Claims.Has(e.PlanClaim) {
		return "", refuse(errkind.Refused, "the token names a plan that is not registered for its issuer")
	}
	if e.Plan == "" {
		return "", refuse(errkind.Refused, "the token names no plan, and its issuer has no other")
	}
	return e.Plan, nil
}

// shutFrontend refuses a frontend that is suspended, or whose tenant is.
func (p Policy) shutFrontend(f FrontendID) error {
	if t := p.Tenants[f.Tenant]; t.Suspended {
		return shut("the tenant", t.Why)
	}
	if l := p.Frontends[f]; l.Suspended {
		return shut("this frontend", l.Why)
	}
	return nil
}

// shutUser refuses a user who is suspended, or whose tenant is.
func (p Policy) shutUser(who Principal) error {
	if t := p.Tenants[who.Tenant]; t.Suspended {
		return shut("the tenant", t.Why)
	}
	if u, is := p.Users[who]; is {
		return shut("this user", u.Why)
	}
	return nil
}

// StillMay refuses a request that goes on although its tenant, its frontend or
// its user was suspended since it was let in.
func (p Policy) StillMay(s State) error {
	if err := p.shutFrontend(FrontendID{s.Asked.Tenant, s.Asked.Frontend}); err != nil {
		return err
	}
	a := s.Actor()
	return p.shutUser(Principal{ids.Tenant(a.GetTenant()), a.GetIssuer(), a.GetSubject()})
}

// MayKeep refuses to renew a grant of a user whose tenant or who was suspended,
// or whose issuer is registered no more. A renewal needs no token, so that
// nothing else may ask.
func (p Policy) MayKeep(who Principal) error {
	if !slices.ContainsFunc(p.Entries, func(e Entry) bool { return e.Tenant == who.Tenant && e.Issuer == who.Issuer }) {
		return refuse(errkind.Denied, "the issuer of this grant's user is not registered here any more")
	}
	return p.shutUser(who)
}

// shutOutBy counts the users of a tenant whom somebody has shut out.
func (p Policy) shutOutBy(t ids.Tenant, by string) int {
	n := 0
	for who, u := range p.Users {
		if who.Tenant == t && u.By == by {
			n++
		}
	}
	return n
}

func shut(who, why string) error {
	if why == "" {
		return refuse(errkind.Refused, "%s is suspended", who)
	}
	return refuse(errkind.Refused, "%s is suspended: %s", who, why)
}
