package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/services/egress/policy"
)

// file writes a file that a command reads.
func file(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const tenantPolicy = `contact: it@acme.example
rules:
  # the product
  - {name: api, allow: {hosts: [api.example.com], paths: [/v1]}}
  - {name: no-paste, deny: {hosts: [paste.example.com]}}
`

// TestAPolicyIsAppliedInPlaceOfTheOneThatWasRead: and the loser of two writers is told.
func TestAPolicyIsAppliedInPlaceOfTheOneThatWasRead(t *testing.T) {
	w := start(t)
	path := file(t, tenantPolicy)
	if out := w.ok("policy", "egress", "show"); !strings.Contains(out, "nothing may leave any sandbox") {
		t.Errorf("%s", out)
	}
	var first, second egressAppliedOut
	w.json(&first, "policy", "egress", "apply", "-f", path, "--tenant", "acme")
	if first.Generation == 0 || first.Replaced != 0 || first.Rules != 2 || len(first.Changes.Added) != 2 {
		t.Fatalf("%+v", first)
	}
	out := w.ok("policy", "egress", "apply", "-f", path, "--tenant", "acme", "--dry-run")
	if !strings.Contains(out, "nothing was applied") {
		t.Errorf("%s", out)
	}
	changed := file(t, strings.Replace(tenantPolicy, "/v1", "/v2", 1))
	if out := w.ok("policy", "egress", "diff", "-f", changed, "--tenant", "acme"); out != "- api: allow https api.example.com ports 443 paths /v1\n+ api: allow https api.example.com ports 443 paths /v2\n" {
		t.Errorf("%s", out)
	}
	w.json(&second, "policy", "egress", "apply", "-f", changed, "--tenant", "acme")
	if second.Replaced != first.Generation || second.Generation <= first.Generation || len(second.Changes.Changed) != 1 {
		t.Errorf("%+v", second)
	}
	for _, args := range [][]string{{"--replaces", fmt.Sprint(first.Generation)}, {"--new"}} {
		if _, stderr, code := w.berth("", append([]string{"policy", "egress", "apply", "-f", path, "--tenant", "acme"}, args...)...); code != 1 || !strings.Contains(stderr, fmt.Sprintf("generation %d", second.Generation)) {
			t.Errorf("%v: %d %s", args, code, stderr)
		}
	}
	if out := w.ok("policy", "egress", "show", "--tenant", "acme"); !strings.Contains(out, "# the product") || !strings.Contains(out, "/v2") {
		t.Errorf("%s", out)
	}
	if out := w.ok("policy", "egress", "show"); !strings.Contains(out, "tenant  acme") {
		t.Errorf("%s", out)
	}
	if out := w.ok("policy", "egress", "remove", "--tenant", "acme"); !strings.Contains(out, "is removed") {
		t.Errorf("%s", out)
	}
	if _, stderr, code := w.berth("", "policy", "egress", "show", "--tenant", "acme"); code != 1 || !strings.Contains(stderr, "there is no policy of tenant acme") {
		t.Errorf("%d %s", code, stderr)
	}
}

// TestPoliciesThatDoNotFitInOneAnswerAreListed: with their documents, however large they are together.
func TestPoliciesThatDoNotFitInOneAnswerAreListed(t *testing.T) {
	w := start(t)
	large := file(t, tenantPolicy+strings.Repeat("# "+strings.Repeat("x", 1021)+"\n", 400))
	for _, tenant := range []string{"a", "b", "c"} {
		w.ok("policy", "egress", "apply", "-f", large, "--tenant", tenant)
	}
	var out egressPoliciesOut
	w.json(&out, "policy", "egress", "show")
	if len(out.Policies) != 3 {
		t.Fatalf("%d policies", len(out.Policies))
	}
	for _, p := range out.Policies {
		if !strings.Contains(p.Document, "# the product") {
			t.Errorf("%s has a document of %d bytes", p.scopeOut, len(p.Document))
		}
	}
}

// TestEgressCommandsCheckWhatIsTyped: in one sentence, with exit code 2.
func TestEgressCommandsCheckWhatIsTyped(t *testing.T) {
	good, bad := file(t, tenantPolicy), file(t, "rules:\n  - {name: a, allow: {hosts: [Example.com]}}\n")
	for args, want := range map[string]string{
		"apply -f " + good:                                                 "say whose policy",
		"apply -f " + bad + " --cell":                                      "line 2: \"Example.com\" is not how this name is written: write example.com",
		"apply -f /nowhere/p.yaml --cell":                                  "no such file",
		"apply -f " + good + " --cell --tenant acme":                       "name one scope",
		"apply -f " + good + " --cell --plan free":                         "--cell and --plan",
		"apply -f " + good + " --session nokey":                            "session key",
		"apply -f " + good + " --tenant A.b":                               "tenant",
		"show --plan A.b":                                                  "is no plan",
		"test GET https://a.example.com/":                                  "say by which policy",
		"test --policy " + good:                                            "name one request, or a file of cases",
		"test --policy " + good + " nothing":                               "is no request",
		"test --policy region=" + good + " https://a.test/":                "is no layer",
		"test --policy " + good + " --policy " + good + " https://a.test/": "two files for the layer tenant",
		"test --policy " + good + " -f " + good:                            "there is no key \"contact\" here",
		"diff -f " + good + " --against " + good + " --cell":               "goes without a scope",
		"replay -f " + good + " --tenant acme --since 0s":                  "--since must be more than 0",
		"allow default":                                                    "name a session, and a host or --denied",
		"allow default 127.1":                                              "is an address",
		"allow default db.example.com --protocol tcp":                      "names no port",
	} {
		_, stderr, code := berthAlone(append([]string{"policy", "egress"}, strings.Fields(args)...)...)
		if code != 2 || !strings.Contains(stderr, want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: %d %s", args, code, stderr)
		}
	}
	for args, want := range map[string]string{"audit egress default --since 0s": "--since", "tail --audit --hosts": "--hosts", "tail --audit --event denied": "--event"} {
		if _, stderr, code := berthAlone(strings.Fields(args)...); code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%s: %d %s", args, code, stderr)
		}
	}
}

