package main

import (
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// delegationCmd is what a user sees, and settles, about who acts for them.
type delegationCmd struct {
	List   delegationListCmd   `cmd:"" help:"List which frontends acted for the user, and which may not any more."`
	Revoke delegationRevokeCmd `cmd:"" help:"Take from a frontend the right to act for the user; its grants end at once."`
	Allow  delegationAllowCmd  `cmd:"" help:"Give that right back."`
}

type actedForOut struct {
	Frontend  string     `json:"frontend"`
	Acting    string     `json:"acting,omitempty"`
	FirstAt   *time.Time `json:"first_at,omitempty"`
	LastAt    *time.Time `json:"last_at,omitempty"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
}

type delegationOut struct {
	Frontends []actedForOut `json:"frontends"`
}

func delegationOutOf(list []sdk.ActedFor) delegationOut {
	out := delegationOut{Frontends: []actedForOut{}}
	given := func(t time.Time) *time.Time {
		if t.IsZero() {
			return nil
		}
		t = t.UTC()
		return &t
	}
	for _, f := range list {
		out.Frontends = append(out.Frontends, actedForOut{Frontend: f.Frontend, Acting: f.Acting, FirstAt: given(f.FirstAt), LastAt: given(f.LastAt), RevokedAt: given(f.RevokedAt)})
	}
	return out
}

func (a *app) renderDelegation(out delegationOut) {
	if len(out.Frontends) == 0 {
		fmt.Fprintln(a.stdout, "no frontend acted for this user")
		return
	}
	w := tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	defer w.Flush()
	when := func(t *time.Time) string {
		if t == nil {
			return "-"
		}
		return t.Format("2006-01-02 15:04")
	}
	fmt.Fprintln(w, "FRONTEND\tACTING AS\tFIRST\tLAST (HOUR)\tREVOKED")
	for _, f := range out.Frontends {
		acting := "-"
		if f.Acting != "" {
			acting = fmt.Sprintf("%q", f.Acting) // chosen by an issuer, not by us
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", f.Frontend, acting, when(f.FirstAt), when(f.LastAt), when(f.RevokedAt))
	}
}

type delegationListCmd struct{ userFlags }

func (c *delegationListCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	list, err := cl.Frontends(a.ctx, nil)
	if err != nil {
		return err
	}
	out := delegationOutOf(list)
	return a.print(out, func() { a.renderDelegation(out) })
}

// frontendArg names a frontend of the user's tenant.
type frontendArg struct {
	Frontend string `arg:"" help:"Name of the frontend, without the tenant." placeholder:"FRONTEND"`
}

type delegationRevokeCmd struct {
	userFlags
	frontendArg
}

func (c *delegationRevokeCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	if string(cl.Identity().Frontend) == c.Frontend {
		fmt.Fprintf(a.stderr, "berth: %s carries this very request; only another frontend can give the right back\n", c.Frontend)
	}
	if err := cl.RevokeFrontend(a.ctx, nil, c.Frontend); err != nil {
		return err
	}
	return a.print(doneOut{Name: c.Frontend, Done: "revoked"}, func() { fmt.Fprintf(a.stdout, "%s may not act for this user any more\n", c.Frontend) })
}

type delegationAllowCmd struct {
	userFlags
	frontendArg
}

func (c *delegationAllowCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	if err := cl.AllowFrontend(a.ctx, nil, c.Frontend); err != nil {
		return err
	}
	return a.print(doneOut{Name: c.Frontend, Done: "allowed"}, func() { fmt.Fprintf(a.stdout, "%s may act for this user again\n", c.Frontend) })
}
