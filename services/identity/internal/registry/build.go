package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// Static is what stands in identity's own configuration.
type Static struct {
	Tenants []*identityv1.Tenant
	Issuers []*identityv1.Issuer
	Logins  []*identityv1.Login
	// Files name the files that hold issuers' keys, by issuer.
	Files map[string]string
}

// Check says what is wrong with the configuration; nothing of it may be left out as a stored record is.
func (st Static) Check() error {
	for _, t := range st.Tenants {
		if err := CheckTenant(t); err != nil {
			return err
		}
	}
	for _, i := range st.Issuers {
		if err := CheckIssuer(i); err != nil {
			return fmt.Errorf("issuer %s: %w", i.GetIssuer(), err)
		}
	}
	for _, l := range st.Logins {
		if err := CheckLogin(l); err != nil {
			return fmt.Errorf("login %s: %w", l.GetName(), err)
		}
	}
	if _, faults := build(st, nil); len(faults) > 0 {
		return invalid("%s", faults[0])
	}
	return nil
}

// records are those of the bucket that are good by themselves.
type records struct {
	tenants   []*identityv1.Tenant
	issuers   []*identityv1.Issuer
	logins    []*identityv1.Login
	suspended []*identityv1.Suspension
	// locked are tenants with a suspension that cannot be read: nobody knows whom it meets.
	locked []string
}

type builder struct {
	*Snapshot
	files  map[string]string
	faults []string
	pairs  map[string]bool // issuer and audience
}

func (b *builder) fault(format string, args ...any) {
	b.faults = append(b.faults, fmt.Sprintf(format, args...))
}

// build makes a snapshot. What contradicts what came before it is left out, and said: the configuration
// comes first, then records by revision, so that every replica leaves out the same.
func build(st Static, r *records) (*Snapshot, []string) {
	if r == nil {
		r = &records{}
	}
	b := &builder{files: st.Files, pairs: map[string]bool{}, Snapshot: &Snapshot{
		tenants: map[ids.Tenant]*identityv1.Tenant{}, logins: map[subjects.Caller]*identityv1.Login{}, byNKey: map[string]Login{},
		Policy: core.Policy{Tenants: map[ids.Tenant]core.TenantRules{}, Frontends: map[core.FrontendID]core.LoginRules{}, Users: map[core.Principal]core.UserRules{}},
	}}
	slices.SortFunc(r.issuers, func(x, y *identityv1.Issuer) int { return cmp.Compare(x.GetRevision(), y.GetRevision()) })
	slices.SortFunc(r.logins, func(x, y *identityv1.Login) int { return cmp.Compare(x.GetRevision(), y.GetRevision()) })
	b.addTenants(st, r)
	for _, i := range st.Issuers {
		b.addIssuer(configuredIssuer(i))
	}
	for _, i := range r.issuers {
		b.addIssuer(i)
	}
	for _, l := range st.Logins {
		l = proto.CloneOf(l)
		l.Configured = true
		b.addLogin(l)
	}
	for _, l := range r.logins {
		b.addLogin(l)
	}
	b.suspend(r)
	b.order()
	return b.Snapshot, b.faults
}

func configuredIssuer(i *identityv1.Issuer) *identityv1.Issuer {
	i = proto.CloneOf(i)
	i.Configured = true
	return i
}

