package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/sdk"
)

// adminCmd is for administrators of a tenant; operator-attach is for operators.
type adminCmd struct {
	Sessions       adminSessionsCmd  `cmd:"" help:"List the tenant's sessions by handle."`
	Attach         adminAttachCmd    `cmd:"" help:"Look into a user's active session: its user is told, with the reason."`
	Suspend        adminSuspendCmd   `cmd:"" help:"Shut a user of the tenant out."`
	Resume         adminResumeCmd    `cmd:"" help:"Let a user of the tenant in again."`
	OperatorAttach operatorAttachCmd `cmd:"" help:"Look into a session of any tenant, as an operator: its user is told, with the reason."`
}

type adminSessionOut struct {
	Handle     string    `json:"handle"`
	State      string    `json:"state"`
	Template   string    `json:"template"`
	Tier       string    `json:"tier"`
	Generation string    `json:"generation"`
	ChangedAt  time.Time `json:"changed_at"`
}

type adminSessionsOut struct {
	Sessions []adminSessionOut `json:"sessions"`
}

func adminSessionsOutOf(list []sdk.AdminSession) adminSessionsOut {
	out := adminSessionsOut{Sessions: []adminSessionOut{}}
	for _, s := range list {
		out.Sessions = append(out.Sessions, adminSessionOut{Handle: s.Handle, State: string(s.State), Template: s.Template, Tier: string(s.Tier),
			Generation: s.Generation, ChangedAt: s.ChangedAt.UTC()})
	}
	return out
}

func (a *app) renderAdminSessions(out adminSessionsOut) {
	if len(out.Sessions) == 0 {
		fmt.Fprintln(a.stdout, "no sessions")
		return
	}
	w := tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintln(w, "HANDLE\tSTATE\tTEMPLATE\tTIER\tGENERATION\tCHANGED")
	for _, s := range out.Sessions {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", s.Handle, s.State, s.Template, s.Tier, s.Generation, s.ChangedAt.Format("2006-01-02 15:04:05"))
	}
}

type adminSessionsCmd struct {
	userFlags
	OfIssuer  string `help:"Only sessions of one user: the issuer." placeholder:"URL"`
	OfSubject string `help:"Only sessions of one user: the subject." placeholder:"SUBJECT"`
}

func (c *adminSessionsCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	list, err := cl.AdminSessions(a.ctx, sdk.AdminFilter{Issuer: c.OfIssuer, Subject: c.OfSubject})
	if err != nil {
		return err
	}
	out := adminSessionsOutOf(list)
	return a.print(out, func() { a.renderAdminSessions(out) })
}

// attachFlags say to whose session somebody attaches, and what for.
type attachFlags struct {
	OfIssuer   string   `help:"Issuer of the user whose session it must be." required:"" placeholder:"URL"`
	OfSubject  string   `help:"Subject of the user whose session it must be." required:"" placeholder:"SUBJECT"`
	Generation string   `help:"Generation that the session must have." required:"" placeholder:"N-N"`
	Reason     string   `help:"Why; the user can read it." required:"" placeholder:"TEXT"`
	List       string   `help:"List a directory." placeholder:"DIR" xor:"what"`
	Read       string   `help:"Print a file." placeholder:"FILE" xor:"what"`
	Exec       []string `help:"Run a program instead; words are separated by commas." placeholder:"WORD" xor:"what"`
}

func (f attachFlags) attach() sdk.Attach {
	a := sdk.Attach{Issuer: f.OfIssuer, Subject: f.OfSubject, Generation: f.Generation, Reason: f.Reason, Verbs: []sdk.Verb{sdk.VerbRead}}
	if len(f.Exec) > 0 {
		a.Verbs = []sdk.Verb{sdk.VerbExec}
	}
	return a
}

// look does the one thing that was asked for.
func (f attachFlags) look(a *app, s *sdk.Session) error {
	defer s.Detach()
	switch {
	case f.List != "":
		entries, err := s.Files().List(a.ctx, f.List)
		for _, e := range entries {
			fmt.Fprintf(a.stdout, "%q\n", e.Path) // chosen by the user, not by us
		}
		return err
	case f.Read != "":
		r, err := s.Files().Read(a.ctx, f.Read, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = io.Copy(a.stdout, r)
		return err
	case len(f.Exec) > 0:
		out, err := s.Output(a.ctx, f.Exec[0], f.Exec[1:]...)
		_, _ = a.stdout.Write(out)
		return err
	}
	text, err := s.Info(a.ctx)
	if err == nil {
		fmt.Fprintln(a.stdout, text)
	}
	return err
}

type adminAttachCmd struct {
	userFlags
	Handle string `arg:"" help:"Handle of the session, as berth admin sessions shows it." placeholder:"HANDLE"`
	attachFlags
}

func (c *adminAttachCmd) Run(a *app) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	ask := c.attach()
	ask.Handle = c.Handle
	s, err := cl.AdminAttach(a.ctx, ask)
	if err != nil {
		return err
	}
	return c.look(a, s)
}

type operatorAttachCmd struct {
	Tenant string `arg:"" help:"Tenant of the session." placeholder:"TENANT"`
	Key    string `arg:"" help:"Key of the session." placeholder:"KEY"`
	attachFlags
}

func (c *operatorAttachCmd) Run(a *app) error {
	cl, err := a.operator()
	if err != nil {
		return err
	}
	defer cl.Close()
	ask := c.attach()
	ask.Tenant, ask.Key = c.Tenant, c.Key
	s, err := cl.OperatorAttach(a.ctx, ask)
	if err != nil {
		return err
	}
	return c.look(a, s)
}

// aboutUser names one user of the administrator's tenant.
type aboutUser struct {
	userFlags
	OfIssuer  string `help:"Issuer of the user." required:"" placeholder:"URL"`
	OfSubject string `help:"Subject of the user." required:"" placeholder:"SUBJECT"`
	Reason    string `help:"Why." required:"" placeholder:"TEXT"`
}

func (c aboutUser) run(a *app, suspended bool, done string) error {
	cl, err := c.connect(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	if err := cl.AdminSuspend(a.ctx, nil, c.OfIssuer, c.OfSubject, c.Reason, suspended); err != nil {
		return err
	}
	return a.print(doneOut{Name: c.OfSubject, Done: done}, func() { fmt.Fprintf(a.stdout, "%q is %s\n", c.OfSubject, done) })
}

type adminSuspendCmd struct{ aboutUser }

func (c *adminSuspendCmd) Run(a *app) error { return c.run(a, true, "suspended") }

type adminResumeCmd struct{ aboutUser }

func (c *adminResumeCmd) Run(a *app) error { return c.run(a, false, "let in again") }

// attachedText says who looks into the session, and why, in their words.
func attachedText(b *identityv1.Attached) string {
	who := "an operator"
	if b.GetBy().GetRole() != "operator" {
		who = fmt.Sprintf("the administrator %q", b.GetBy().GetSubject())
	}
	return fmt.Sprintf("%s attached (%s) until %s: %q", who, strings.Join(b.GetVerbs(), ", "), b.GetUntil().AsTime().Format(time.TimeOnly), b.GetReason())
}
