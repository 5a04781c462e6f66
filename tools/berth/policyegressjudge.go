package main

import (
	"fmt"
	"iter"
	"strings"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/egress/policy"
)

// concern are the scopes that concern a session, of whom some may be left out.
type concern struct {
	Tenant   string `help:"By the policy in force of this tenant." placeholder:"TENANT"`
	Plan     string `help:"By the policy in force of this plan." placeholder:"PLAN"`
	Template string `help:"By the policy in force of this template." placeholder:"TEMPLATE"`
	Session  string `help:"By all policies in force that concern this session: its key." placeholder:"KEY"`
}

func (c concern) scopes() []*egressv1.Scope {
	out := []*egressv1.Scope{scopeOf(egressv1.Layer_LAYER_CELL, "")}
	for _, s := range []*egressv1.Scope{scopeOf(egressv1.Layer_LAYER_PLAN, c.Plan), scopeOf(egressv1.Layer_LAYER_TENANT, c.Tenant),
		scopeOf(egressv1.Layer_LAYER_TEMPLATE, c.Template), {Layer: egressv1.Layer_LAYER_SESSION, Name: c.Session, Tenant: c.Tenant}} {
		if s.Name != "" {
			out = append(out, s)
		}
	}
	return out
}

// concernOf is what concerns a session.
func concernOf(rec *schedulerv1.SessionRecord) concern {
	ref := rec.GetSession()
	return concern{Tenant: ref.GetTenant(), Plan: rec.GetTerms().GetPlan(), Template: rec.GetTerms().GetTemplate(), Session: ref.GetSession()}
}

// layers are the policies in force of the scopes.
func (e egressOp) layers(a *app, c concern) ([]policy.Layered, error) {
	var out []policy.Layered
	for _, s := range c.scopes() {
		p, err := e.inForce(a, s)
		if err != nil {
			return nil, err
		}
		d, err := stored(p)
		if err != nil {
			return nil, err
		}
		if d != nil {
			out = append(out, policy.Layered{Scope: s, Generation: p.GetGeneration(), Document: d})
		}
	}
	return out, nil
}

type egressTestCmd struct {
	concern
	Request []string `arg:"" optional:"" help:"One request: [METHOD] https://host/path, http://host/path, tls://host or tcp://host:port." placeholder:"REQUEST"`
	File    string   `short:"f" help:"File of cases (YAML)." placeholder:"FILE"`
	Policy  []string `help:"File that stands for the policy of the tenant, or of another layer as in session=FILE; may be repeated." placeholder:"[LAYER=]FILE"`
}

func (c *egressTestCmd) Run(a *app) error {
	cases, err := c.cases(a)
	if err != nil {
		return err
	}
	layers, err := c.policy(a)
	if err != nil {
		return err
	}
	p := policy.Merge(layers)
	out := egressTestOutOf(p, p.Run(cases), c.File == "")
	if err := a.print(out, func() { a.renderEgressTest(out) }); err != nil {
		return err
	}
	if out.Failed > 0 {
		return exitCode{1, fmt.Sprintf("%d of %s came out otherwise", out.Failed, count(len(out.Cases), "case", "cases"))}
	}
	return nil
}

// cases are those of the file, or the one request.
func (c *egressTestCmd) cases(a *app) ([]policy.Case, error) {
	if (c.File == "") == (len(c.Request) == 0) {
		return nil, usage("name one request, or a file of cases with -f")
	}
	if c.File == "" {
		q, err := policy.ParseProbe(strings.Join(c.Request, " "))
		if err != nil {
			return nil, exitCode{2, err.Error()}
		}
		return []policy.Case{{Name: q.Text, Probe: q}}, nil
	}
	raw, err := a.readText(c.File)
	if err != nil {
		return nil, err
	}
	cases, err := policy.ParseCases(raw)
	if err != nil {
		return nil, exitCode{2, c.File + ": " + err.Error()}
	}
	return cases, nil
}

// policy are the layers in force, with those of files in their places.
func (c *egressTestCmd) policy(a *app) (layers []policy.Layered, err error) {
	files := map[egressv1.Layer]policy.Layered{}
	for _, f := range c.Policy {
		layer, file := egressv1.Layer_LAYER_TENANT, f
		if name, rest, ok := strings.Cut(f, "="); ok {
			if layer, ok = layerOf(name); !ok {
				return nil, usage("%q is no layer: cell, plan, tenant, template or session", name)
			}
			file = rest
		}
		if _, twice := files[layer]; twice {
			return nil, usage("there are two files for the layer %s", policy.LayerName(layer))
		}
		_, d, err := a.readPolicy(file)
		if err != nil {
			return nil, err
		}
		files[layer] = policy.Layered{Scope: scopeOf(layer, ""), Document: d}
	}
	if c.concern == (concern{}) && len(files) == 0 {
		return nil, usage("say by which policy: --tenant, --plan, --template or --session in force, or --policy FILE")
	}
	if c.concern != (concern{}) {
		if layers, err = c.inForce(a); err != nil {
			return nil, err
		}
	}
	return replaced(layers, files), nil
}

func (c *egressTestCmd) inForce(a *app) ([]policy.Layered, error) {
	op, err := a.egress()
	if err != nil {
		return nil, err
	}
	defer op.Close()
	of := c.concern
	if c.Session != "" {
		rec, err := op.session(a, c.Tenant, c.Session)
		if err != nil {
			return nil, err
		}
		of = concernOf(rec)
	}
	return op.layers(a, of)
}

