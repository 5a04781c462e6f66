package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

type tenantOut struct {
	Tenant      string     `json:"tenant"`
	Plan        string     `json:"plan"`
	TierFloor   string     `json:"tier_floor"`
	AdminAttach bool       `json:"admin_attach"`
	Suspended   bool       `json:"suspended"`
	Reason      string     `json:"reason,omitempty"`
	ChangedAt   *time.Time `json:"changed_at,omitempty"`
	Revision    uint64     `json:"revision"`
	Configured  bool       `json:"configured"`
}

type tenantsOut struct {
	Tenants []tenantOut `json:"tenants"`
}

type issuerOut struct {
	Issuer           string            `json:"issuer"`
	Audience         string            `json:"audience"`
	Tenant           string            `json:"tenant"`
	Algorithms       []string          `json:"algorithms"`
	ClockToleranceMS float64           `json:"clock_tolerance_ms"`
	Plan             string            `json:"plan"`
	PlanClaim        string            `json:"plan_claim"`
	Plans            map[string]string `json:"plans"`
	GroupsClaim      string            `json:"groups_claim"`
	AdminGroups      []string          `json:"admin_groups"`
	TierFloor        string            `json:"tier_floor"`
	Frontends        []string          `json:"frontends"`
	Discovery        bool              `json:"discovery"`
	ChangedAt        *time.Time        `json:"changed_at,omitempty"`
	Revision         uint64            `json:"revision"`
	Configured       bool              `json:"configured"`
}

type issuerRemovedOut struct {
	Issuer   string `json:"issuer"`
	Audience string `json:"audience"`
	Removed  bool   `json:"removed"`
}

type issuerTestOut struct {
	Issuer        string     `json:"issuer"`
	Good          bool       `json:"good"`
	Checks        []checkOut `json:"checks"`
	Tenant        string     `json:"tenant,omitempty"`
	Subject       string     `json:"subject,omitempty"`
	Plan          string     `json:"plan,omitempty"`
	Administrator bool       `json:"administrator"`
}

type checkOut struct {
	Name   string `json:"name"`
	Good   bool   `json:"good"`
	Detail string `json:"detail"`
}

type frontendOut struct {
	Tenant     string     `json:"tenant"`
	Frontend   string     `json:"frontend"`
	NKey       string     `json:"nkey"`
	Acting     string     `json:"acting"`
	Suspended  bool       `json:"suspended"`
	Reason     string     `json:"reason,omitempty"`
	ChangedAt  *time.Time `json:"changed_at,omitempty"`
	Revision   uint64     `json:"revision"`
	Configured bool       `json:"configured"`
	ClientFile string     `json:"client_file,omitempty"`
}

type frontendsOut struct {
	Frontends []frontendOut `json:"frontends"`
}

type frontendRemovedOut struct {
	Tenant   string `json:"tenant"`
	Frontend string `json:"frontend"`
	Removed  bool   `json:"removed"`
}

type suspendedOut struct {
	Tenant    string     `json:"tenant"`
	Issuer    string     `json:"issuer,omitempty"`
	Subject   string     `json:"subject,omitempty"`
	Frontend  string     `json:"frontend,omitempty"`
	Suspended bool       `json:"suspended"`
	Reason    string     `json:"reason,omitempty"`
	By        string     `json:"by,omitempty"`
	At        *time.Time `json:"at,omitempty"`
}

type tenantShowOut struct {
	tenantOut
	Issuers   []issuerOut    `json:"issuers"`
	Frontends []frontendOut  `json:"frontends"`
	Shut      []suspendedOut `json:"suspensions"`
}

