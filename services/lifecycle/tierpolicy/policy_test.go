package tierpolicy

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestTheDefaultPolicyDecidesAsDocumented runs the cases that come with it.
func TestTheDefaultPolicyDecidesAsDocumented(t *testing.T) {
	raw, err := os.ReadFile("default.cases.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cases, err := ParseCases("default.cases.yaml", raw)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, r := range Default().Run(cases) {
		used[r.Rule] = true
		for _, w := range r.Wrong {
			t.Errorf("default.cases.yaml:%d: %s: %s (%s%s)", r.Line, r.Name, w, r.Reason, r.Refusal)
		}
	}
	for _, r := range Default().Rules() {
		if !used[r.Name] {
			t.Errorf("no case reaches rule %q", r.Name)
		}
	}
}

const head = "data_classes: [public, secret]\nrules:\n"

// TestAPolicyThatIsWrongIsNamed: file, line and rule, one line each.
func TestAPolicyThatIsWrongIsNamed(t *testing.T) {
	rule := func(when string) string {
		return head + "  - name: one\n    when: " + strconv.Quote(when) + "\n    tier: gvisor\n    reason: because\n"
	}
	for _, c := range []struct{ text, say string }{
		{"", "p.yaml: it is empty"},
		{"[]", "p.yaml:1: a mapping with the keys"},
		{"rulez: []", `p.yaml:1: "rulez" is no key here`},
		{"data_classes: [a]\n", "p.yaml: rules are missing"},
		{"rules: []", "data_classes are missing"},
		{"data_classes: [a, a]\nrules: []", "a is there twice"},
		{"data_classes: [A b]\nrules: []", "is no word"},
		{"data_classes: [a]\nrules: []", "there are 0 rules"},
		{"data_classes: [a]\n---\ndata_classes: [b]", "more than one document"},
		{"data_classes: &x [a]\nrules: *x", "anchors and aliases are not allowed"},
		{"data_classes: [a]\ndata_classes: [a]\n", "is there twice"},
		{rule("request.code_auhtor == 'model'"), "p.yaml:4: rule one: undeclared reference to 'request', in request.code_auhtor: docs/howto/tier-policy.md"},
		{rule("request.code_author"), "p.yaml:4: rule one: the expression gives string; a rule needs true or false"},
		{rule("request.code_author == 1"), "p.yaml:4: rule one: found no matching overload"},
		{rule("request.code_author == 'modle'"), "request.code_author is never \"modle\"; it is one of operator, user, model, third_party"},
		{rule("request.tools in ['any', 'sum']"), "request.tools is never \"sum\""},
		{rule("'pink' == request.data_class"), "request.data_class is never \"pink\""},
		{rule("classes['pink'] > 0"), "classes is never \"pink\""},
		{rule("'virtual' in fleet.accel"), "fleet.accel is never \"virtual\""},
		{rule("fleet.accel['microwm'] == 'kvm'"), "fleet.accel is never \"microwm\""},
		{rule("now() > 1"), "undeclared reference to 'now': docs"},
		{rule("'" + strings.Repeat("a", maxExpression) + "' == 'a'"), "the expression has"},
		{rule(strings.Repeat("(", 200) + "true" + strings.Repeat(")", 200)), "rule one: "},
		{head + "  - name: one\n    tier: gvisor\n    reason: because\n    when: |\n      true &&\n      request.x\n", "p.yaml:8: rule one: undeclared reference to 'request', in request.x: docs"},
		{head + "  - {when: 'true', tier: gvisor, reason: r}", "p.yaml:3: a rule has no name"},
		{head + "  - {name: one, tier: gvisor, reason: r}", "rule one: when is missing"},
		{head + "  - {name: one, when: 'true', tier: steel, reason: r}", "there is no tier \"steel\""},
		{head + "  - {name: one, when: 'true', tier: null, reason: r}", "a text is needed"},
		{head + "  - {name: one, when: 'true', tier: 'null', reason: r}", "there is no tier \"null\""},
		{head + "  - {name: one, when: 'true', tier: [], reason: r}", "tier names 0 tiers"},
		{head + "  - {name: one, when: 'true', tier: [kata, kata], reason: r}", "tier kata is there twice"},
		{head + "  - {name: one, when: 'true', tier: kata, reason: \"a\\nb\"}", "one line without control characters"},
		{head + "  - {name: one, when: 'true', tier: kata, reason: r}\n  - {name: one, when: 'true', tier: kata, reason: r}", "p.yaml:4: two rules are called \"one\""},
		{head + "  - {name: one, when: 'true', tier: kata, reason: r}\ntenants: {acme: {floor: wasm}}", "tenant acme: floor \"wasm\" is none of"},
		{head + "  - {name: one, when: 'true', tier: kata, reason: r}\ntenants: {acme: {flor: kata}}", "tenant acme: \"flor\" is no key here"},
		{head + "  - {name: one, when: 'true', tier: kata, reason: r}\ntenants:\n  acme:\n    rules: [{name: t, when: 'nope', tier: kata, reason: r}]", "p.yaml:6: tenant acme, rule t: undeclared"},
		{strings.Repeat("#", maxFile+1), "at most 262144 are read"},
	} {
		_, err := Parse("p.yaml", []byte(c.text))
		switch {
		case err == nil:
			t.Errorf("it was taken: %s", c.text)
		case !strings.Contains(err.Error(), c.say) || strings.Contains(err.Error(), "\n"):
			t.Errorf("%.300s\nis refused with: %v\nwant: %s", c.text, err, c.say)
		}
	}
}

// TestTheSourceOfThePolicyIsKept: what is shown is what is in force.
func TestTheSourceOfThePolicyIsKept(t *testing.T) {
	file := t.TempDir() + "/p.yaml"
	text := head + "  - {name: one, when: 'true', tier: [kata, gvisor], reason: r}\ntenants: {acme: {floor: kata, wasm: true}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if p.Source != file || string(p.Text) != text || len(p.Rules()) != 1 || p.Tenants()[0] != (TenantRule{"acme", "kata", true}) {
		t.Errorf("read as %+v", p)
	}
	if d, err := Load(""); err != nil || d.Source != DefaultName {
		t.Errorf("without a name: %v %v", d, err)
	}
	if _, err := Load(file + ".absent"); err == nil {
		t.Error("a file that is not there was read")
	}
}
