package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type hostCmd struct {
	List   hostListCmd   `cmd:"" help:"List hosts."`
	Show   hostShowCmd   `cmd:"" help:"Show a host: what it has, and what is used of it."`
	Drain  hostDrainCmd  `cmd:"" help:"Hand over what a host has: sleeping sessions at once, awake ones when they are idle, or at the deadline."`
	Resume hostResumeCmd `cmd:"" help:"End a drain: the host takes sessions again."`
	Remove hostRemoveCmd `cmd:"" help:"Take a host out for good."`
}

// hosts gets what scheduler knows of all hosts.
func hosts(ctx context.Context, op *sdk.Client) ([]*schedulerv1.HostRecord, error) {
	reply := &schedulerv1.HostsReply{}
	err := op.Call(ctx, "scheduler", "hosts", &schedulerv1.HostsRequest{}, reply)
	return reply.GetHosts(), err
}

// hostNamed is one host's record.
func hostNamed(ctx context.Context, op *sdk.Client, name string) (*schedulerv1.HostRecord, error) {
	all, err := hosts(ctx, op)
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		if h.GetHost() == name {
			return h, nil
		}
	}
	return nil, noHost(name)
}

func noHost(name string) error { return fmt.Errorf("there is no host %s", name) }

// drain begins or ends a drain of the host.
func (h hostArg) drain(a *app, op *sdk.Client, on bool, within time.Duration) (*schedulerv1.HostRecord, error) {
	req, reply := &schedulerv1.DrainRequest{Host: h.Host, On: on}, &schedulerv1.DrainReply{}
	if on {
		req.Within = durationpb.New(within)
	}
	err := op.Call(a.ctx, "scheduler", "drain", req, reply)
	if errors.Is(err, sdk.ErrNotFound) {
		err = noHost(h.Host)
	}
	return reply.GetHost(), err
}

// hostArg names one host.
type hostArg struct {
	Host string `arg:"" help:"Id of the host." placeholder:"HOST"`
}

// with checks the name and runs f with the operator's login.
func (h hostArg) with(a *app, f func(*sdk.Client) error) error {
	if _, err := ids.ParseHost(h.Host); err != nil {
		return exitCode{2, err.Error()}
	}
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	return f(op)
}

type hostListCmd struct{}

func (c *hostListCmd) Run(a *app) error {
	op, err := a.operator()
	if err != nil {
		return err
	}
	defer op.Close()
	all, err := hosts(a.ctx, op)
	if err != nil {
		return err
	}
	out := hostsOutOf(all)
	return a.print(out, func() { a.renderHosts(out) })
}

type hostShowCmd struct{ hostArg }

func (c *hostShowCmd) Run(a *app) error {
	return c.with(a, func(op *sdk.Client) error {
		h, err := hostNamed(a.ctx, op, c.Host)
		if err != nil {
			return err
		}
		return a.printHost(h)
	})
}

func (a *app) printHost(h *schedulerv1.HostRecord) error {
	out := hostOutOf(h)
	return a.print(out, func() { a.renderHost(out) })
}

type hostDrainCmd struct {
	hostArg
	Within time.Duration `help:"Sessions that are still busy after so long are put to sleep all the same." default:"10m"`
	Wait   bool          `help:"Wait until nothing is left on it, and say how far it is."`
}

func (c *hostDrainCmd) Run(a *app) error {
	if c.Within < 0 {
		return usage("--within must not be negative")
	}
	return c.with(a, func(op *sdk.Client) error {
		h, err := c.drain(a, op, true, c.Within)
		if err != nil {
			return err
		}
		if c.Wait {
			if h, err = a.awaitDrained(op, h); err != nil {
				return err
			}
		}
		out := hostOutOf(h)
		return a.print(out, func() { fmt.Fprintln(a.stdout, drainWord(out)) })
	})
}

// drainPoll is how often the progress of a drain is asked for.
const drainPoll = 500 * time.Millisecond

// awaitDrained follows a drain to its end.
func (a *app) awaitDrained(op *sdk.Client, h *schedulerv1.HostRecord) (*schedulerv1.HostRecord, error) {
	name, said := h.GetHost(), ""
	for {
		switch {
		case h.GetDrained():
			return h, nil
		case h.GetLost():
			return nil, fmt.Errorf("host %s was lost while it drained; what was awake on it is handed over from the last snapshots", name)
		case !h.GetDraining():
			return nil, fmt.Errorf("the drain of host %s was ended by a resume", name)
		}
		if word := drainWord(hostOutOf(h)); word != said {
			fmt.Fprintln(a.stderr, word)
			said = word
		}
		select {
		case <-a.ctx.Done():
			return nil, a.ctx.Err()
		case <-time.After(drainPoll):
		}
		var err error
		if h, err = hostNamed(a.ctx, op, name); err != nil {
			return nil, err
		}
	}
}