func timeOf(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

func tenantOutOf(t *identityv1.Tenant) tenantOut {
	return tenantOut{Tenant: t.GetTenant(), Plan: t.GetPlan(), TierFloor: t.GetTierFloor(), AdminAttach: t.GetAdminAttach(), Suspended: t.GetSuspended(),
		Reason: t.GetSuspendedWhy(), ChangedAt: timeOf(t.GetChangedAt()), Revision: t.GetRevision(), Configured: t.GetConfigured()}
}

func tenantsOutOf(all *identityv1.TenantsReply) tenantsOut {
	out := tenantsOut{Tenants: []tenantOut{}}
	for _, t := range all.GetTenants() {
		out.Tenants = append(out.Tenants, tenantOutOf(t))
	}
	return out
}

func tenantShowOutOf(all *identityv1.TenantsReply) tenantShowOut {
	out := tenantShowOut{Issuers: []issuerOut{}, Frontends: frontendsOutOf(all).Frontends, Shut: []suspendedOut{}}
	for _, t := range all.GetTenants() {
		out.tenantOut = tenantOutOf(t)
	}
	for _, i := range all.GetIssuers() {
		out.Issuers = append(out.Issuers, issuerOutOf(i))
	}
	for _, s := range all.GetSuspended() {
		out.Shut = append(out.Shut, suspendedOut{Tenant: s.GetTenant(), Issuer: s.GetIssuer(), Subject: s.GetSubject(), Frontend: s.GetFrontend(),
			Suspended: true, Reason: s.GetReason(), By: s.GetBy(), At: timeOf(s.GetAt())})
	}
	return out
}

// notNull is a list that is never null.
func notNull(l []string) []string {
	if l == nil {
		return []string{}
	}
	return l
}

// defaultTolerance is what holds where the registry says nothing.
const defaultTolerance = 30 * time.Second

func issuerOutOf(i *identityv1.Issuer) issuerOut {
	tolerance := defaultTolerance
	if i.GetClockTolerance() != nil {
		tolerance = i.GetClockTolerance().AsDuration()
	}
	plans := i.GetPlans()
	if plans == nil {
		plans = map[string]string{}
	}
	return issuerOut{Issuer: i.GetIssuer(), Audience: i.GetAudience(), Tenant: i.GetTenant(), Algorithms: notNull(i.GetAlgorithms()), ClockToleranceMS: ms(tolerance),
		Plan: i.GetPlan(), PlanClaim: i.GetPlanClaim(), Plans: plans, GroupsClaim: i.GetGroupsClaim(), AdminGroups: notNull(i.GetAdminGroups()), TierFloor: i.GetTierFloor(),
		Frontends: notNull(i.GetFrontends()), Discovery: len(i.GetJwks()) == 0, ChangedAt: timeOf(i.GetChangedAt()), Revision: i.GetRevision(), Configured: i.GetConfigured()}
}

func issuerTestOutOf(issuer string, r *identityv1.IssuerTestReply) issuerTestOut {
	out := issuerTestOut{Issuer: issuer, Good: true, Checks: []checkOut{}, Tenant: r.GetTenant(), Subject: r.GetSubject(), Plan: r.GetPlan(), Administrator: r.GetAdministrator()}
	for _, c := range r.GetChecks() {
		out.Good = out.Good && c.GetGood()
		out.Checks = append(out.Checks, checkOut{c.GetName(), c.GetGood(), c.GetDetail()})
	}
	return out
}

func frontendOutOf(l *identityv1.Login) frontendOut {
	who, _ := subjects.ParseName(l.GetName()) // identity checked it
	return frontendOut{Tenant: string(who.Tenant), Frontend: string(who.Frontend), NKey: l.GetNkey(), Acting: l.GetActing(), Suspended: l.GetSuspended(),
		Reason: l.GetSuspendedWhy(), ChangedAt: timeOf(l.GetChangedAt()), Revision: l.GetRevision(), Configured: l.GetConfigured()}
}

func frontendsOutOf(all *identityv1.TenantsReply) frontendsOut {
	out := frontendsOut{Frontends: []frontendOut{}}
	for _, l := range all.GetLogins() {
		if who, err := subjects.ParseName(l.GetName()); err == nil && who.Role == subjects.RoleFrontend {
			out.Frontends = append(out.Frontends, frontendOutOf(l))
		}
	}
	return out
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// revisionWord is where a record can be changed.
func revisionWord(rev uint64, configured bool) string {
	if configured {
		return "configured"
	}
	return strconv.FormatUint(rev, 10)
}

func shutNote(suspended bool, why string) string {
	switch {
	case !suspended:
		return ""
	case why == "":
		return "suspended"
	}
	return "suspended: " + plain(why)
}

func (a *app) renderTenants(o tenantsOut) {
	if len(o.Tenants) == 0 {
		fmt.Fprintln(a.stdout, "no tenants")
		return
	}
	rows := [][]string{{"TENANT", "PLAN", "TIER FLOOR", "ADMIN ATTACH", "REVISION", "NOTE"}}
	for _, t := range o.Tenants {
		rows = append(rows, []string{t.Tenant, or(t.Plan, "-"), or(t.TierFloor, "-"), yes(t.AdminAttach), revisionWord(t.Revision, t.Configured), shutNote(t.Suspended, t.Reason)})
	}
	table(a.stdout, rows)
}

func (a *app) renderTenant(o tenantShowOut) {
	a.fields("tenant", o.Tenant, "plan", o.Plan, "tier floor", o.TierFloor, "admin attach", yes(o.AdminAttach),
		"revision", revisionWord(o.Revision, o.Configured), "state", or(shutNote(o.Suspended, o.Reason), "let in"))
	for _, i := range o.Issuers {
		fmt.Fprintln(a.stdout)
		a.renderIssuer(i)
	}
	if len(o.Frontends) > 0 {
		fmt.Fprintln(a.stdout)
		a.renderFrontends(frontendsOut{o.Frontends})
	}
	if len(o.Shut) > 0 {
		fmt.Fprintln(a.stdout)
		rows := [][]string{{"SUSPENDED", "BY", "SINCE", "REASON"}}
		for _, s := range o.Shut {
			since := "-"
			if s.At != nil {
				since = s.At.UTC().Format(time.RFC3339)
			}
			rows = append(rows, []string{whom{s.Tenant, s.Issuer, s.Subject, s.Frontend}.String(), or(s.By, "-"), since, plain(s.Reason)})
		}
		table(a.stdout, rows)
	}
}

func (a *app) renderIssuer(i issuerOut) {
	var plans []string
	for _, value := range slices.Sorted(maps.Keys(i.Plans)) {
		plans = append(plans, plain(value)+" is "+i.Plans[value])
	}
	keys := "OIDC discovery"
	if !i.Discovery {
		keys = "in the registry"
	}
	a.fields("issuer", plain(i.Issuer), "audience", plain(i.Audience), "keys", keys, "algorithms", or(pairs(i.Algorithms), "RS256, ES256, EdDSA"),
		"clock", span(i.ClockToleranceMS)+" off at most", "plan", i.Plan, "plan claim", plain(i.PlanClaim), "plans", pairs(plans), "groups claim", plain(i.GroupsClaim),
		"admin groups", plain(pairs(i.AdminGroups)), "tier floor", i.TierFloor, "frontends", pairs(i.Frontends), "revision", revisionWord(i.Revision, i.Configured))
}

func (a *app) renderFrontends(o frontendsOut) {
	if len(o.Frontends) == 0 {
		fmt.Fprintln(a.stdout, "no frontends")
		return
	}
	rows := [][]string{{"TENANT", "FRONTEND", "KEY", "ACTS AS", "REVISION", "NOTE"}}
	for _, f := range o.Frontends {
		rows = append(rows, []string{f.Tenant, f.Frontend, f.NKey, or(plain(f.Acting), "-"), revisionWord(f.Revision, f.Configured), shutNote(f.Suspended, f.Reason)})
	}
	table(a.stdout, rows)
}

func (a *app) renderIssuerTest(o issuerTestOut) {
	for _, c := range o.Checks {
		word := "good"
		if !c.Good {
			word = "BAD "
		}
		fmt.Fprintf(a.stdout, "%s  %s: %s\n", word, c.Name, plain(c.Detail))
	}
	if o.Subject != "" {
		a.fields("tenant", o.Tenant, "user", plain(o.Subject), "plan", o.Plan, "administrator", yes(o.Administrator))
	}
}