// TestAnEgressPolicyIsTestedWithoutAPlatform: and in force, by the scopes of a session.
func TestAnEgressPolicyIsTestedWithoutAPlatform(t *testing.T) {
	path := file(t, tenantPolicy)
	cases := file(t, "cases:\n  - {request: 'GET https://api.example.com/v1/x', want: allowed, rule: api}\n  - {request: 'https://api.example.com/v2', want: allowed}\n")
	out, stderr, code := berthAlone("policy", "egress", "test", "--policy", path, "-f", cases)
	if code != 1 || !strings.Contains(out, "FAIL  https://api.example.com/v2") || !strings.Contains(stderr, "1 of 2 cases came out otherwise") {
		t.Errorf("%d\n%s%s", code, out, stderr)
	}
	out, stderr, code = berthAlone("policy", "egress", "test", "--policy", path, "GET", "https://paste.example.com/x")
	if code != 0 || stderr != "" || !strings.Contains(out, "rule no-paste of the tenant policy denies it. If it is needed, ask it@acme.example.") || !strings.Contains(out, "not answered for") {
		t.Errorf("%d\n%s%s", code, out, stderr)
	}
	w := start(t)
	w.ok("policy", "egress", "apply", "-f", path, "--tenant", "acme")
	var open openOut
	w.json(&open, "session", "open")
	own := file(t, "rules:\n  - {name: mine, allow: {hosts: [mine.example.com]}}\n")
	w.ok("policy", "egress", "apply", "-f", own, "--session", open.Session)
	for _, c := range []struct {
		args  []string
		allow bool
		rule  string
	}{
		{[]string{"--tenant", "acme", "https://mine.example.com/"}, false, ""}, {[]string{"--session", open.Session, "https://mine.example.com/"}, true, "mine"},
		{[]string{"--session", open.Session, "https://api.example.com/v1"}, true, "api"},
		{[]string{"--session", open.Session, "--policy", "session=" + path, "https://mine.example.com/"}, false, ""},
	} {
		var got egressTestOut
		w.json(&got, append([]string{"policy", "egress", "test"}, c.args...)...)
		if got.Cases[0].Allowed != c.allow || got.Cases[0].Rule != c.rule {
			t.Errorf("%v: %+v", c.args, got.Cases[0])
		}
	}
}