// drainWord says how far a drain is.
func drainWord(h hostOut) string {
	asleep := int(h.Sessions) - int(h.Active)
	switch {
	case h.Drained:
		return "host " + h.Host + " is drained: nothing is left on it"
	case !h.Draining:
		return "host " + h.Host + " takes sessions again"
	}
	word := fmt.Sprintf("host %s drains: %d sleeping to move, %d awake", h.Host, max(asleep, 0), h.Active)
	if h.DrainDeadline != nil && h.Active > 0 {
		word += ", each until it is idle, and at the latest until " + when(*h.DrainDeadline)
	}
	if h.Unsaved > 0 {
		word += fmt.Sprintf("; %d to be saved first", h.Unsaved)
	}
	return word
}

type hostResumeCmd struct{ hostArg }

func (c *hostResumeCmd) Run(a *app) error {
	return c.with(a, func(op *sdk.Client) error {
		h, err := c.drain(a, op, false, 0)
		if err != nil {
			return err
		}
		out := hostOutOf(h)
		return a.print(out, func() { fmt.Fprintln(a.stdout, drainWord(out)) })
	})
}

type hostRemoveCmd struct {
	hostArg
	LoseUnsaved bool `help:"Give up files that are on this host alone: those sessions go back to their last snapshot, or fail if they were never saved."`
	Yes         bool `help:"Do not ask."`
}

func (c *hostRemoveCmd) Run(a *app) error {
	return c.with(a, func(op *sdk.Client) error {
		h, err := hostNamed(a.ctx, op, c.Host)
		if err != nil {
			return err
		}
		alone, err := unsavedOn(a.ctx, op, h)
		if err != nil {
			return err
		}
		if err := c.ask(a, alone); err != nil {
			return err
		}
		reply := &schedulerv1.RemoveHostReply{}
		if err := op.Call(a.ctx, "scheduler", "remove_host", &schedulerv1.RemoveHostRequest{Host: c.Host, LoseUnsaved: c.LoseUnsaved}, reply); err != nil {
			return err
		}
		out := removedOutOf(c.Host, reply)
		return a.print(out, func() { a.renderRemoved(out) })
	})
}

// unsavedOn lists the sessions whose newest files are on a host alone.
func unsavedOn(ctx context.Context, op *sdk.Client, h *schedulerv1.HostRecord) ([]*schedulerv1.SessionRecord, error) {
	if h.GetUnsaved() == 0 {
		return nil, nil
	}
	var out []*schedulerv1.SessionRecord
	err := records(ctx, op, &schedulerv1.ListRequest{}, func(r *schedulerv1.SessionRecord) {
		if r.GetNewestHost() == h.GetHost() {
			out = append(out, r)
		}
	})
	return out, err
}

// ask says what would be lost, and asks whether to go on.
func (c *hostRemoveCmd) ask(a *app, alone []*schedulerv1.SessionRecord) error {
	for i, r := range alone {
		if i == 10 {
			fmt.Fprintf(a.stderr, "  and %d more\n", len(alone)-i)
			break
		}
		loses := "goes back to its last snapshot, " + r.GetManifest()
		if r.GetManifest() == "" {
			loses = "was never saved, and fails"
		}
		fmt.Fprintf(a.stderr, "session %s (%s of %s, %s) %s\n", r.GetSession().GetSession(), plain(r.GetSessionName()),
			plain(r.GetActor().GetSubject()), r.GetSession().GetTenant(), loses)
	}
	n := count(len(alone), "session", "sessions")
	terminal := isTerminal(a.stdin) && isTerminal(a.stderr)
	switch {
	case len(alone) > 0 && !c.LoseUnsaved:
		return fmt.Errorf("the newest files of %s are on host %s alone; have it come back and drain it, or give them up with --lose-unsaved", n, c.Host)
	case c.Yes, len(alone) == 0 && !terminal:
		return nil
	case !terminal:
		return usage("files of %s would be lost with host %s; say --yes as well", n, c.Host)
	}
	loses := ""
	if len(alone) > 0 {
		loses = ", and files of " + n + " are lost"
	}
	fmt.Fprintf(a.stderr, "Host %s can never join again under this id%s. Write its id to go on: ", c.Host, loses)
	line, _ := bufio.NewReader(a.stdin).ReadString('\n')
	if strings.TrimSpace(line) != c.Host {
		return fmt.Errorf("nothing was removed")
	}
	return nil
}

