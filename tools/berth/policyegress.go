package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/egress/policy"
)

type policyEgressCmd struct {
	Apply  egressApplyCmd  `cmd:"" help:"Replace the policy of one scope: docs/howto/egress.md."`
	Show   egressShowCmd   `cmd:"" help:"Show policies in force."`
	Remove egressRemoveCmd `cmd:"" help:"End the policy of one scope."`
	Test   egressTestCmd   `cmd:"" help:"Say what a request would get and why, or ask the cases of a file (-f)."`
	Diff   egressDiffCmd   `cmd:"" help:"Say what a file would change."`
	Replay egressReplayCmd `cmd:"" help:"Say what a policy would have made of recorded traffic."`
	Allow  egressAllowCmd  `cmd:"" help:"Add a rule that allows a host, or what was denied (--denied)."`
}

// scopeFlags name what a policy is for.
type scopeFlags struct {
	Cell     bool   `help:"The policy of the whole cell." xor:"scope"`
	Plan     string `help:"The policy of a plan." placeholder:"PLAN" xor:"scope"`
	Template string `help:"The policy of a template." placeholder:"TEMPLATE" xor:"scope"`
	Session  string `help:"The policy of a session: its key." placeholder:"KEY" xor:"scope"`
	Tenant   string `help:"The policy of a tenant; with --session, the session's tenant." placeholder:"TENANT"`
}

// none reports whether no scope is named.
func (f scopeFlags) none() bool { return f == scopeFlags{} }

// scope is the one that is named.
func (f scopeFlags) scope() (*egressv1.Scope, error) {
	if f.Tenant != "" && (f.Cell || f.Plan != "" || f.Template != "") {
		return nil, usage("name one scope: --cell, --plan, --tenant, --template or --session")
	}
	if f.Tenant != "" {
		if _, err := ids.ParseTenant(f.Tenant); err != nil {
			return nil, exitCode{2, err.Error()}
		}
	}
	switch {
	case f.Cell:
		return scopeOf(egressv1.Layer_LAYER_CELL, ""), nil
	case f.Plan != "":
		if !ids.IsToken(f.Plan) {
			return nil, usage("%q is no plan", f.Plan)
		}
		return scopeOf(egressv1.Layer_LAYER_PLAN, f.Plan), nil
	case f.Template != "":
		if _, err := ids.ParseTemplate(f.Template); err != nil {
			return nil, exitCode{2, err.Error()}
		}
		return scopeOf(egressv1.Layer_LAYER_TEMPLATE, f.Template), nil
	case f.Session != "":
		if _, err := ids.ParseSessionKey(f.Session); err != nil {
			return nil, exitCode{2, err.Error()}
		}
		return &egressv1.Scope{Layer: egressv1.Layer_LAYER_SESSION, Name: f.Session, Tenant: f.Tenant}, nil
	case f.Tenant != "":
		return scopeOf(egressv1.Layer_LAYER_TENANT, f.Tenant), nil
	}
	return nil, usage("say whose policy: --cell, --plan, --tenant, --template or --session")
}

func scopeOf(l egressv1.Layer, name string) *egressv1.Scope {
	return &egressv1.Scope{Layer: l, Name: name}
}

// scopeWord is a scope for a person.
func scopeWord(s *egressv1.Scope) string {
	text := policy.LayerName(s.GetLayer())
	if s.GetName() != "" {
		text += " " + s.GetName()
	}
	return text
}

// egressOp is the operator's way to the policies.
type egressOp struct{ *sdk.Client }

func (a *app) egress() (egressOp, error) {
	op, err := a.operator()
	return egressOp{op}, err
}

// named is the scope of the flags; of a session the tenant is found.
func (e egressOp) named(a *app, f scopeFlags) (*egressv1.Scope, error) {
	s, err := f.scope()
	if err != nil || s.GetLayer() != egressv1.Layer_LAYER_SESSION || s.GetTenant() != "" {
		return s, err
	}
	rec, err := e.session(a, "", f.Session)
	if err != nil {
		return nil, err
	}
	s.Tenant = rec.GetSession().GetTenant()
	return s, nil
}

func (e egressOp) session(a *app, tenant, key string) (*schedulerv1.SessionRecord, error) {
	reply := &schedulerv1.ShowReply{}
	if err := e.Call(a.ctx, "scheduler", "show", &schedulerv1.ShowRequest{Tenant: tenant, Session: key}, reply); err != nil {
		return nil, err
	}
	if reply.GetRecord() == nil {
		return nil, fmt.Errorf("there is no session %s", key)
	}
	return reply.GetRecord(), nil
}

