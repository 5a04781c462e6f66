package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/sdk"
)

// berthAlone runs the program without a platform.
func berthAlone(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(&app{ctx: context.Background(), stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, args)
	return out.String(), errs.String(), code
}

// TestAPolicyIsTestedWithoutAPlatform: the table, the exit code, and one sentence
// when a file is wrong.
func TestAPolicyIsTestedWithoutAPlatform(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(bad, []byte("data_classes: [a]\nrules:\n  - {name: one, when: request.nothing, tier: gvisor, reason: r}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	def := filepath.Join("..", "..", "services", "lifecycle", "tierpolicy", "default")
	sample := filepath.Join("testdata", "policy")
	for _, c := range []struct {
		args        []string
		code        int
		out, stderr string
	}{
		{[]string{"policy", "tier", "test", def + ".cases.yaml"}, 0, " 0 failed, by the policy of built-in default", ""},
		{[]string{"policy", "tier", "test", def + ".cases.yaml", "--policy", def + ".yaml"}, 0, " 0 failed", ""},
		{[]string{"policy", "tier", "test", sample + "/cases.yaml", "--policy", sample + "/tier.yaml"}, 1, "FAIL  a wish", "1 of 3 cases came out otherwise"},
		{[]string{"policy", "tier", "test", sample + "/tier.yaml"}, 2, "", "\"data_classes\" is no key here"},
		{[]string{"policy", "tier", "test", filepath.Join(dir, "absent")}, 2, "", "no such file"},
		{[]string{"policy", "tier", "test", sample + "/cases.yaml", "--policy", bad}, 2, "", "bad.yaml:3: rule one: undeclared reference"},
		{[]string{"policy", "tier", "lint", bad}, 1, "", "bad.yaml:3: rule one: undeclared reference"},
		{[]string{"policy", "tier", "lint", sample + "/tier.yaml"}, 0, "is a tier policy: 3 rules", ""},
		{[]string{"policy", "tier", "show", "--policy", sample + "/tier.yaml"}, 0, "acme-secrets", ""},
		{[]string{"policy", "tier", "show", "--built-in"}, 0, "source               built-in default", ""},
	} {
		out, stderr, code := berthAlone(c.args...)
		if code != c.code || !strings.Contains(out, c.out) || !strings.Contains(stderr, c.stderr) || strings.Count(stderr, "\n") > 1 || (stderr == "") != (c.stderr == "") {
			t.Errorf("berth %s: exit %d\n%s%s", strings.Join(c.args, " "), code, out, stderr)
		}
	}
	out, _, code := berthAlone("--json", "policy", "tier", "test", sample+"/cases.yaml", "--policy", sample+"/tier.yaml")
	var tested policyTestOut
	if err := json.Unmarshal([]byte(out), &tested); err != nil || code != 1 || tested.Failed != 1 || tested.Cases[1].Refusal == "" || tested.Cases[0].Decision == nil {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
}

// TestRiskIsToldByFlags: every flag arrives under its own name.
func TestRiskIsToldByFlags(t *testing.T) {
	got := riskFlags{"model", "any", "internal", "named", true, true}.risk()
	if got != (sdk.Risk{CodeAuthor: sdk.ModelCode, Tools: sdk.AnyTools, Network: sdk.NamedNetwork, DataClass: "internal", ToolAccess: true, UntrustedCode: true}) {
		t.Errorf("%+v", got)
	}
	w := start(t)
	if _, stderr, code := w.berth("", "session", "open", "--code-author", "modle"); code == 0 || !strings.Contains(stderr, `code author "modle" is not known`) {
		t.Errorf("exit %d, %s", code, stderr)
	}
	w.ok("session", "open", "--code-author", "model", "--tools", "any", "--data-class", "internal", "--network", "none", "--tool-access")
}