// replaced are layers in which those of files stand in the place of others.
func replaced(layers []policy.Layered, files map[egressv1.Layer]policy.Layered) []policy.Layered {
	var out []policy.Layered
	for _, l := range layers {
		if _, is := files[l.Scope.GetLayer()]; !is {
			out = append(out, l)
		}
	}
	for _, l := range files {
		out = append(out, l)
	}
	return out
}

type egressReplayCmd struct {
	scopeFlags
	File  string        `short:"f" required:"" help:"File of the policy (YAML) that would take the place of the scope's." placeholder:"FILE"`
	Since time.Duration `help:"Traffic of so long ago until now; default: 24h." default:"24h" placeholder:"DURATION"`
}

func (c *egressReplayCmd) Run(a *app) error {
	if c.Since <= 0 {
		return usage("--since must be more than 0")
	}
	if _, err := c.scope(); err != nil {
		return err
	}
	_, now, err := a.readPolicy(c.File)
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
	filter := sdk.AuditFilter{Tenant: scope.GetTenant(), Since: c.Since, Stop: true}
	switch scope.GetLayer() {
	case egressv1.Layer_LAYER_TENANT:
		filter.Tenant = scope.GetName()
	case egressv1.Layer_LAYER_SESSION:
		filter.Session = scope.GetName()
	}
	r := replay{op: op, scope: scope, now: now}
	if err := r.prepare(a, filter.Tenant); err != nil {
		return err
	}
	traffic, err := op.traffic(a, filter)
	if err != nil {
		return err
	}
	var failed error
	out := egressReplayOut{scopeOutOf(scope), span(ms(c.Since)), policy.Replay(func(yield func(*egressv1.Record) bool) {
		for rec, err := range traffic {
			if failed = err; err != nil || r.concerns(rec) && !yield(rec) {
				return
			}
		}
	}, r.policyOf)}
	if failed != nil {
		return failed
	}
	return a.print(out, func() { a.renderEgressReplay(out) })
}

// replay is what recorded traffic is judged by.
type replay struct {
	op     egressOp
	scope  *egressv1.Scope
	now    *policy.Document
	stored map[string]policy.Layered // by scope
	of     map[string]concern        // by session key
	merged map[concern]*policy.Policy
}

func scopeKey(s *egressv1.Scope) string {
	return fmt.Sprint(s.GetLayer(), " ", s.GetName(), " ", s.GetTenant())
}

// prepare reads every policy in force, and whose plan and template sessions have.
func (r *replay) prepare(a *app, tenant string) error {
	r.stored, r.of, r.merged = map[string]policy.Layered{}, map[string]concern{}, map[concern]*policy.Policy{}
	all, err := r.op.policies(a, nil)
	if err != nil {
		return err
	}
	for _, p := range all {
		d, err := stored(p)
		if err != nil {
			return err
		}
		r.stored[scopeKey(p.GetScope())] = policy.Layered{Scope: p.GetScope(), Generation: p.GetGeneration(), Document: d}
	}
	r.stored[scopeKey(r.scope)] = policy.Layered{Scope: r.scope, Document: r.now}
	return records(a.ctx, r.op.Client, &schedulerv1.ListRequest{Tenant: tenant, Deleted: true}, func(rec *schedulerv1.SessionRecord) {
		r.of[rec.GetSession().GetSession()] = concernOf(rec)
	})
}

// concernOf is what concerns a record's session; of one that is forgotten only its tenant is known.
func (r *replay) concernOf(rec *egressv1.Record) concern {
	ref := rec.GetSession()
	if c, ok := r.of[ref.GetSession()]; ok {
		return c
	}
	return concern{Tenant: ref.GetTenant(), Session: ref.GetSession()}
}

// concerns reports whether the new policy concerns a record.
func (r *replay) concerns(rec *egressv1.Record) bool {
	for _, s := range r.concernOf(rec).scopes() {
		if scopeKey(s) == scopeKey(r.scope) {
			return true
		}
	}
	return false
}

func (r *replay) policyOf(rec *egressv1.Record) *policy.Policy {
	c := r.concernOf(rec)
	if _, ok := r.stored[scopeKey(&egressv1.Scope{Layer: egressv1.Layer_LAYER_SESSION, Name: c.Session, Tenant: c.Tenant})]; !ok {
		c.Session = "" // it has none of its own: it shares one
	}
	if p, ok := r.merged[c]; ok {
		return p
	}
	var layers []policy.Layered
	for _, s := range c.scopes() {
		if l, ok := r.stored[scopeKey(s)]; ok {
			layers = append(layers, l)
		}
	}
	p := policy.Merge(layers)
	r.merged[c] = p
	return p
}

// traffic are the records of gates.
func (e egressOp) traffic(a *app, f sdk.AuditFilter) (iter.Seq2[*egressv1.Record, error], error) {
	f.Service = "egress"
	all, err := e.Audit(a.ctx, f)
	if err != nil {
		return nil, err
	}
	return func(yield func(*egressv1.Record, error) bool) {
		for r, err := range all {
			if err != nil {
				yield(nil, err)
				return
			}
			if rec, ok := r.Body.(*egressv1.Record); ok && !yield(rec, nil) {
				return
			}
		}
	}, nil
}
