package errkind

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "append new kinds to the golden file")

// TestKindsOnlyGrow holds every released kind to what it was.
func TestKindsOnlyGrow(t *testing.T) {
	const file = "testdata/kinds.golden"
	var now []string
	for i, info := range All() {
		if int(info.Kind) != i {
			t.Fatalf("%s stands at %d and is numbered %d", info.Name, i, info.Kind)
		}
		now = append(now, fmt.Sprintf("%d %s %d %s retry=%t", info.Kind, info.Name, info.HTTP, info.Disposition, info.Retry))
	}
	raw, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	var then []string
	if len(raw) > 0 {
		then = strings.Split(strings.TrimSpace(string(raw)), "\n")
	}
	if len(then) > len(now) {
		t.Fatalf("%d kinds were released, %d are left", len(then), len(now))
	}
	for i, line := range then {
		if line != now[i] {
			t.Errorf("released as %q, is now %q", line, now[i])
		}
	}
	if len(then) == len(now) || t.Failed() {
		return
	}
	if !*update {
		t.Fatalf("new kinds %q: run this test with -update", now[len(then):])
	}
	if err := os.WriteFile(file, []byte(strings.Join(now, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestNamesAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, i := range All() {
		if seen[i.Name] || i.Doc == "" {
			t.Errorf("%s: twice, or without a doc", i.Name)
		}
		seen[i.Name] = true
	}
}

func TestParse(t *testing.T) {
	for _, i := range All()[1:] {
		if k := Parse(fmt.Sprint(int(i.Kind))); k != i.Kind {
			t.Errorf("%s became %s", i.Kind, k)
		}
	}
	for _, s := range []string{"", "0", "-1", "x", "65536", "4 "} {
		if k := Parse(s); k != Internal {
			t.Errorf("%q became %s", s, k)
		}
	}
	newer := Parse("9999")
	if newer.Known() || newer.String() != "kind_9999" || newer.Disposition() != Nak || !newer.Retry() {
		t.Errorf("a kind of a newer version: %v %v", newer, newer.Disposition())
	}
}
