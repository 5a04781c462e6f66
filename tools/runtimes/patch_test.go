package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestAPatchThatNoLongerFitsIsAnError: a new version of a component must not be built unmended.
func TestAPatchThatNoLongerFitsIsAnError(t *testing.T) {
	from := t.TempDir()
	if err := os.MkdirAll(filepath.Join(from, "pkg"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "pkg/a.go"), []byte("one two one"), 0o444); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "source")
	if err := patched(from, to, []patch{{File: "pkg/a.go", Old: "two", New: "three"}}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "pkg/a.go")); err != nil || string(got) != "one three one" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, _ := os.ReadFile(filepath.Join(from, "pkg/a.go")); string(got) != "one two one" {
		t.Errorf("the module itself became %q", got)
	}
	for _, old := range []string{"none", "one"} {
		if err := patched(from, filepath.Join(t.TempDir(), "source"), []patch{{File: "pkg/a.go", Old: old}}); err == nil {
			t.Errorf("%q: no error", old)
		}
	}
}