func traffic(session, id, host, request, reason string, age time.Duration) *egressv1.Record {
	method, path, _ := strings.Cut(request, " ")
	r := &egressv1.Record{Id: id, Session: &corev1.SessionRef{Tenant: "acme", Session: session}, Protocol: "https", Door: "transparent", Authority: host, Port: 443, Method: method, Path: path,
		Reason: reason, Verdict: egressv1.Verdict_VERDICT_DENIED, PolicyGeneration: 7, Began: timestamppb.New(time.Now().Add(-age))}
	if reason == "denied" {
		r.Rule, r.Layer = "no-paste", egressv1.Layer_LAYER_TENANT
	}
	if reason == "allowed" {
		r.Verdict, r.Rule, r.Layer, r.Address, r.Status, r.BytesIn, r.BytesOut = egressv1.Verdict_VERDICT_ALLOWED, "api", egressv1.Layer_LAYER_TENANT, "192.0.2.1", 200, 2048, 512
	}
	return r
}

// TestRecordedTrafficIsReplayedAndADenialAllowed: by one command, in the policy of the session.
func TestRecordedTrafficIsReplayedAndADenialAllowed(t *testing.T) {
	w := start(t)
	var open openOut
	w.json(&open, "session", "open")
	w.ok("policy", "egress", "apply", "-f", file(t, tenantPolicy), "--tenant", "acme")
	for _, r := range []*egressv1.Record{traffic(open.Session, "e1", "api.example.com", "GET /v1/x", "allowed", time.Minute), traffic(open.Session, "e2", "new.example.com", "GET /y", "no_rule", time.Minute),
		traffic(open.Session, "e3", "api.example.com", "POST /v2/z", "path", time.Minute), traffic(open.Session, "e4", "paste.example.com", "GET /", "denied", time.Minute),
		traffic(open.Session, "e5", "api.example.com", "GET /v1/x", "private", time.Minute)} {
		if err := w.srv.Audit(r); err != nil {
			t.Fatal(err)
		}
	}
	out := w.ok("audit", "egress", "default", "--since", "1h")
	if strings.Count(out, "\n") != 5 || !strings.Contains(out, "allowed   GET https://api.example.com/v1/x, at 192.0.2.1, status 200, 512 B out, 2 KiB in, rule api (tenant 7)\n") {
		t.Errorf("%s", out)
	}
	if out := w.ok("audit", "egress", open.Session, "--denied"); strings.Count(out, "\n") != 4 || !strings.Contains(out, "denied    GET https://new.example.com/y, reason no_rule, record e2\n") {
		t.Errorf("%s", out)
	}
	if out := w.ok("tail", "--audit", "--since", "1h", "--no-follow"); strings.Count(out, "\n") < 5 || !strings.Contains(out, "egress       denied    GET https://new.example.com/y") {
		t.Errorf("%s", out)
	}
	out = w.ok("policy", "egress", "replay", "-f", file(t, "rules:\n  - {name: new, allow: {hosts: [new.example.com]}}\n"), "--tenant", "acme", "--since", "24h")
	if !strings.Contains(out, "of 5 in the last 24h: 2 would be denied now, 1 allowed, 2 as before") {
		t.Errorf("%s", out)
	}
	for record, want := range map[string]string{"e4": "rule no-paste of the tenant policy denies it, and a denial wins", "e5": "a rule would not change it", "none": "has no record none", "e1": "a rule would not change it"} {
		if _, stderr, code := w.berth("", "policy", "egress", "allow", "default", "--denied", record); code != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: %d %s", record, code, stderr)
		}
	}
	var added egressAllowedOut
	w.json(&added, "policy", "egress", "allow", "default", "--denied", "e2")
	if added.Layer != "session" || added.Generation == 0 || added.Rule != "allow-new-example-com" {
		t.Errorf("%+v", added)
	}
	out = w.ok("policy", "egress", "allow", "default", "--denied", "e3", "--for", "tenant")
	if !strings.Contains(out, "+ allow-api-example-com: allow https api.example.com ports 443 methods POST paths /v2/z\n") {
		t.Errorf("%s", out)
	}
	if out := w.ok("policy", "egress", "show", "--tenant", "acme"); !strings.Contains(out, "# the product") || !strings.Contains(out, "allow-api-example-com") {
		t.Errorf("%s", out)
	}
	w.ok("policy", "egress", "allow", "default", "db.example.com:5432", "--protocol", "tcp")
	for args, want := range map[string]string{"db.example.com:5432 --protocol tcp": "it is allowed already", "paste.example.com": "rule no-paste of the tenant policy denies it"} {
		if _, stderr, code := w.berth("", append([]string{"policy", "egress", "allow", "default"}, strings.Fields(args)...)...); code != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: %d %s", args, code, stderr)
		}
	}
}

