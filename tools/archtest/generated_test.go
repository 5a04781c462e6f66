package archtest

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/schemas/subjects"
)

var update = flag.Bool("update", false, "write the generated documents")

// TestGeneratedCatalogueIsTrue: docs/generated/subjects.md is what the code says.
func TestGeneratedCatalogueIsTrue(t *testing.T) {
	path := filepath.Join(repoRoot(t), "docs", "generated", "subjects.md")
	want := "<!-- Generated from schemas/subjects by make gen. -->\n\n" + subjects.Markdown()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/generated/subjects.md is stale: run make gen")
	}
}
