package main

import (
	"fmt"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// linkCmd handles the links of a cluster on this machine.
type linkCmd struct {
	Show  linkShowCmd  `cmd:"" help:"Show links that are not as they should be, and what every member sent."`
	Cut   linkCutCmd   `cmd:"" help:"Let nothing through between two members, or between one and all others."`
	Delay linkDelayCmd `cmd:"" help:"Delay packets."`
	Lose  linkLoseCmd  `cmd:"" help:"Lose, duplicate or reorder a percentage of packets."`
	Heal  linkHealCmd  `cmd:"" help:"Let packets through again."`
}

// ends are the two ends of links.
type ends struct {
	A      string `arg:"" help:"Member as in berth dev member list, root (this machine: clients and the other services), or * or host-* for several."`
	B      string `arg:"" optional:"" default:"*" help:"The other end; default: all others."`
	OneWay bool   `help:"Only packets from A to B."`
}

func (e ends) set(a *app, r wire.Rule) error {
	if err := r.Check(); err != nil {
		return exitCode{2, err.Error()}
	}
	out, err := control.Dial(a.dir).Set(a.ctx, control.Set{From: e.A, To: e.B, OneWay: e.OneWay, Rule: r})
	if err != nil {
		return err
	}
	return a.print(out, func() { a.renderLinks(out) })
}

type linkShowCmd struct{}

func (c *linkShowCmd) Run(a *app) error {
	out, err := control.Dial(a.dir).Links(a.ctx)
	if err != nil {
		return err
	}
	return a.print(out, func() { a.renderLinks(out) })
}

type linkCutCmd struct{ ends }

func (c *linkCutCmd) Run(a *app) error { return c.set(a, wire.Rule{Cut: true}) }

type linkDelayCmd struct {
	ends
	By     time.Duration `help:"So much." required:"" placeholder:"DURATION"`
	Jitter time.Duration `help:"Up to so much more." placeholder:"DURATION"`
}

func (c *linkDelayCmd) Run(a *app) error {
	return c.set(a, wire.Rule{Delay: c.By, Jitter: c.Jitter})
}

type linkLoseCmd struct {
	ends
	Percent   float64 `help:"Percent that are lost." default:"0"`
	Duplicate float64 `help:"Percent that arrive twice." default:"0"`
	Reorder   float64 `help:"Percent that those behind overtake." default:"0"`
}

func (c *linkLoseCmd) Run(a *app) error {
	r := wire.Rule{Loss: c.Percent, Duplicate: c.Duplicate, Reorder: c.Reorder}
	if r == (wire.Rule{}) {
		return usage("say what is to happen: --percent, --duplicate or --reorder")
	}
	return c.set(a, r)
}

type linkHealCmd struct {
	A      string `arg:"" optional:"" default:"*" help:"One end; default: all."`
	B      string `arg:"" optional:"" default:"*" help:"The other end; default: all others."`
	OneWay bool   `help:"Only packets from A to B."`
}

func (c *linkHealCmd) Run(a *app) error {
	return ends{c.A, c.B, c.OneWay}.set(a, wire.Rule{})
}

func (a *app) renderLinks(out control.Links) {
	if len(out.Links) == 0 {
		fmt.Fprintln(a.stdout, "every link is as it should be")
	}
	w := tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	if len(out.Links) > 0 {
		fmt.Fprintln(w, "FROM\tTO\tWHAT")
	}
	for _, l := range out.Links {
		fmt.Fprintf(w, "%s\t%s\t%s\n", l.From, l.To, ruleWords(l.Rule))
	}
	w.Flush()
	w = tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintln(w, "\nMEMBER\tPACKETS\tBYTES\tDROPPED\tREFUSED")
	sort.Strings(out.Ports)
	for _, p := range out.Ports {
		c := out.Counts[p]
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\n", p, c.Packets, c.Bytes, c.Dropped, c.Refused)
	}
}

func ruleWords(r wire.Rule) string {
	if r.Cut {
		return "cut"
	}
	var out []string
	if r.Delay > 0 || r.Jitter > 0 {
		out = append(out, "delayed by "+r.Delay.String())
	}
	if r.Jitter > 0 {
		out = append(out, "and up to "+r.Jitter.String()+" more")
	}
	for _, p := range []struct {
		percent float64
		what    string
	}{{r.Loss, "lost"}, {r.Duplicate, "twice"}, {r.Reorder, "reordered"}} {
		if p.percent > 0 {
			out = append(out, fmt.Sprintf("%g%% %s", p.percent, p.what))
		}
	}
	return strings.Join(out, ", ")
}

// memberCmd handles the processes of a cluster on this machine.
type memberCmd struct {
	List    memberListCmd    `cmd:"" help:"List the processes of the cluster."`
	Kill    memberKillCmd    `cmd:"" help:"Kill a member (SIGKILL); it is started again, unless it is held."`
	Pause   memberPauseCmd   `cmd:"" help:"Stop every thread of a member (SIGSTOP)."`
	Resume  memberResumeCmd  `cmd:"" help:"Let a paused member go on."`
	Restart memberRestartCmd `cmd:"" help:"End a member in order, if it runs, and start it."`
}

type memberArg struct {
	Name string `arg:"" help:"Name as in berth dev member list; * or host-* for several."`
}

func (m memberArg) act(a *app, verb string) error {
	out, err := control.Dial(a.dir).Act(a.ctx, control.Act{Name: m.Name, Verb: verb})
	if err != nil {
		return err
	}
	return a.print(membersOut{out}, func() { a.renderMembers(out) })
}

// membersOut is the JSON of member commands.
type membersOut struct {
	Members []control.Member `json:"members"`
}

type memberListCmd struct{}

func (c *memberListCmd) Run(a *app) error {
	out, err := control.Dial(a.dir).Members(a.ctx)
	if err != nil {
		return err
	}
	return a.print(membersOut{out}, func() { a.renderMembers(out) })
}

type memberKillCmd struct {
	memberArg
	Hold bool `help:"Do not start it again until berth dev member restart."`
}

func (c *memberKillCmd) Run(a *app) error {
	if c.Hold {
		return c.act(a, control.Hold)
	}
	return c.act(a, control.Kill)
}

type memberPauseCmd struct{ memberArg }

func (c *memberPauseCmd) Run(a *app) error { return c.act(a, control.Pause) }

type memberResumeCmd struct{ memberArg }

func (c *memberResumeCmd) Run(a *app) error { return c.act(a, control.Resume) }

type memberRestartCmd struct{ memberArg }

func (c *memberRestartCmd) Run(a *app) error { return c.act(a, control.Restart) }

func (a *app) renderMembers(all []control.Member) {
	w := tabwriter.NewWriter(a.stdout, 0, 8, 2, ' ', 0)
	defer w.Flush()
	fmt.Fprintln(w, "NAME\tSTATE\tPID\tADDRESS\tRESTARTS\tLOG")
	for _, m := range all {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%d\t%s\n", m.Name, m.State, m.PID, m.Address, m.Restarts, m.Log)
	}
}