// addTenants: a tenant that only an issuer or a login of the configuration names is one too.
func (b *builder) addTenants(st Static, r *records) {
	configured := func(name string, t *identityv1.Tenant) {
		if _, had := b.tenants[ids.Tenant(name)]; !had {
			t = proto.CloneOf(t)
			t.Tenant, t.Configured = name, true
			b.tenants[ids.Tenant(name)] = t
		}
	}
	for _, t := range st.Tenants {
		if _, twice := b.tenants[ids.Tenant(t.GetTenant())]; twice {
			b.fault("tenant %s stands in the configuration twice", t.GetTenant())
		}
		configured(t.GetTenant(), t)
	}
	for _, i := range st.Issuers {
		configured(i.GetTenant(), &identityv1.Tenant{})
	}
	for _, l := range st.Logins {
		if c, err := subjects.ParseName(l.GetName()); err == nil && c.Role == subjects.RoleFrontend {
			configured(string(c.Tenant), &identityv1.Tenant{})
		}
	}
	for _, t := range r.tenants {
		if b.tenants[ids.Tenant(t.GetTenant())] == nil {
			b.tenants[ids.Tenant(t.GetTenant())] = proto.CloneOf(t)
		}
	}
}

func (b *builder) addIssuer(i *identityv1.Issuer) {
	tenant := b.tenants[ids.Tenant(i.GetTenant())]
	if tenant == nil {
		b.fault("issuer %s belongs to tenant %s, which is not registered", i.GetIssuer(), i.GetTenant())
		return
	}
	pair := keyOfIssuer(i.GetIssuer(), i.GetAudience())
	if b.pairs[pair] {
		if i.GetConfigured() {
			b.fault("issuer %s and audience %s stand in the registry twice", i.GetIssuer(), i.GetAudience())
		}
		return // the configuration has it
	}
	trust := tokens.Issuer{URL: i.GetIssuer(), Algs: i.GetAlgorithms(), JWKS: i.GetJwks(), JWKSFile: b.files[i.GetIssuer()]}
	if !i.GetConfigured() {
		trust.JWKSFile = ""
	}
	if at := slices.IndexFunc(b.Issuers, func(o tokens.Issuer) bool { return o.URL == trust.URL }); at < 0 {
		b.Issuers = append(b.Issuers, trust)
	} else if !sameTrust(b.Issuers[at], trust) {
		b.fault("issuer %s stands in the registry with different keys or algorithms", i.GetIssuer())
		return
	}
	b.pairs[pair] = true
	b.issuers = append(b.issuers, i)
	b.Policy.Entries = append(b.Policy.Entries, entryOf(i, tenant))
}

func sameTrust(x, y tokens.Issuer) bool {
	return slices.Equal(x.Algs, y.Algs) && string(x.JWKS) == string(y.JWKS) && x.JWKSFile == y.JWKSFile
}

func entryOf(i *identityv1.Issuer, t *identityv1.Tenant) core.Entry {
	e := core.Entry{Issuer: i.GetIssuer(), Audience: i.GetAudience(), Tenant: ids.Tenant(i.GetTenant()), Plan: cmp.Or(i.GetPlan(), t.GetPlan()),
		Floor: stronger(i.GetTierFloor(), t.GetTierFloor()), Tolerance: toleranceOf(i.GetClockTolerance()),
		PlanClaim: i.GetPlanClaim(), Plans: i.GetPlans(), GroupsClaim: i.GetGroupsClaim(), AdminGroups: i.GetAdminGroups()}
	for _, f := range i.GetFrontends() {
		e.Frontends = append(e.Frontends, ids.Frontend(f))
	}
	return e
}

// ordered are the tiers that can be compared, weakest first.
var ordered = []corev1.Tier{corev1.Tier_TIER_CONTAINER, corev1.Tier_TIER_GVISOR, corev1.Tier_TIER_KATA, corev1.Tier_TIER_MICROVM}

// stronger is the stronger floor of two; one that cannot be compared is the issuer's.
func stronger(issuer, tenant string) corev1.Tier {
	i, _ := TierOf(issuer) // both were checked
	t, _ := TierOf(tenant)
	if i == 0 || slices.Contains(ordered, i) && slices.Index(ordered, t) > slices.Index(ordered, i) {
		return t
	}
	return i
}

