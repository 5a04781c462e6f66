package main

import (
	"errors"
	"fmt"
	"strings"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type tenantCmd struct {
	Add     tenantAddCmd     `cmd:"" help:"Add a tenant, or change one (--revision)."`
	List    tenantListCmd    `cmd:"" help:"List tenants."`
	Show    tenantShowCmd    `cmd:"" help:"Show a tenant with its issuers, its frontends and who is suspended."`
	Suspend tenantSuspendCmd `cmd:"" help:"Shut out a tenant, one user of it or one frontend: grants and connections end at once."`
	Resume  tenantResumeCmd  `cmd:"" help:"End a suspension."`
}

// revisionFlag says which state of a record is changed.
type revisionFlag struct {
	Revision uint64 `help:"Change it instead, if it is still at this revision: what is not given anew is empty then." placeholder:"N"`
}

type tenantAddCmd struct {
	Tenant      string `arg:"" help:"Name of the tenant." placeholder:"TENANT"`
	Plan        string `help:"Plan of users whose issuer says nothing." placeholder:"PLAN"`
	TierFloor   string `help:"Weakest isolation tier: container, gvisor, kata or microvm." placeholder:"TIER"`
	AdminAttach bool   `help:"Let the tenant's administrators attach to users' sessions."`
	revisionFlag
}

func (c *tenantAddCmd) Run(a *app) error {
	if _, err := ids.ParseTenant(c.Tenant); err != nil {
		return exitCode{2, err.Error()}
	}
	reply := &identityv1.TenantPutReply{}
	err := a.registry("tenant_put", &identityv1.TenantPutRequest{Tenant: &identityv1.Tenant{Tenant: c.Tenant, Plan: c.Plan,
		TierFloor: c.TierFloor, AdminAttach: c.AdminAttach, Revision: c.Revision}}, reply)
	if err != nil {
		return err
	}
	out := tenantOutOf(reply.GetTenant())
	return a.print(out, func() { fmt.Fprintf(a.stdout, "tenant %s is at revision %d\n", out.Tenant, out.Revision) })
}

type tenantListCmd struct{}

func (c *tenantListCmd) Run(a *app) error {
	all, err := a.tenants("")
	if err != nil {
		return err
	}
	out := tenantsOutOf(all)
	return a.print(out, func() { a.renderTenants(out) })
}

type tenantShowCmd struct {
	Tenant string `arg:"" help:"Name of the tenant." placeholder:"TENANT"`
}

func (c *tenantShowCmd) Run(a *app) error {
	if _, err := ids.ParseTenant(c.Tenant); err != nil {
		return exitCode{2, err.Error()}
	}
	all, err := a.tenants(c.Tenant)
	if err != nil {
		return err
	}
	out := tenantShowOutOf(all)
	return a.print(out, func() { a.renderTenant(out) })
}

// whom names who is suspended.
type whom struct {
	Tenant   string `arg:"" help:"Name of the tenant." placeholder:"TENANT"`
	Issuer   string `help:"With --subject: one user, by the iss claim." placeholder:"URL"`
	Subject  string `help:"With --issuer: one user, by the sub claim." placeholder:"SUB"`
	Frontend string `help:"One frontend." placeholder:"NAME"`
}

func (w whom) suspension(reason string) (*identityv1.Suspension, error) {
	if _, err := ids.ParseTenant(w.Tenant); err != nil {
		return nil, exitCode{2, err.Error()}
	}
	if (w.Issuer == "") != (w.Subject == "") {
		return nil, usage("a user is named by --issuer and --subject, both")
	}
	if w.Issuer != "" && w.Frontend != "" {
		return nil, usage("a user and a frontend are two suspensions; give one of them")
	}
	return &identityv1.Suspension{Tenant: w.Tenant, Issuer: w.Issuer, Subject: w.Subject, Frontend: w.Frontend, Reason: reason}, nil
}

func (w whom) String() string {
	switch {
	case w.Frontend != "":
		return fmt.Sprintf("frontend %s of tenant %s", w.Frontend, w.Tenant)
	case w.Subject != "":
		return fmt.Sprintf("user %s of %s in tenant %s", plain(w.Subject), plain(w.Issuer), w.Tenant)
	}
	return "tenant " + w.Tenant
}

type tenantSuspendCmd struct {
	whom
	Reason string `help:"Why; whoever is shut out reads it." placeholder:"TEXT"`
}

func (c *tenantSuspendCmd) Run(a *app) error { return a.suspend(c.whom, c.Reason, true) }

type tenantResumeCmd struct{ whom }

func (c *tenantResumeCmd) Run(a *app) error { return a.suspend(c.whom, "", false) }

func (a *app) suspend(w whom, reason string, on bool) error {
	what, err := w.suspension(reason)
	if err != nil {
		return err
	}
	was := true
	if !on {
		if was, err = a.suspended(what); err != nil {
			return err
		}
	}
	if err := a.registry("suspend", &identityv1.SuspendRequest{What: what, Suspended: on}, &identityv1.SuspendReply{}); err != nil {
		return err
	}
	out := suspendedOut{Tenant: w.Tenant, Issuer: w.Issuer, Subject: w.Subject, Frontend: w.Frontend, Suspended: on, Reason: reason}
	return a.print(out, func() {
		switch {
		case on:
			fmt.Fprintf(a.stdout, "%s is suspended\n", w)
		case was:
			fmt.Fprintf(a.stdout, "%s is not suspended any more\n", w)
		default:
			fmt.Fprintf(a.stdout, "%s was not suspended\n", w)
		}
	})
}

// suspended reports whether just this is suspended now.
func (a *app) suspended(what *identityv1.Suspension) (bool, error) {
	all, err := a.tenants(what.GetTenant())
	for _, s := range all.GetSuspended() {
		if s.GetTenant() == what.GetTenant() && s.GetIssuer() == what.GetIssuer() && s.GetSubject() == what.GetSubject() && s.GetFrontend() == what.GetFrontend() {
			return true, nil
		}
	}
	return false, err
}

// tenants asks for everything of a tenant, or of all.
func (a *app) tenants(tenant string) (*identityv1.TenantsReply, error) {
	reply := &identityv1.TenantsReply{}
	err := a.registry("tenants", &identityv1.TenantsRequest{Tenant: tenant}, reply)
	if errors.Is(err, sdk.ErrNotFound) {
		return nil, fmt.Errorf("there is no tenant %s", tenant)
	}
	return reply, err
}

// pairs writes values that stand in a map or a list.
func pairs(of []string) string { return strings.Join(of, ", ") }