// policies are those in force, of one scope or of all. Documents that did not fit in the answer are asked for
// one by one.
func (e egressOp) policies(a *app, scope *egressv1.Scope) ([]*egressv1.Policy, error) {
	list, err := e.asked(a, scope)
	if err != nil || scope != nil {
		return list, err
	}
	var out []*egressv1.Policy
	for _, p := range list {
		if len(p.GetDocument()) > 0 {
			out = append(out, p)
			continue
		}
		one, err := e.asked(a, p.GetScope())
		if err != nil {
			return nil, err
		}
		out = append(out, one...) // none: it was removed meanwhile
	}
	return out, nil
}

// asked is one answer of egress.
func (e egressOp) asked(a *app, scope *egressv1.Scope) ([]*egressv1.Policy, error) {
	reply := &egressv1.PoliciesReply{}
	err := e.Call(a.ctx, "egress", "policies", &egressv1.PoliciesRequest{Scope: scope}, reply)
	if errors.Is(err, sdk.ErrNotFound) {
		return nil, nil
	}
	return reply.GetPolicies(), err
}

// inForce is the policy of a scope; an empty one of generation 0 if there is none.
func (e egressOp) inForce(a *app, scope *egressv1.Scope) (*egressv1.Policy, error) {
	all, err := e.policies(a, scope)
	if err != nil || len(all) == 0 {
		return &egressv1.Policy{Scope: scope}, err
	}
	return all[0], nil
}

// apply stores a document in place of a generation.
func (e egressOp) apply(a *app, req *egressv1.ApplyRequest) (uint64, error) {
	req.By = or(os.Getenv("SUDO_USER"), or(os.Getenv("USER"), "operator"))
	reply := &egressv1.ApplyReply{}
	err := e.Call(a.ctx, "egress", "apply", req, reply)
	if errors.Is(err, sdk.ErrConflict) {
		return 0, fmt.Errorf("somebody changed the policy of %s after generation %d; nothing was applied: look at it and try again", scopeWord(req.GetScope()), req.GetReplaces())
	}
	return reply.GetGeneration(), err
}

// readPolicy reads a file of a policy; a file that is wrong is wrong usage.
func (a *app) readPolicy(file string) ([]byte, *policy.Document, error) {
	raw, err := a.readText(file)
	if err != nil {
		return nil, nil, err
	}
	d, err := policy.Parse(raw)
	if err != nil {
		return nil, nil, exitCode{2, file + ": " + err.Error()}
	}
	return raw, d, nil
}

// readText reads a file of policies or cases; - is the standard input.
func (a *app) readText(file string) ([]byte, error) {
	var in io.Reader = a.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, exitCode{2, "read the policy: " + err.Error()}
		}
		defer f.Close()
		in = f
	}
	raw, err := io.ReadAll(io.LimitReader(in, policy.MaxFile+1))
	if err != nil {
		return nil, exitCode{2, "read the policy: " + err.Error()}
	}
	return raw, nil
}

// stored reads a document that is in force; nil if there is none.
func stored(p *egressv1.Policy) (*policy.Document, error) {
	if p.GetGeneration() == 0 {
		return nil, nil
	}
	d, err := policy.Parse(p.GetDocument())
	if err != nil {
		return nil, fmt.Errorf("the policy of %s in force cannot be read by this version: %w", scopeWord(p.GetScope()), err)
	}
	return d, nil
}

type egressApplyCmd struct {
	scopeFlags
	File     string `short:"f" required:"" help:"File of the policy (YAML); - is the standard input." placeholder:"FILE"`
	Replaces uint64 `help:"Only if this generation is in force; 0 or left out: the one that is in force now." placeholder:"GENERATION"`
	New      bool   `help:"Only if the scope has no policy yet." xor:"replaces"`
	DryRun   bool   `help:"Only say what would change."`
}

func (c *egressApplyCmd) Run(a *app) error {
	if _, err := c.scope(); err != nil {
		return err
	}
	raw, now, err := a.readPolicy(c.File)
	if err != nil {
		return err
	}
	op, err := a.egress()
	if err != nil {
		return err
	}
	defer op.Close()
	scope, err := op.named(a, c.scopeFlags)
	if err != nil {
		return err
	}
	was, err := op.inForce(a, scope)
	if err != nil {
		return err
	}
	out := egressAppliedOut{scopeOut: scopeOutOf(scope), Replaced: was.GetGeneration(), DryRun: c.DryRun, Rules: len(now.Rules)}
	if c.Replaces != 0 && c.Replaces != was.GetGeneration() || c.New && was.GetGeneration() != 0 {
		return fmt.Errorf("generation %d of the policy of %s is in force; nothing was applied", was.GetGeneration(), scopeWord(scope))
	}
	old, err := stored(was)
	if err != nil {
		fmt.Fprintf(a.stderr, "berth: %v\n", err) // it is replaced
	}
	out.Changes = policy.Diff(old, now)
	if !c.DryRun {
		if out.Generation, err = op.apply(a, &egressv1.ApplyRequest{Scope: scope, Document: raw, Replaces: was.GetGeneration()}); err != nil {
			return refusedFile(c.File, err)
		}
	}
	return a.print(out, func() { a.renderEgressApplied(out) })
}

