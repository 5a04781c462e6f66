package tierpolicy

import (
	"os"
	"strings"
	"testing"
)

// FuzzPolicy: whatever a policy file holds, it is refused in one line or can be
// asked; it never panics, hangs or lowers a tier.
func FuzzPolicy(f *testing.F) {
	f.Add(string(defaultSource))
	f.Add(head + "  - {name: one, when: 'true', tier: [kata, gvisor], reason: r}\ntenants: {acme: {floor: kata, wasm: true}}\n")
	f.Add("data_classes: &a [*a]")
	f.Add(head + "  - {name: one, when: 'fleet.tiers.all(a, true)', tier: wasm, reason: r}\n")
	raw, err := os.ReadFile("default.cases.yaml")
	if err != nil {
		f.Fatal(err)
	}
	cases, err := ParseCases("default.cases.yaml", raw)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse("p.yaml", []byte(text))
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		for _, r := range p.Run(cases) {
			if strings.Contains(r.Refusal+r.Reason, "\n") || r.Tier == "" && r.Refusal == "" {
				t.Errorf("%+v", r)
			}
		}
	})
}

// FuzzCases: whatever a file of cases holds, it is refused in one line or can be run.
func FuzzCases(f *testing.F) {
	raw, err := os.ReadFile("default.cases.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(raw))
	f.Add("cases: [{name: a, want: {refusal: x}, offered: [microvm/tcg], not_held: {microvm: disk_io}, tiers: wasm}]")
	f.Add("cases: [{name: a, request: {min_tier: null}, want: {tier: gvisor}}]")
	p := Default()
	f.Fuzz(func(t *testing.T, text string) {
		cases, err := ParseCases("c.yaml", []byte(text))
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		if got := p.Run(cases); len(got) != len(cases) {
			t.Errorf("%d cases, %d results", len(cases), len(got))
		}
	})
}