// sampleAudit are records of gates.
func sampleAudit() []sdk.AuditRecord {
	var out []sdk.AuditRecord
	for _, r := range []*egressv1.Record{traffic(sampleKey, "e1", "api.example.com", "GET /v1/x", "allowed", 0), traffic(sampleKey, "e2", "new.example.com", "GET /y", "no_rule", 0)} {
		r.Began = timestamppb.New(at)
		out = append(out, sdk.AuditRecord{Service: "egress", Tenant: "acme", Session: sampleKey, ID: r.GetId(), Time: at, Body: r})
	}
	out[1].Body.(*egressv1.Record).Times = 3
	return out
}

func sampleEgressPolicies() []*egressv1.Policy {
	return []*egressv1.Policy{
		{Scope: scopeOf(egressv1.Layer_LAYER_CELL, ""), Document: []byte("rules:\n  - preset: pypi\n"), Generation: 4, AppliedAt: timestamppb.New(at), AppliedBy: "ann"},
		{Scope: scopeOf(egressv1.Layer_LAYER_TENANT, "acme"), Document: []byte(tenantPolicy), Generation: 7, AppliedAt: timestamppb.New(at.Add(time.Hour)), AppliedBy: "ben"},
	}
}

func sampleEgressDocument(text string) *policy.Document {
	d, err := policy.Parse([]byte(text))
	if err != nil {
		panic(err)
	}
	return d
}

func sampleEgressTest(requests ...string) []policy.Result {
	p := sampleEgressPolicy()
	var cases []policy.Case
	for i, r := range requests {
		q, err := policy.ParseProbe(r)
		if err != nil {
			panic(err)
		}
		cases = append(cases, policy.Case{Name: r, Line: i + 2, Probe: q, Allowed: true})
	}
	return p.Run(cases)
}

func sampleEgressPolicy() *policy.Policy {
	var layers []policy.Layered
	for _, p := range sampleEgressPolicies() {
		layers = append(layers, policy.Layered{Scope: p.GetScope(), Generation: p.GetGeneration(), Document: sampleEgressDocument(string(p.GetDocument()))})
	}
	return policy.Merge(layers)
}

