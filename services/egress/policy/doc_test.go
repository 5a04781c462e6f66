package policy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTheDocumentShowsWhatIsRead: its policy, its cases, every preset and every reason.
func TestTheDocumentShowsWhatIsRead(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "howto", "egress.md"))
	if err != nil {
		t.Fatal(err)
	}
	doc := string(raw)
	blocks := strings.Split(doc, "```yaml\n")
	if len(blocks) < 3 {
		t.Fatal("the document shows no policy and no cases")
	}
	text := func(i int) []byte { s, _, _ := strings.Cut(blocks[i], "```"); return []byte(s) }
	d, err := Parse(text(1))
	if err != nil {
		t.Fatal(err)
	}
	cases, err := ParseCases(text(2))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Merge([]Layered{{layer("tenant"), 1, d}}).Run(cases) {
		if len(r.Wrong) > 0 {
			t.Errorf("line %d: %v", r.Line, r.Wrong)
		}
	}
	for _, name := range Presets() {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("the preset %s is not told", name)
		}
	}
	for reason := range because {
		if !strings.Contains(doc, "`"+string(reason)+"`") {
			t.Errorf("the reason %s is not told", reason)
		}
	}
}