// refusedFile is one sentence: the file, and what the platform says of it.
func refusedFile(file string, err error) error {
	var e *sdk.Error
	if !errors.Is(err, sdk.ErrInvalid) || !errors.As(err, &e) || e.Reason == "" {
		return err
	}
	return exitCode{2, file + ": " + e.Reason}
}

type egressShowCmd struct{ scopeFlags }

func (c *egressShowCmd) Run(a *app) error {
	if !c.none() {
		if _, err := c.scope(); err != nil {
			return err
		}
	}
	op, err := a.egress()
	if err != nil {
		return err
	}
	defer op.Close()
	var scope *egressv1.Scope
	if !c.none() {
		if scope, err = op.named(a, c.scopeFlags); err != nil {
			return err
		}
	}
	all, err := op.policies(a, scope)
	if err != nil {
		return err
	}
	if scope != nil && len(all) == 0 {
		return fmt.Errorf("there is no policy of %s", scopeWord(scope))
	}
	out := egressPoliciesOutOf(all)
	return a.print(out, func() { a.renderEgressPolicies(out, scope != nil) })
}

type egressRemoveCmd struct {
	scopeFlags
	Replaces uint64 `help:"Only if this generation is in force; left out: the one that is in force now." placeholder:"GENERATION"`
}

func (c *egressRemoveCmd) Run(a *app) error {
	if _, err := c.scope(); err != nil {
		return err
	}
	op, err := a.egress()
	if err != nil {
		return err
	}
	defer op.Close()
	scope, err := op.named(a, c.scopeFlags)
	if err != nil {
		return err
	}
	was, err := op.inForce(a, scope)
	if err != nil {
		return err
	}
	switch {
	case was.GetGeneration() == 0:
		return fmt.Errorf("there is no policy of %s", scopeWord(scope))
	case c.Replaces != 0 && c.Replaces != was.GetGeneration():
		return fmt.Errorf("generation %d of the policy of %s is in force; nothing was removed", was.GetGeneration(), scopeWord(scope))
	}
	err = op.Call(a.ctx, "egress", "remove", &egressv1.RemovePolicyRequest{Scope: scope, Replaces: was.GetGeneration()}, &egressv1.RemovePolicyReply{})
	if errors.Is(err, sdk.ErrConflict) {
		return fmt.Errorf("somebody changed the policy of %s after generation %d; nothing was removed: look at it and try again", scopeWord(scope), was.GetGeneration())
	}
	if err != nil {
		return err
	}
	out := egressRemovedOut{scopeOutOf(scope), was.GetGeneration(), true}
	return a.print(out, func() {
		fmt.Fprintf(a.stdout, "the policy of %s (generation %d) is removed\n", scopeWord(scope), out.Generation)
	})
}

type egressDiffCmd struct {
	scopeFlags
	File    string `short:"f" required:"" help:"File of the policy (YAML); - is the standard input." placeholder:"FILE"`
	Against string `help:"Compare with this file instead of the policy in force." placeholder:"FILE"`
}

func (c *egressDiffCmd) Run(a *app) error {
	if c.Against != "" && !c.none() {
		return usage("--against goes without a scope")
	}
	_, now, err := a.readPolicy(c.File)
	if err != nil {
		return err
	}
	var out egressDiffOut
	if c.Against != "" {
		_, old, err := a.readPolicy(c.Against)
		if err != nil {
			return err
		}
		out = egressDiffOut{Changes: policy.Diff(old, now)}
	} else if out, err = c.inForce(a, now); err != nil {
		return err
	}
	return a.print(out, func() { a.renderEgressDiff(out) })
}

func (c *egressDiffCmd) inForce(a *app, now *policy.Document) (out egressDiffOut, err error) {
	if _, err := c.scope(); err != nil {
		return out, err
	}
	op, err := a.egress()
	if err != nil {
		return out, err
	}
	defer op.Close()
	scope, err := op.named(a, c.scopeFlags)
	if err != nil {
		return out, err
	}
	was, err := op.inForce(a, scope)
	if err != nil {
		return out, err
	}
	old, err := stored(was)
	if err != nil {
		return out, err
	}
	at := scopeOutOf(scope)
	return egressDiffOut{Scope: &at, Generation: was.GetGeneration(), Changes: policy.Diff(old, now)}, nil
}

// layerOf reads a layer's name.
func layerOf(name string) (egressv1.Layer, bool) {
	l, ok := egressv1.Layer_value["LAYER_"+strings.ToUpper(name)]
	return egressv1.Layer(l), ok && l != 0 && strings.ToLower(name) == name
}