// egressSamples are the outputs of the commands of egress.
func egressSamples() map[string]func(*app) error {
	show := func(v any, human func(*app)) func(*app) error {
		return func(a *app) error { return a.print(v, func() { human(a) }) }
	}
	changes := policy.Diff(sampleEgressDocument(tenantPolicy), sampleEgressDocument(strings.Replace(tenantPolicy, "/v1", "/v2", 1)))
	tenant := scopeOut{Layer: "tenant", Name: "acme"}
	applied := egressAppliedOut{tenant, 7, 9, false, 2, changes}
	diff := egressDiffOut{&tenant, 7, changes}
	policies := egressPoliciesOutOf(sampleEgressPolicies())
	one := egressPoliciesOutOf(sampleEgressPolicies()[1:])
	tested := egressTestOutOf(sampleEgressPolicy(), sampleEgressTest("GET https://api.example.com/v1/x", "GET https://paste.example.com/"), false)
	probe := sampleEgressTest("https://other.example.com/")
	probe[0].Line = 0
	single := egressTestOutOf(sampleEgressPolicy(), probe, true)
	replayed := egressReplayOut{tenant, "24h", policy.Replayed{Records: 3, Times: 9, Same: 6, Unknown: 1, Changed: []policy.Turn{
		{Protocol: "https", Authority: "api.example.com", Port: 443, Method: "GET", Path: "/v1/x", Was: true, WasRule: "api", Reason: policy.BadPath, Times: 2, Sessions: 1}}}}
	allowed := egressAllowedOut{scopeOut: scopeOut{"session", sampleKey, "acme"}, Replaced: 7, Generation: 9, Rule: "allow-new-example-com", Text: "allow https new.example.com ports 443", Document: "rules:\n"}
	removed := egressRemovedOut{tenant, 7, true}
	lines := func(own bool) func(a *app) error {
		return func(a *app) error {
			for _, r := range sampleAudit() {
				if err := a.printAudit(r, own); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return map[string]func(*app) error{
		"policy-egress-apply":    show(applied, func(a *app) { a.renderEgressApplied(applied) }),
		"policy-egress-show":     show(policies, func(a *app) { a.renderEgressPolicies(policies, false) }),
		"policy-egress-show-one": show(one, func(a *app) { a.renderEgressPolicies(one, true) }),
		"policy-egress-remove":   show(removed, func(a *app) { fmt.Fprintln(a.stdout, "the policy of tenant acme (generation 7) is removed") }),
		"policy-egress-test":     show(tested, func(a *app) { a.renderEgressTest(tested) }),
		"policy-egress-test-one": show(single, func(a *app) { a.renderEgressTest(single) }),
		"policy-egress-diff":     show(diff, func(a *app) { a.renderEgressDiff(diff) }),
		"policy-egress-replay":   show(replayed, func(a *app) { a.renderEgressReplay(replayed) }),
		"policy-egress-allow":    show(allowed, func(a *app) { a.renderEgressAllowed(allowed) }),
		"audit-egress":           lines(true),
		"tail-audit":             lines(false),
	}
}

// TestEgressOutput: for a person and as JSON, which docs/howto/cli-json.md shows.
func TestEgressOutput(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join("..", "..", "docs", "howto", "cli-json.md"))
	if err != nil {
		t.Fatal(err)
	}
	for name, print := range egressSamples() {
		for ext, json := range map[string]bool{"txt": false, "json": true} {
			var out bytes.Buffer
			if err := print(&app{stdout: &out, json: json, now: func() time.Time { return at }}); err != nil {
				t.Fatal(err)
			}
			got := out.Bytes()
			lines := strings.Contains(name, "audit")
			if lines && json {
				got = compact(t, got)
			}
			golden(t, name+"."+ext, got)
			if lines {
				got = bytes.SplitAfter(got, []byte("\n"))[0]
			}
			if json && !strings.Contains(string(doc), "```json\n"+string(got)+"```") {
				t.Errorf("docs/howto/cli-json.md does not show the output of %s:\n%s", name, got)
			}
		}
	}
}
