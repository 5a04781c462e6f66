package archtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestThreatModelNamesRealTests: a test that docs/threat-model.md names exists, every attack on the
// host's side names one, and every tier has its row. That the attacks from inside are those of the
// tests is test/hostile's to show.
func TestThreatModelNamesRealTests(t *testing.T) {
	root := repoRoot(t)
	raw, err := os.ReadFile(filepath.Join(root, "docs", "threat-model.md"))
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	if n := checkNamed(t, root, "docs/threat-model.md", page); n < 50 {
		t.Errorf("only %d tests are named", n)
	}
	for _, tier := range []string{"container", "gvisor", "kata", "microvm on KVM", "microvm on TCG", "wasm"} {
		if !strings.Contains(page, "\n| "+tier+" | ") {
			t.Errorf("tier %s has no row", tier)
		}
	}
	_, attacks, _ := strings.Cut(page, "## Attacks on the host's side")
	attacks, _, _ = strings.Cut(attacks, "\n## ")
	for line := range strings.Lines(attacks) {
		if strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "| attack |") && !named.MatchString(line) {
			t.Errorf("no test shows it: %s", line)
		}
	}
}
