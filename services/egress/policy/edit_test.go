package policy

import (
	"strings"
	"testing"
)

// TestARuleIsAddedAndNothingElseChanges: comments stay, names are made different, and what a document says
// of order stays.
func TestARuleIsAddedAndNothingElseChanges(t *testing.T) {
	q := Request{Name: "new.test", Port: 443, Protocol: HTTPS, Method: "GET", Path: "/v1/x"}
	for in, want := range map[string]string{
		"":              "rules:\n  - name: allow-new-test\n    allow:\n      hosts: [new.test]\n      ports: [443]\n      protocol: https\n",
		"contact: me\n": "contact: me\nrules:\n  - name: allow-new-test\n",
		"rules: []\n":   "rules:\n  - name: allow-new-test\n",
		"{contact: me}": "contact: me\nrules:\n",
		"# why\nrules:\n  # because\n  - {name: allow-new-test, deny: {hosts: [x.test]}} # so\n": "# why\nrules:\n  # because\n  - {name: allow-new-test, deny: {hosts: [x.test]}} # so\n  - name: allow-new-test-2\n",
		"rules: [{preset: pypi}]": "rules:\n  - {preset: pypi}\n  - name: allow-new-test\n",
	} {
		out, rule, err := Add([]byte(in), AllowanceFor(q, false))
		if err != nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("%s\n%s\n%v", in, out, err)
			continue
		}
		d, err := Parse(out)
		if err != nil {
			t.Fatal(err)
		}
		if got := Merge([]Layered{{layer("session"), 1, d}}).Judge(q); !got.Allowed || got.Rule != rule.Name {
			t.Errorf("%s: %+v", out, got)
		}
	}
	if _, _, err := Add([]byte("rules: 3"), AllowanceFor(q, false)); err == nil {
		t.Error("a rule was added to what is no policy")
	}
	exact := AllowanceFor(Request{Name: "a.test", Port: 8080, Protocol: HTTP, Method: "GET", Path: "/v1/x"}, true)
	if exact.Name != "allow-a-test-8080" || exact.String() != "allow http a.test ports 8080 methods GET paths /v1/x" {
		t.Errorf("%s: %s", exact.Name, exact)
	}
	if long := AllowanceFor(Request{Name: "a." + "very-very-very-very-very-very-very-very-very-long-name.test", Port: 1, Protocol: TCP}, true); !ruleName.MatchString(long.Name) || !ruleName.MatchString(long.Name+"-1000") {
		t.Errorf("%q", long.Name)
	}
}
