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
	"fmt"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// Config is the configuration of the service.
type Config struct {
	// KeyDir holds identity's curve key and the key that session keys are
	// derived with, made at the first start. Losing the latter loses every
	// session.
	KeyDir string `yaml:"key_dir"`
	// Issuers is the registry.
	Issuers []Issuer `yaml:"issuers"`
	// Workers is the most requests of the durable door at once.
	Workers int `yaml:"workers"`
	// Limit is the most requests of one verb at once at the direct door.
	Limit int `yaml:"limit"`
}

// Issuer maps an issuer and an audience to a tenant.
type Issuer struct {
	// Issuer is the iss claim, byte for byte, and where OIDC discovery begins.
	Issuer string `yaml:"issuer"`
	// Audience must be among the token's aud claims.
	Audience string `yaml:"audience"`
	Tenant   string `yaml:"tenant"`
	Plan     string `yaml:"plan"`
	// TierFloor is the weakest isolation tier that the tenant allows; empty
	// leaves it to the plan.
	TierFloor string `yaml:"tier_floor"`
	// Frontends that may carry such tokens; empty means every one of the tenant.
	Frontends []string `yaml:"frontends"`
	// Algorithms of signatures; empty means RS256, ES256 and EdDSA.
	Algorithms []string `yaml:"algorithms"`
	// JWKSFile holds the issuer's keys; empty means OIDC discovery.
	JWKSFile string `yaml:"jwks_file"`
}

// NewConfig returns the defaults; KeyDir and Issuers have none.
func NewConfig() Config { return Config{Workers: 64, Limit: 512} }

const configure = "configure identity"

// Validate says in one sentence what is wrong, if anything is.
func (c Config) Validate() error {
	switch {
	case c.KeyDir == "":
		return errs.E(configure, errkind.Invalid, "", "key_dir is not set")
	case len(c.Issuers) == 0:
		return errs.E(configure, errkind.Invalid, "", "there is no issuer, so nobody could sign in")
	case c.Workers <= 0 || c.Limit <= 0:
		return errs.E(configure, errkind.Invalid, "", "workers and limit must be positive")
	}
	_, _, err := c.registry()
	return err
}

// registry reads the issuers for the core and for the verifier of tokens.
func (c Config) registry() ([]core.Entry, []tokens.Issuer, error) {
	entries, issuers := make([]core.Entry, 0, len(c.Issuers)), make([]tokens.Issuer, 0, len(c.Issuers))
	type pair struct{ issuer, audience string }
	seen, trust := map[pair]bool{}, map[string]string{}
	for _, i := range c.Issuers {
		e, err := i.entry()
		if err != nil {
			return nil, nil, err
		}
		if p := (pair{i.Issuer, i.Audience}); seen[p] {
			return nil, nil, errs.Errorf(configure, errkind.Invalid, "issuer %s and audience %s stand in the registry twice", i.Issuer, i.Audience)
		} else {
			seen[p] = true
		}
		how := fmt.Sprint(i.JWKSFile, i.Algorithms)
		if had, ok := trust[i.Issuer]; ok && had != how {
			return nil, nil, errs.Errorf(configure, errkind.Invalid, "issuer %s stands in the registry with different keys or algorithms", i.Issuer)
		}
		trust[i.Issuer] = how
		entries = append(entries, e)
		issuers = append(issuers, tokens.Issuer{URL: i.Issuer, Algs: i.Algorithms, JWKSFile: i.JWKSFile})
	}
	return entries, issuers, nil
}

func (i Issuer) entry() (core.Entry, error) {
	bad := func(format string, args ...any) (core.Entry, error) {
		return core.Entry{}, errs.Errorf(configure, errkind.Invalid, "issuer "+strings.ReplaceAll(i.Issuer, "%", "%%")+": "+format, args...)
	}
	tenant, err := ids.ParseTenant(i.Tenant)
	if err != nil {
		return bad("%w", err)
	}
	if i.Audience == "" {
		return bad("no audience is set, so tokens for any other program would be accepted")
	}
	e := core.Entry{Issuer: i.Issuer, Audience: i.Audience, Tenant: tenant, Plan: i.Plan}
	if i.TierFloor != "" {
		tier, ok := corev1.Tier_value["TIER_"+strings.ToUpper(i.TierFloor)]
		if !ok || tier == 0 {
			return bad("there is no isolation tier %q", i.TierFloor)
		}
		e.Floor = corev1.Tier(tier)
	}
	for _, f := range i.Frontends {
		name, err := ids.ParseFrontend(f)
		if err != nil {
			return bad("%w", err)
		}
		e.Frontends = append(e.Frontends, name)
	}
	return e, nil
}
