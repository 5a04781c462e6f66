// Package identity is the service that says who is asking. Behind two doors,
// a micro endpoint and a work queue, stands one handler: it opens the sealed
// request, verifies the user's token with the keys of its issuer, takes the
// tenant from its registry, derives the session key, hands on to lifecycle,
// and seals the answer, with a grant, to the key inside the request. It
// guarantees that a refused request changes nothing and is answered with one
// sentence; that every request is recorded under audit; that no token or grant
// is on the bus, in a log or in a record in the clear; and that whoever
// replays a request gets nothing it can open or use.
package identity

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

// Config is the configuration of the service.
type Config struct {
	// KeyDir holds identity's curve key and the key that session keys are
	// derived with, made at the first start. Losing the latter loses every
	// session.
	KeyDir string `yaml:"key_dir"`
	// AuditDir holds audit records until the bus has stored them; empty means
	// identity-audit in KeyDir. Several identities may share it.
	AuditDir string `yaml:"audit_dir"`
	// Issuers, Tenants and Logins stand in the registry beside what operators
	// add to it by commands. They win over that, and commands cannot change
	// them, only suspend them.
	Issuers []Issuer `yaml:"issuers"`
	Tenants []Tenant `yaml:"tenants"`
	Logins  []Login  `yaml:"logins"`
	// Callout is how the bus's question who may log in is answered.
	Callout Callout `yaml:"callout"`
	// Workers is the most requests of the durable door at once.
	Workers int `yaml:"workers"`
	// Limit is the most requests of one verb at once at the direct door.
	Limit int `yaml:"limit"`
}

// Tenant is a customer of the platform. One that an issuer or a frontend's
// login names need not stand here.
type Tenant struct {
	Tenant string `yaml:"tenant"`
	// Plan of users whose issuer says nothing.
	Plan string `yaml:"plan"`
	// TierFloor is the weakest isolation tier that the tenant allows.
	TierFloor string `yaml:"tier_floor"`
	// AdminAttach lets the tenant's administrators attach to users' sessions.
	AdminAttach bool `yaml:"admin_attach"`
}

// Issuer maps an issuer and an audience to a tenant.
type Issuer struct {
	// Issuer is the iss claim, byte for byte, and where OIDC discovery begins.
	Issuer string `yaml:"issuer"`
	// Audience must be among the token's aud claims.
	Audience string `yaml:"audience"`
	Tenant   string `yaml:"tenant"`
	// Plan of users whose token names none; empty means the tenant's.
	Plan string `yaml:"plan"`
	// TierFloor is the weakest isolation tier that the tenant allows; empty
	// leaves it to the plan.
	TierFloor string `yaml:"tier_floor"`
	// Frontends that may carry such tokens; empty means every one of the tenant.
	Frontends []string `yaml:"frontends"`
	// Algorithms of signatures; empty means RS256, ES256 and EdDSA.
	Algorithms []string `yaml:"algorithms"`
	// JWKSFile holds the issuer's keys; empty means OIDC discovery.
	JWKSFile string `yaml:"jwks_file"`
	// ClockTolerance is how far the issuer's clock may differ, at most 5 min;
	// without it 30 s.
	ClockTolerance *time.Duration `yaml:"clock_tolerance"`
	// PlanClaim names the claim whose values Plans maps to plans.
	PlanClaim string            `yaml:"plan_claim"`
	Plans     map[string]string `yaml:"plans"`
	// GroupsClaim names the claim that lists groups; tokens with one of
	// AdminGroups are of administrators of the tenant.
	GroupsClaim string   `yaml:"groups_claim"`
	AdminGroups []string `yaml:"admin_groups"`
}

// Login is a bus identity that is let in: a frontend, a host or an operator.
type Login struct {
	// Name is fe-<tenant>-<frontend>, host-<host> or operator.
	Name string `yaml:"name"`
	// NKey is its public key.
	NKey string `yaml:"nkey"`
	// Acting is the subject that tokens exchanged for a frontend have in act.
	Acting string `yaml:"acting"`
}

// NewConfig returns the defaults; KeyDir has none.
func NewConfig() Config { return Config{Workers: 64, Limit: 512, Callout: newCallout()} }

const configure = "configure identity"

// Validate says in one sentence what is wrong, if anything is.
func (c Config) Validate() error {
	switch {
	case c.KeyDir == "":
		return errs.E(configure, errkind.Invalid, "", "key_dir is not set")
	case c.Workers <= 0 || c.Limit <= 0:
		return errs.E(configure, errkind.Invalid, "", "workers and limit must be positive")
	}
	if err := c.Callout.validate(); err != nil {
		return err
	}
	_, err := c.static()
	return err
}

// static is what the configuration says of the registry.
func (c Config) static() (registry.Static, error) {
	st := registry.Static{Files: map[string]string{}}
	trust := map[string]string{}
	for _, t := range c.Tenants {
		st.Tenants = append(st.Tenants, &identityv1.Tenant{Tenant: t.Tenant, Plan: t.Plan, TierFloor: t.TierFloor, AdminAttach: t.AdminAttach})
	}
	for _, i := range c.Issuers {
		how := strings.Join(append([]string{i.JWKSFile}, i.Algorithms...), " ")
		if had, ok := trust[i.Issuer]; ok && had != how {
			return st, errs.Errorf(configure, errkind.Invalid, "issuer %s stands in the registry with different keys or algorithms", i.Issuer)
		}
		trust[i.Issuer] = how
		if i.JWKSFile != "" {
			st.Files[i.Issuer] = i.JWKSFile
		}
		st.Issuers = append(st.Issuers, i.record())
	}
	for _, l := range c.Logins {
		st.Logins = append(st.Logins, &identityv1.Login{Name: l.Name, Nkey: l.NKey, Acting: l.Acting})
	}
	if err := st.Check(); err != nil {
		return st, errs.E(configure, errkind.Invalid, "", err)
	}
	return st, nil
}

func (i Issuer) record() *identityv1.Issuer {
	out := &identityv1.Issuer{Issuer: i.Issuer, Audience: i.Audience, Tenant: i.Tenant, Plan: i.Plan, TierFloor: i.TierFloor,
		Frontends: i.Frontends, Algorithms: i.Algorithms, PlanClaim: i.PlanClaim, Plans: i.Plans, GroupsClaim: i.GroupsClaim, AdminGroups: i.AdminGroups}
	if i.ClockTolerance != nil {
		out.ClockTolerance = durationpb.New(*i.ClockTolerance)
	}
	return out
}
