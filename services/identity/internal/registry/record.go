package registry

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// Bounds of a record.
const (
	maxText      = 255 // bytes of an audience, a subject, a claim's name or value, a reason
	maxList      = 64
	maxJWKS      = 32 << 10
	maxTolerance = 5 * time.Minute
)

// userPrefix begins the names of users' own connections, which no registered frontend may have.
const userPrefix = "u-"

func invalid(format string, args ...any) error {
	return errs.Errorf("registry", errkind.Invalid, format, args...)
}

// text refuses what could not be shown to a person as it is.
func text(what, s string) error {
	if s == "" {
		return invalid("%s is empty", what)
	}
	if len(s) > maxText {
		return invalid("%s is %d bytes long, at most %d are allowed", what, len(s), maxText)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return invalid("%s has characters in it that cannot be shown", what)
	}
	return nil
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// TierOf reads a tier's name; empty means none.
func TierOf(name string) (corev1.Tier, error) {
	if name == "" {
		return 0, nil
	}
	tier, ok := corev1.Tier_value["TIER_"+strings.ToUpper(name)]
	if !ok || tier == 0 || name != strings.ToLower(name) {
		return 0, invalid("there is no isolation tier %.40q", name)
	}
	return corev1.Tier(tier), nil
}

// plan refuses what is no plan's name.
func plan(name string) error {
	if name != "" && !ids.IsToken(name) {
		return invalid("a plan's name must be 1 to %d characters of a-z, 0-9, _ and -", ids.MaxToken)
	}
	return nil
}

// CheckTenant says in one sentence what is wrong with a tenant's record, if anything is.
func CheckTenant(t *identityv1.Tenant) error {
	if _, err := ids.ParseTenant(t.GetTenant()); err != nil {
		return errs.E("registry", errkind.Invalid, "", err)
	}
	_, err := TierOf(t.GetTierFloor())
	return first(err, plan(t.GetPlan()))
}

// CheckIssuer says what is wrong with an issuer's record.
func CheckIssuer(i *identityv1.Issuer) error {
	if i.GetAudience() == "" {
		return invalid("no audience is set, so tokens for any other program would be accepted")
	}
	if len(i.GetIssuer()) > maxText {
		return invalid("the issuer is %d bytes long, at most %d are allowed", len(i.GetIssuer()), maxText)
	}
	if _, err := ids.ParseTenant(i.GetTenant()); err != nil {
		return errs.E("registry", errkind.Invalid, "", err)
	}
	if len(i.GetJwks()) > maxJWKS {
		return invalid("the key set is %d bytes long, at most %d are allowed", len(i.GetJwks()), maxJWKS)
	}
	for what, n := range map[string]int{"algorithms": len(i.GetAlgorithms()), "plans": len(i.GetPlans()), "groups": len(i.GetAdminGroups()), "frontends": len(i.GetFrontends())} {
		if n > maxList {
			return invalid("there are %d %s, at most %d are allowed", n, what, maxList)
		}
	}
	if _, err := tokens.New([]tokens.Issuer{{URL: i.GetIssuer(), Algs: i.GetAlgorithms(), JWKS: i.GetJwks()}}, nil); err != nil {
		return err
	}
	_, err := TierOf(i.GetTierFloor())
	return first(text("the audience", i.GetAudience()), err, plan(i.GetPlan()), checkTolerance(i), checkPlans(i), checkGroups(i), checkFrontends(i))
}

func checkTolerance(i *identityv1.Issuer) error {
	d := i.GetClockTolerance()
	if d == nil {
		return nil
	}
	if d.CheckValid() != nil || d.AsDuration() < 0 || d.AsDuration() > maxTolerance {
		return invalid("the clock tolerance must be from 0 to %s", maxTolerance)
	}
	return nil
}

func checkPlans(i *identityv1.Issuer) error {
	switch {
	case i.GetPlanClaim() == "" && len(i.GetPlans()) > 0:
		return invalid("there are plans by claim, and no claim is named")
	case i.GetPlanClaim() == "":
		return nil
	case len(i.GetPlans()) == 0:
		return invalid("a claim is named for the plan, and no plan for any value of it")
	}
	if err := text("the plan claim", i.GetPlanClaim()); err != nil {
		return err
	}
	for value, name := range i.GetPlans() {
		if err := first(text("a value of the plan claim", value), plan(name)); err != nil {
			return err
		}
		if name == "" {
			return invalid("the value %q of the plan claim has no plan", value)
		}
	}
	return nil
}

func checkGroups(i *identityv1.Issuer) error {
	switch {
	case i.GetGroupsClaim() == "" && len(i.GetAdminGroups()) > 0:
		return invalid("there are groups of administrators, and no claim is named that lists groups")
	case i.GetGroupsClaim() == "":
		return nil
	case len(i.GetAdminGroups()) == 0:
		return invalid("a claim is named that lists groups, and no group of administrators")
	}
	if err := text("the groups claim", i.GetGroupsClaim()); err != nil {
		return err
	}
	for _, g := range i.GetAdminGroups() {
		if err := text("a group of administrators", g); err != nil {
			return err
		}
	}
	return nil
}

func checkFrontends(i *identityv1.Issuer) error {
	for _, f := range i.GetFrontends() {
		if _, err := ids.ParseFrontend(f); err != nil {
			return errs.E("registry", errkind.Invalid, "", err)
		}
	}
	return nil
}

// CheckLogin says what is wrong with a login's record.
func CheckLogin(l *identityv1.Login) error {
	c, err := subjects.ParseName(l.GetName())
	if err != nil {
		return errs.E("registry", errkind.Invalid, "", err)
	}
	switch c.Role {
	case subjects.RoleFrontend:
		if strings.HasPrefix(string(c.Frontend), userPrefix) {
			return invalid("names that begin with %s are those of users' own connections", userPrefix)
		}
	case subjects.RoleHost, subjects.RoleGate, subjects.RoleOperator:
		if l.GetActing() != "" {
			return invalid("only a frontend acts for users")
		}
	default:
		return invalid("%s is no frontend, host, gate or operator; the keys of services are not in the registry", c)
	}
	if !nkeys.IsValidPublicUserKey(l.GetNkey()) {
		return invalid("the key is no public nkey of a user (U and 55 more characters)")
	}
	if l.GetActing() == "" {
		return nil
	}
	return text("the subject of the frontend's own tokens", l.GetActing())
}

// CheckSuspension says what is wrong with a suspension.
func CheckSuspension(s *identityv1.Suspension) error {
	if _, err := ids.ParseTenant(s.GetTenant()); err != nil {
		return errs.E("registry", errkind.Invalid, "", err)
	}
	user := s.GetIssuer() != "" || s.GetSubject() != ""
	switch {
	case user && s.GetFrontend() != "":
		return invalid("a user and a frontend are two suspensions")
	case user && (s.GetIssuer() == "" || s.GetSubject() == ""):
		return invalid("a user is named by issuer and subject, both")
	case user && (len(s.GetIssuer()) > maxText || len(s.GetSubject()) > maxText):
		return invalid("issuer and subject are at most %d bytes long", maxText)
	}
	if s.GetFrontend() != "" {
		if _, err := ids.ParseFrontend(s.GetFrontend()); err != nil {
			return errs.E("registry", errkind.Invalid, "", err)
		}
		if strings.HasPrefix(s.GetFrontend(), userPrefix) {
			return invalid("%s is a user's own connection; suspend the user", s.GetFrontend())
		}
	}
	if s.GetReason() == "" {
		return nil
	}
	return text("the reason", s.GetReason())
}

// Keys of the bucket. Each is made of tokens alone, so that no record can stand under another's key.
const (
	tenantKey    = "tenant."
	issuerKey    = "issuer."
	loginKey     = "login."
	suspendedKey = "suspended."
)

func keyOfIssuer(issuer, audience string) string { return issuerKey + hash(issuer, audience) }

func keyOfSuspension(s *identityv1.Suspension) string {
	key := suspendedKey + s.GetTenant()
	switch {
	case s.GetFrontend() != "":
		return key + ".frontend." + s.GetFrontend()
	case s.GetSubject() != "":
		return key + ".user." + hash(s.GetIssuer(), s.GetSubject())
	}
	return key
}

// hash is a token for texts: lower-case base32 of the first 16 bytes of SHA-256 over them, each with its
// length before it.
func hash(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		var n [4]byte
		binary.BigEndian.PutUint32(n[:], uint32(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(h.Sum(nil)[:16]))
}

// toleranceOf is how the core has it: zero means the default, less than zero none.
func toleranceOf(d *durationpb.Duration) time.Duration {
	switch {
	case d == nil:
		return 0
	case d.AsDuration() == 0:
		return -1
	}
	return d.AsDuration()
}