func (b *builder) addLogin(l *identityv1.Login) {
	c, err := subjects.ParseName(l.GetName())
	if err != nil {
		return // records were checked
	}
	if b.logins[c] != nil {
		if l.GetConfigured() {
			b.fault("login %s stands in the configuration twice", c)
		}
		return // the configuration has it
	}
	if had, twice := b.byNKey[l.GetNkey()]; twice {
		b.fault("logins %s and %s have one key", had.Caller, c)
		return
	}
	if c.Role == subjects.RoleFrontend && b.tenants[c.Tenant] == nil {
		b.fault("login %s is of tenant %s, which is not registered", c, c.Tenant)
		return
	}
	l = proto.CloneOf(l)
	b.logins[c] = l
	b.byNKey[l.GetNkey()] = Login{Caller: c, NKey: l.GetNkey(), Acting: l.GetActing(), Suspended: l.GetSuspended(), Why: l.GetSuspendedWhy()}
	if c.Role == subjects.RoleFrontend {
		b.Policy.Frontends[core.FrontendID{Tenant: c.Tenant, Frontend: c.Frontend}] = core.LoginRules{Acting: l.GetActing(), Suspended: l.GetSuspended(), Why: l.GetSuspendedWhy()}
	}
}

const unreadable = "a record of its suspensions cannot be read"

// suspend applies the suspensions, also to what the configuration says.
func (b *builder) suspend(r *records) {
	for _, s := range r.suspended {
		b.suspended = append(b.suspended, s)
		tenant := ids.Tenant(s.GetTenant())
		switch {
		case s.GetFrontend() != "":
			id := core.FrontendID{Tenant: tenant, Frontend: ids.Frontend(s.GetFrontend())}
			rules := b.Policy.Frontends[id]
			rules.Suspended, rules.Why = true, s.GetReason()
			b.Policy.Frontends[id] = rules
			if l := b.logins[subjects.Frontend(tenant, id.Frontend)]; l != nil {
				l.Suspended, l.SuspendedWhy = true, s.GetReason()
				login := b.byNKey[l.GetNkey()]
				login.Suspended, login.Why = true, s.GetReason()
				b.byNKey[l.GetNkey()] = login
			}
		case s.GetSubject() != "":
			b.Policy.Users[core.Principal{Tenant: tenant, Issuer: s.GetIssuer(), Subject: s.GetSubject()}] = core.UserRules{Why: s.GetReason(), By: s.GetBy()}
		default:
			b.lock(tenant, s.GetReason())
		}
	}
	for _, t := range r.locked {
		b.lock(ids.Tenant(t), unreadable)
		b.fault("tenant %s is suspended, because %s", t, unreadable)
	}
	for name, t := range b.tenants {
		rules := b.Policy.Tenants[name]
		rules.AdminAttach = t.GetAdminAttach()
		b.Policy.Tenants[name] = rules
		t.Suspended, t.SuspendedWhy = rules.Suspended, rules.Why
	}
}

func (b *builder) lock(t ids.Tenant, why string) {
	b.Policy.Tenants[t] = core.TenantRules{Suspended: true, Why: why}
}

// order makes lists the same on every replica.
func (b *builder) order() {
	slices.SortFunc(b.issuers, func(x, y *identityv1.Issuer) int {
		return cmp.Or(strings.Compare(x.GetTenant(), y.GetTenant()), strings.Compare(x.GetIssuer(), y.GetIssuer()), strings.Compare(x.GetAudience(), y.GetAudience()))
	})
	slices.SortFunc(b.Policy.Entries, func(x, y core.Entry) int {
		return cmp.Or(strings.Compare(x.Issuer, y.Issuer), strings.Compare(x.Audience, y.Audience))
	})
	slices.SortFunc(b.Issuers, func(x, y tokens.Issuer) int { return strings.Compare(x.URL, y.URL) })
	slices.SortFunc(b.suspended, func(x, y *identityv1.Suspension) int { return strings.Compare(keyOfSuspension(x), keyOfSuspension(y)) })
	slices.Sort(b.faults)
}