// records calls f with every record of a list.
func records(ctx context.Context, op *sdk.Client, req *schedulerv1.ListRequest, f func(*schedulerv1.SessionRecord)) error {
	for req.Limit = 500; ; {
		reply := &schedulerv1.ListReply{}
		if err := op.Call(ctx, "scheduler", "list", req, reply); err != nil {
			return err
		}
		for _, r := range reply.GetRecords() {
			f(r)
		}
		if req.After = reply.GetNext(); req.After == "" {
			return nil
		}
	}
}

type hostsOut struct {
	Hosts []hostOut `json:"hosts"`
}

type hostOut struct {
	Host     string    `json:"host"`
	Alive    bool      `json:"alive"`
	Draining bool      `json:"draining"`
	Zone     string    `json:"zone"`
	Tiers    []string  `json:"tiers"`
	Capacity limitsOut `json:"capacity"`
	Sessions uint32    `json:"sessions"`
	Active   uint32    `json:"active"`

	State         string            `json:"state"`
	Lost          bool              `json:"lost"`
	Drained       bool              `json:"drained"`
	Unhealthy     string            `json:"unhealthy,omitempty"`
	DrainDeadline *time.Time        `json:"drain_deadline,omitempty"`
	Used          limitsOut         `json:"used"`
	Unsaved       uint32            `json:"unsaved"`
	LeaseLeftMS   float64           `json:"lease_left_ms"`
	Boot          string            `json:"boot"`
	Labels        map[string]string `json:"labels"`
	TierFacts     []tierFactOut     `json:"tier_facts"`
}

type removedOut struct {
	Host    string   `json:"host"`
	Removed bool     `json:"removed"`
	Rewound []string `json:"rewound"`
	Lost    []string `json:"lost"`
}

func hostsOutOf(all []*schedulerv1.HostRecord) hostsOut {
	out := hostsOut{Hosts: []hostOut{}}
	for _, h := range all {
		out.Hosts = append(out.Hosts, hostOutOf(h))
	}
	return out
}

func hostOutOf(h *schedulerv1.HostRecord) hostOut {
	o := hostOut{Host: h.GetHost(), Alive: h.GetAlive(), Draining: h.GetDraining(), Zone: h.GetZone(), Tiers: []string{},
		Capacity: limitsOutOf(h.GetCapacity()), Sessions: h.GetSessions(), Active: h.GetActive(), State: hostState(h), Lost: h.GetLost(),
		Drained: h.GetDrained(), Unhealthy: h.GetUnhealthy(), Used: limitsOutOf(h.GetUsed()), Unsaved: h.GetUnsaved(),
		LeaseLeftMS: ms(max(h.GetLeaseLeft().AsDuration(), 0)), Boot: h.GetBoot(), Labels: h.GetLabels()}
	for _, t := range h.GetTiers() {
		o.Tiers = append(o.Tiers, word(t, "TIER_"))
	}
	o.TierFacts = tierFactsOutOf(h.GetTierFacts())
	slices.Sort(o.Tiers)
	if o.Labels == nil {
		o.Labels = map[string]string{}
	}
	if t := h.GetDrainDeadline(); t.GetSeconds() > 0 {
		at := t.AsTime()
		o.DrainDeadline = &at
	}
	return o
}

// hostState is the one word that matters most.
func hostState(h *schedulerv1.HostRecord) string {
	switch {
	case h.GetLost() || !h.GetAlive():
		return "lost"
	case h.GetDrained():
		return "drained"
	case h.GetDraining():
		return "draining"
	case h.GetUnhealthy() != "":
		return "unhealthy"
	}
	return "alive"
}

func removedOutOf(host string, r *schedulerv1.RemoveHostReply) removedOut {
	out := removedOut{Host: host, Removed: true, Rewound: []string{}, Lost: []string{}}
	for _, s := range r.GetRewound() {
		out.Rewound = append(out.Rewound, s.GetSession())
	}
	for _, s := range r.GetLost() {
		out.Lost = append(out.Lost, s.GetSession())
	}
	return out
}
