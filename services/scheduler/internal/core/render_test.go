package core

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write docs/generated/states.md")

// TestStateTable holds the documentation to the declared transitions.
func TestStateTable(t *testing.T) {
	path := filepath.Join("..", "..", "..", "..", "docs", "generated", "states.md")
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(Markdown()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil || string(have) != Markdown() {
		t.Errorf("docs/generated/states.md is stale (%v); run go test ./services/scheduler/internal/core -run StateTable -update", err)
	}
}

func TestTransitionsAreWellFormed(t *testing.T) {
	for _, tr := range Transitions() {
		if tr.Name == "" || tr.Event == "" || len(tr.From) == 0 {
			t.Errorf("transition %+v lacks a name, event or from-state", tr)
		}
	}
	legal := map[string]bool{}
	for _, tr := range Transitions() {
		if tr.Event == "delete" {
			for _, s := range tr.From {
				legal[StateName(s)] = true
			}
		}
	}
	for _, s := range []string{"none", "new", "waking", "active", "sleeping", "asleep", "paused", "failed", "deleting", "deleted"} {
		if !legal[s] {
			t.Errorf("delete is not legal from %s", s)
		}
	}
}
