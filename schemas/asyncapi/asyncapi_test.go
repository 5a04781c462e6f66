package asyncapi

import (
	"flag"
	"os"
	"testing"

	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write schemas/asyncapi.yaml")

// TestGeneratedDocumentIsTheCatalogue fails when schemas/asyncapi.yaml is stale.
func TestGeneratedDocumentIsTheCatalogue(t *testing.T) {
	got, err := Document()
	if err != nil {
		t.Fatal(err)
	}
	const path = "../asyncapi.yaml"
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("schemas/asyncapi.yaml is stale; run make gen:\n%s", diff)
	}
}

// TestEverySubjectHasAMessage: an event or method without a message type is
// either reserved, a dead letter, or served by the bus itself.
func TestEverySubjectHasAMessage(t *testing.T) {
	for _, e := range subjects.Events {
		if EventBody(e) == nil && !reserved[e.Owner+" "+e.Name] && e.Stream != "BERTH_DEAD" {
			t.Errorf("event %s has no message type", e.Subject)
		}
	}
	known := map[string]bool{}
	for _, m := range subjects.Methods {
		key := m.Service + " " + m.Name
		known[key] = true
		if _, ok := methodBodies[key]; !ok && m.Name != "retry" && m.Service != "bus" {
			t.Errorf("method %s has no message types", key)
		}
	}
	for key := range methodBodies {
		if !known[key] {
			t.Errorf("method %s has message types and is not in the catalogue", key)
		}
	}
	for _, b := range subjects.Box {
		if _, ok := boxBodies[b.Name]; !ok {
			t.Errorf("data-plane subject %s has no message types", b.Name)
		}
	}
}
