package main

import (
	"fmt"
	"strings"
	"time"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"
)

type egressAllowCmd struct {
	target
	Host     string        `arg:"" optional:"" help:"Host to allow, with its port if that is not the protocol's own." placeholder:"HOST[:PORT]"`
	Denied   string        `help:"Allow what this record says was denied: the record of a denied event, or the id that berth audit egress shows." placeholder:"RECORD"`
	For      string        `help:"In whose policy the rule goes: session, tenant, template, plan or cell." default:"session" enum:"session,tenant,template,plan,cell"`
	Protocol string        `help:"https, http, tls or tcp." default:"https" enum:"https,http,tls,tcp"`
	Since    time.Duration `help:"How long ago the record may be; default: 168h." default:"168h" placeholder:"DURATION"`
	DryRun   bool          `help:"Only say what would change."`
}

func (c *egressAllowCmd) Run(a *app) error {
	if (c.Host == "") == (c.Denied == "") {
		return usage("name a session, and a host or --denied RECORD")
	}
	ask, exactly, err := c.typed()
	if err != nil {
		return err
	}
	cl, rec, err := c.find(a)
	if err != nil {
		return err
	}
	defer cl.Close()
	op := egressOp{cl}
	if c.Denied != "" {
		if ask, exactly, err = c.denied(a, op, rec); err != nil {
			return err
		}
	}
	out, err := c.allow(a, op, rec, policy.AllowanceFor(ask, exactly), ask)
	if err != nil {
		return err
	}
	return a.print(out, func() { a.renderEgressAllowed(out) })
}

// typed is the host of the command line.
func (c *egressAllowCmd) typed() (policy.Request, bool, error) {
	if c.Host == "" {
		return policy.Request{}, false, nil
	}
	q := policy.Request{Protocol: policy.Protocol(c.Protocol)}
	standard := map[policy.Protocol]uint16{policy.HTTPS: 443, policy.TLS: 443, policy.HTTP: 80}[q.Protocol]
	var err error
	if q.Name, q.Port, err = authority.SplitHost(c.Host, standard); err != nil {
		return q, false, exitCode{2, err.Error()}
	}
	if q.Port == 0 {
		return q, false, usage("%s names no port, which tcp needs", c.Host)
	}
	return asked(q), false, nil
}

// asked is a request of any kind to a host.
func asked(q policy.Request) policy.Request {
	if (q.Protocol == policy.HTTP || q.Protocol == policy.HTTPS) && q.Method == "" {
		q.Method, q.Path = "GET", "/"
	}
	return q
}

// denied is what a record says was denied, and whether its method and path are what was not allowed.
func (c *egressAllowCmd) denied(a *app, op egressOp, session *schedulerv1.SessionRecord) (q policy.Request, exactly bool, err error) {
	ref := session.GetSession()
	all, err := op.traffic(a, sdk.AuditFilter{Tenant: ref.GetTenant(), Session: ref.GetSession(), Since: c.Since, Stop: true})
	if err != nil {
		return q, false, err
	}
	for r, err := range all {
		if err != nil {
			return q, false, err
		}
		if r.GetId() == c.Denied {
			return allowable(r)
		}
	}
	return q, false, fmt.Errorf("session %s has no record %s of the last %s", ref.GetSession(), c.Denied, span(ms(c.Since)))
}

// allowable is the request of a record, if a rule that allows could change what became of it.
func allowable(r *egressv1.Record) (q policy.Request, exactly bool, err error) {
	reason := policy.Reason(r.GetReason())
	switch reason {
	case policy.NoPolicy, policy.NoRule, policy.BadPort, policy.BadMethod, policy.BadPath, policy.Protocols, policy.Revoked:
	case policy.DeniedRule:
		return q, false, fmt.Errorf("rule %s of the %s policy denies it, and a denial wins: change that rule", r.GetRule(), policy.LayerName(r.GetLayer()))
	default:
		return q, false, fmt.Errorf("a rule would not change it: it was %s (%s)", word(r.GetVerdict(), "VERDICT_"), reason)
	}
	name, err := authority.ParseStrict(r.GetAuthority())
	if err != nil {
		return q, false, err
	}
	q = policy.Request{Name: name, Port: uint16(r.GetPort()), Protocol: policy.Protocol(r.GetProtocol()), Method: r.GetMethod(), Path: r.GetPath()}
	switch q.Protocol {
	case "dns":
		q = policy.Request{Name: name, Port: 443, Protocol: policy.HTTPS}
	case "websocket":
		q.Protocol = policy.HTTPS
		if q.Port == 80 {
			q.Protocol = policy.HTTP
		}
	case policy.TLS: // nobody looked inside yet
		q.Protocol = policy.HTTPS
	}
	exactly = (reason == policy.BadMethod || reason == policy.BadPath) && q.Method != "" && q.Path != ""
	return asked(q), exactly, nil
}

// allow adds the rule to the policy and applies it, if it then allows what was asked.
func (c *egressAllowCmd) allow(a *app, op egressOp, rec *schedulerv1.SessionRecord, rule policy.Rule, ask policy.Request) (out egressAllowedOut, err error) {
	of := concernOf(rec)
	layer, _ := layerOf(c.For)
	scope := &egressv1.Scope{Layer: layer}
	for _, s := range of.scopes() {
		if s.GetLayer() == layer {
			scope = s
		}
	}
	if scope.GetName() == "" && layer != egressv1.Layer_LAYER_CELL {
		return out, fmt.Errorf("the session has no %s", c.For)
	}
	was, err := op.inForce(a, scope)
	if err != nil {
		return out, err
	}
	layers, err := op.layers(a, of)
	if err != nil {
		return out, err
	}
	if d := policy.Merge(layers).Judge(ask); d.Allowed {
		return out, fmt.Errorf("it is allowed already: %s", policy.Sentence(ask, d))
	}
	document, added, err := policy.Add(was.GetDocument(), rule)
	if err != nil {
		return out, err
	}
	now, err := policy.Parse(document)
	if err != nil {
		return out, err
	}
	d := policy.Merge(replaced(layers, map[egressv1.Layer]policy.Layered{layer: {Scope: scope, Document: now}})).Judge(ask)
	if !d.Allowed {
		return out, fmt.Errorf("a rule would not change it: %s", strings.TrimSuffix(policy.Sentence(ask, d), "."))
	}
	out = egressAllowedOut{scopeOut: scopeOutOf(scope), Replaced: was.GetGeneration(), DryRun: c.DryRun, Rule: added.Name, Text: added.String(), Document: string(document)}
	if !c.DryRun {
		out.Generation, err = op.apply(a, &egressv1.ApplyRequest{Scope: scope, Document: document, Replaces: was.GetGeneration()})
	}
	return out, err
}
