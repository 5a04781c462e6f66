// Package registry keeps tenants, issuers, bus logins and suspensions: records in the bucket
// BERTH_REGISTRY, which every replica of identity watches, and the entries of its own configuration,
// which win. It guarantees that a Snapshot never changes once it was handed out; that a change is
// stored by compare-and-swap and answered only when this replica judges by it; that after a lost watch
// a record is never taken for an older one of itself, and a suspension never for lifted; and that
// records which contradict each other let nobody in.
package registry

import (
	"maps"
	"slices"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/tokens"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// Login is one bus identity that is let in through the callout.
type Login struct {
	Caller subjects.Caller
	NKey   string // public
	// Acting is the subject that tokens exchanged for the frontend have in act; empty: it carries
	// users' own tokens only.
	Acting    string
	Suspended bool
	Why       string
}

// Snapshot is the registry at one time. It does not change; whoever judges one request by it holds on
// to it. What its fields hold must not be written to.
type Snapshot struct {
	// Policy has everything but the session keys.
	Policy core.Policy
	// Issuers are whom tokens are verified with, one for each URL.
	Issuers []tokens.Issuer

	tenants   map[ids.Tenant]*identityv1.Tenant
	issuers   []*identityv1.Issuer
	logins    map[subjects.Caller]*identityv1.Login
	byNKey    map[string]Login
	suspended []*identityv1.Suspension
}

// ByNKey is the login of a public nkey. It is there also while it is suspended: ask Shut before it is
// let in.
func (s *Snapshot) ByNKey(nkey string) (Login, bool) {
	l, ok := s.byNKey[nkey]
	return l, ok
}

// Shut tells why a bus identity is not let in now: its tenant, its frontend or its login is suspended.
// One with no login (a user's own connection) is judged by its tenant.
func (s *Snapshot) Shut(c subjects.Caller) (why string, shut bool) {
	if c.Role == subjects.RoleFrontend {
		if t := s.Policy.Tenants[c.Tenant]; t.Suspended {
			return t.Why, true
		}
		if f := s.Policy.Frontends[core.FrontendID{Tenant: c.Tenant, Frontend: c.Frontend}]; f.Suspended {
			return f.Why, true
		}
	}
	if l := s.logins[c]; l.GetSuspended() {
		return l.GetSuspendedWhy(), true
	}
	return "", false
}

// ShutUser tells why a user is not let in now: the user or the tenant is suspended.
func (s *Snapshot) ShutUser(p core.Principal) (why string, shut bool) {
	if t := s.Policy.Tenants[p.Tenant]; t.Suspended {
		return t.Why, true
	}
	u, shut := s.Policy.Users[p]
	return u.Why, shut
}

// Tenant is a tenant's record.
func (s *Snapshot) Tenant(t ids.Tenant) (*identityv1.Tenant, bool) {
	r, ok := s.tenants[t]
	return r, ok
}

// May tells why a connection with a nkey may not be, or may no more: the login was removed, has another
// key or name by now, or is shut.
func (s *Snapshot) May(c subjects.Caller, nkey string) (why string, may bool) {
	l, ok := s.byNKey[nkey]
	if !ok || l.Caller != c {
		return "no login has this key", false
	}
	why, shut := s.Shut(c)
	return why, !shut
}

// List is everything that the registry holds of one tenant, or of all when t is empty; logins of hosts
// and operators are in the list of all alone. What is returned must not be written to.
func (s *Snapshot) List(t ids.Tenant) *identityv1.TenantsReply {
	out := &identityv1.TenantsReply{}
	for _, name := range slices.Sorted(maps.Keys(s.tenants)) {
		if t == "" || name == t {
			out.Tenants = append(out.Tenants, s.tenants[name])
		}
	}
	for _, i := range s.issuers {
		if t == "" || i.GetTenant() == string(t) {
			out.Issuers = append(out.Issuers, i)
		}
	}
	for c, l := range s.logins {
		if t == "" || c.Tenant == t {
			out.Logins = append(out.Logins, l)
		}
	}
	slices.SortFunc(out.Logins, func(x, y *identityv1.Login) int { return strings.Compare(x.GetName(), y.GetName()) })
	for _, u := range s.suspended {
		if t == "" || u.GetTenant() == string(t) {
			out.Suspended = append(out.Suspended, u)
		}
	}
	return out
}

func (s *Snapshot) issuer(issuer, audience string) (*identityv1.Issuer, bool) {
	for _, i := range s.issuers {
		if i.GetIssuer() == issuer && i.GetAudience() == audience {
			return i, true
		}
	}
	return nil, false
}

// Issuer is the record of an issuer; an empty audience means the only one that it has.
func (s *Snapshot) Issuer(issuer, audience string) (*identityv1.Issuer, bool) {
	if audience != "" {
		return s.issuer(issuer, audience)
	}
	var found []*identityv1.Issuer
	for _, i := range s.issuers {
		if i.GetIssuer() == issuer {
			found = append(found, i)
		}
	}
	if len(found) != 1 {
		return nil, false
	}
	return found[0], true
}

// Audiences are those that an issuer is registered with, sorted.
func (s *Snapshot) Audiences(issuer string) (out []string) {
	for _, i := range s.issuers {
		if i.GetIssuer() == issuer {
			out = append(out, i.GetAudience())
		}
	}
	slices.Sort(out)
	return out
}

// Trust is how tokens of an issuer are verified.
func (s *Snapshot) Trust(issuer string) tokens.Issuer {
	for _, t := range s.Issuers {
		if t.URL == issuer {
			return t
		}
	}
	return tokens.Issuer{}
}

// Names tells whether the issuer is registered for the tenant, with any audience.
func (s *Snapshot) Names(tenant, issuer string) bool {
	return slices.ContainsFunc(s.issuers, func(i *identityv1.Issuer) bool {
		return i.GetTenant() == tenant && i.GetIssuer() == issuer
	})
}
