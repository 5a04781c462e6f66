package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type sessionCmd struct {
	Open    sessionOpenCmd    `cmd:"" help:"Open a session: create, wake or join it, and print what the place is."`
	List    sessionListCmd    `cmd:"" help:"List sessions: all of them (operator), or with --mine the user's own."`
	Show    sessionShowCmd    `cmd:"" help:"Show a session and the time of every step of its last wake."`
	Explain sessionExplainCmd `cmd:"" help:"Say why a session is where it is, what it waits for, and where it would wake now."`
	Close   sessionCloseCmd   `cmd:"" help:"Put a session to sleep now; an ephemeral one is deleted."`
	Delete  sessionDeleteCmd  `cmd:"" help:"Delete a session, its disk and its keys, for good."`
}

type sessionOpenCmd struct {
	userFlags
	selector
	Ephemeral bool   `help:"Close or idle deletes it."`
	Template  string `help:"Template; default: the plan's." placeholder:"NAME"`
	MinTier   string `help:"Weakest tier that is acceptable: container, gvisor, kata or microvm." placeholder:"TIER"`
	riskFlags
	Wait      time.Duration `help:"How long to wait for the session to be ready." default:"60s"`
	NoWait    bool          `help:"Put the request on the queue and return once it is stored."`
	Queue     bool          `help:"Use the durable door."`
	RequestID string        `help:"Makes the open idempotent." placeholder:"ID"`
}

func (c *sessionOpenCmd) Run(a *app) error {
	cl, name, err := c.named(a, c.Session)
	if err != nil {
		return err
	}
	defer cl.Close()
	o := sdk.OpenOptions{Name: name, Template: c.Template, MinTier: sdk.Tier(c.MinTier), Risk: c.risk(),
		Wait: c.Wait, ViaQueue: c.Queue, RequestID: c.RequestID}
	if c.Ephemeral {
		o.Persistence = sdk.Ephemeral
	}
	if c.NoWait {
		id, err := cl.Submit(a.ctx, o)
		if err != nil {
			return err
		}
		return a.print(submittedOut{RequestID: id}, func() { fmt.Fprintf(a.stdout, "stored as request %s\n", id) })
	}
	if isTerminal(a.stderr) && !a.json {
		o.Progress = func(e sdk.Event) { fmt.Fprintf(a.stderr, "%s\n", a.eventLine(e)) }
	}
	s, err := a.open(cl, o)
	if err != nil {
		return err
	}
	defer s.Detach()
	return a.print(openOutOf(s), func() { a.renderOpen(openOutOf(s)) })
}

type sessionListCmd struct {
	userFlags
	Mine    bool `help:"The user's own sessions, asked of identity."`
	Deleted bool `help:"Also sessions that are deleted and still remembered."`
}

func (c *sessionListCmd) Run(a *app) error {
	var out listOut
	var err error
	if c.Mine {
		out, err = c.mine(a)
	} else {
		out, err = c.all(a)
	}
	if err != nil {
		return err
	}
	return a.print(out, func() { a.renderList(out) })
}

func (c *sessionListCmd) mine(a *app) (listOut, error) {
	cl, err := c.connect(a)
	if err != nil {
		return listOut{}, err
	}
	defer cl.Close()
	list, err := cl.Status(a.ctx, sdk.UserSession{})
	out := listOut{Sessions: []sessionOut{}}
	for _, s := range list {
		out.Sessions = append(out.Sessions, statusOut(string(cl.Identity().Tenant), s))
	}
	return out, err
}

func (c *sessionListCmd) all(a *app) (listOut, error) {
	if c.Tenant != "" {
		if _, err := ids.ParseTenant(c.Tenant); err != nil {
			return listOut{}, exitCode{2, err.Error()}
		}
	}
	op, err := a.operator()
	if err != nil {
		return listOut{}, err
	}
	defer op.Close()
	out := listOut{Sessions: []sessionOut{}}
	err = records(a.ctx, op, &schedulerv1.ListRequest{Tenant: c.Tenant, Deleted: c.Deleted}, func(r *schedulerv1.SessionRecord) {
		out.Sessions = append(out.Sessions, recordOut(r))
	})
	return out, err
}

type sessionShowCmd struct{ target }

func (c *sessionShowCmd) Run(a *app) error {
	op, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer op.Close()
	out := showOutOf(rec)
	return a.print(out, func() { a.renderShow(out) })
}

type sessionCloseCmd struct {
	userFlags
	selector
	Queue     bool   `help:"Use the durable door."`
	RequestID string `help:"Makes the close idempotent." placeholder:"ID"`
}

func (c *sessionCloseCmd) Run(a *app) error {
	return c.userFlags.end(a, c.Session, "closed", func(ctx context.Context, cl *sdk.Client, name string) error {
		err := cl.CloseSession(ctx, sdk.UserSession{Name: name, RequestID: c.RequestID, ViaQueue: c.Queue})
		if errors.Is(err, sdk.ErrNotFound) {
			return fmt.Errorf("this user has no session %q", name)
		}
		return err
	})
}

type sessionDeleteCmd struct {
	userFlags
	Session   string `arg:"" help:"Name or key of the session." placeholder:"SESSION"`
	Queue     bool   `help:"Use the durable door."`
	RequestID string `help:"Makes the delete idempotent." placeholder:"ID"`
}

func (c *sessionDeleteCmd) Run(a *app) error {
	return c.userFlags.end(a, c.Session, "deleted", func(ctx context.Context, cl *sdk.Client, name string) error {
		if c.RequestID == "" && !c.Queue { // a mistyped name must not look like a deletion
			if err := exists(ctx, cl, name); err != nil {
				return err
			}
		}
		return cl.DeleteSession(ctx, sdk.UserSession{Name: name, RequestID: c.RequestID, ViaQueue: c.Queue})
	})
}

// exists refuses the name of a session that the user does not have.
func exists(ctx context.Context, cl *sdk.Client, name string) error {
	_, ok, err := owned(ctx, cl, name)
	if err == nil && !ok {
		err = fmt.Errorf("this user has no session %q", name)
	}
	return err
}

// owned finds a session of the user by its name.
func owned(ctx context.Context, cl *sdk.Client, name string) (s sdk.Status, ok bool, err error) {
	list, err := cl.Status(ctx, sdk.UserSession{Name: name})
	i := slices.IndexFunc(list, func(s sdk.Status) bool { return s.Name == name })
	if err != nil || i < 0 {
		return s, false, err
	}
	return list[i], true, nil
}

// end runs a close or a delete and says so.
func (u userFlags) end(a *app, session, done string, do func(context.Context, *sdk.Client, string) error) error {
	cl, name, err := u.named(a, session)
	if err != nil {
		return err
	}
	defer cl.Close()
	if err := do(a.ctx, cl, name); err != nil {
		return err
	}
	return a.print(doneOut{Name: name, Done: done}, func() { fmt.Fprintf(a.stdout, "session %s %s\n", name, done) })
}

func word(s fmt.Stringer, prefix string) string { return lowerWord(s.String(), prefix) }

func stateWord(s corev1.State) string { return word(s, "STATE_") }
