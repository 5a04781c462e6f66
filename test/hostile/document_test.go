package hostile

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the rows of docs/threat-model.md")

const (
	rowsBegin = "<!-- rows: written by go test ./test/hostile -run TestGeneratedRows -update -->\n"
	rowsEnd   = "<!-- end of rows -->"
)

// TestGeneratedRowsStandInTheThreatModel: docs/threat-model.md has every row, with where it may come
// through and why; nothing that is no row; and the sum that it names.
func TestGeneratedRowsStandInTheThreatModel(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "threat-model.md")
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(page), rowsBegin)
	_, after, ok2 := strings.Cut(rest, rowsEnd)
	if !ok || !ok2 {
		t.Fatal("the page has no place for the rows")
	}
	if n := len(unique()); n < minRows {
		t.Errorf("there are %d rows; at least %d are promised", n, minRows)
	}
	want := before + rowsBegin + table() + rowsEnd + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want != string(page) {
		t.Error("docs/threat-model.md has other rows than the tests: run go test ./test/hostile -run TestGeneratedRows -update")
	}
}

// TestRowsAreNamedOnce: two rows of a tier with one name would be one test.
func TestRowsAreNamedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, n := range unique() {
		if seen[n] {
			t.Errorf("two rows are %q", n)
		}
		seen[n] = true
	}
}

// unique are all rows, each with its table.
func unique() (out []string) {
	for _, g := range groups {
		for _, r := range g.Rows {
			out = append(out, "programs: "+g.Name+": "+r.Name)
		}
	}
	for _, g := range wasmGroups {
		for _, r := range g.Rows {
			out = append(out, "modules: "+g.Name+": "+r.Name)
		}
	}
	for _, p := range wasmPrograms {
		out = append(out, "modules: run "+p.name)
	}
	for _, s := range wasmScripts {
		out = append(out, "scripts: "+s.name)
	}
	for _, r := range wasmTraces {
		out = append(out, "module traces: "+r.name)
	}
	for _, d := range damages {
		out = append(out, "disks: "+d.name)
	}
	for _, g := range greedy {
		out = append(out, "greedy: "+g.name)
	}
	for _, r := range traces {
		out = append(out, "traces: "+r.name)
	}
	return out
}

// table is the part of the page that the rows make.
func table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%d rows in all. Tiers with programs of the machine's own kind run those of programs, greed and traces each; root and nobody stand for two tests.\n", len(unique()))
	for _, g := range groups {
		fmt.Fprintf(&b, "\n### Programs: %s\n\nTest `test/hostile: TestHostile`, subtests rows/TIER/%s/ROW as USER. If a row came through, a session could take: %s.\n\n", g.Name, strings.ReplaceAll(g.Name, " ", "-"), g.Loss)
		b.WriteString("| attack | as | must | may come through |\n|---|---|---|---|\n")
		for _, r := range g.Rows {
			as := map[string]string{"": "root, nobody", "root": "root", "user": "nobody"}[r.Users]
			fmt.Fprintf(&b, "| %s | %s | be refused | %s |\n", r.Name, as, own(r))
		}
	}
	for _, g := range wasmGroups {
		fmt.Fprintf(&b, "\n### Modules: %s\n\nTest `test/hostile: TestHostile`, subtests modules/wasm/%s/ROW. If a row came through, a session could take: %s.\n\n", g.Name, strings.ReplaceAll(g.Name, " ", "-"), g.Loss)
		b.WriteString("| attack | must |\n|---|---|\n")
		for _, r := range g.Rows {
			fmt.Fprintf(&b, "| %s | be refused, or end the call |\n", r.Name)
		}
	}
	list := func(title, below, must string, rows []string) {
		fmt.Fprintf(&b, "\n### %s\n\nTest `test/hostile: TestHostile`, subtests %s/ROW. Must: %s.\n\n", title, below, must)
		for _, r := range rows {
			fmt.Fprintf(&b, "- %s\n", r)
		}
	}
	list("Modules: what may be named as a program", "modules/wasm/programs", "nothing runs, nothing is printed, the exit code says so", names(wasmPrograms, func(i int) string { return wasmPrograms[i].name }))
	list("Scripts of the JavaScript tool", "modules/wasm/scripts", "the script ends, and prints nothing", names(wasmScripts, func(i int) string { return wasmScripts[i].name }))
	list("Traces of modules", "modules/wasm", "each as its name says", names(wasmTraces, func(i int) string { return wasmTraces[i].name }))
	list("Greedy sessions", "greed/TIER", "the neighbour answers all the time, and the greedy session is usable afterwards", names(greedy, func(i int) string { return greedy[i].name }))
	list("Traces: what needs more than one moment", "traces/TIER", "each as its name says", names(traces, func(i int) string { return traces[i].name }))
	list("Images that a machine damaged", "disks/microvm", "the host never opens the image as a file system and its kernel never speaks of it; the wake ends with a reason or with a session that works, in a machine; the other session does not notice; it can be deleted", names(damages, func(i int) string { return damages[i].name }))
	b.WriteByte('\n')
	return b.String()
}

func names[T any](all []T, of func(int) string) (out []string) {
	for i := range all {
		out = append(out, of(i))
	}
	return out
}

func own(r Row) string {
	var out []string
	for tier, why := range r.Own {
		out = append(out, tier+": "+why)
	}
	slices.Sort(out)
	if len(out) == 0 {
		return "in no tier"
	}
	return strings.Join(out, "; ")
}
