package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/schemas/subjects"
)

// fenceRow begins a row of docs/fencing.md: the places of action that it is about, each in backticks.
var fenceRow = regexp.MustCompile("^\\| ((?:`[a-zA-Z0-9_. ]+`(?:, )?)+) \\|")

// TestEveryPlaceOfActionHasAFencingRow: whatever can act on a session stands in docs/fencing.md
// with what must match and the test that says so. A new RPC method, data-plane subject, log entry or
// host event without a row fails here.
func TestEveryPlaceOfActionHasAFencingRow(t *testing.T) {
	root := repoRoot(t)
	page, err := os.ReadFile(filepath.Join(root, "docs", "fencing.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, line := range strings.Split(string(page), "\n") {
		m := fenceRow.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		for _, place := range strings.Split(m[1], ", ") {
			listed[strings.Trim(place, "`")] = true
		}
		if !named.MatchString(line) && !strings.Contains(line, "acts on no session") {
			t.Errorf("no test, and not said that it acts on no session: %s", line)
		}
	}
	places := placesOfAction(t, root)
	if len(places) < 60 {
		t.Errorf("only %d places of action were found in the code", len(places))
	}
	for _, p := range places {
		if !listed[p] {
			t.Errorf("%s can act and has no row in docs/fencing.md", p)
		}
		delete(listed, p)
	}
	for p := range listed {
		t.Errorf("docs/fencing.md has a row for %s, which is not there any more", p)
	}
	checkNamed(t, root, "docs/fencing.md", string(page))
}

// placesOfAction reads them from the code: methods and subjects of the catalogue, entries of
// scheduler's log, events of a host's session.
func placesOfAction(t *testing.T, root string) (out []string) {
	for _, m := range subjects.Methods {
		out = append(out, "rpc "+m.Service+"."+m.Name)
	}
	for _, b := range subjects.Box {
		out = append(out, "box "+b.Name)
	}
	entry := parse(t, filepath.Join(root, "services/scheduler/internal/core/entry.go"))
	ast.Inspect(entry, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != "Entry" {
			return true
		}
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			if _, pointer := f.Type.(*ast.StarExpr); pointer {
				out = append(out, "entry "+f.Names[0].Name)
			}
		}
		return false
	})
	files, err := filepath.Glob(filepath.Join(root, "services/hostagent/internal/core/*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		for _, d := range parse(t, file).Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "event" {
				out = append(out, "host "+f.Recv.List[0].Type.(*ast.Ident).Name)
			}
		}
	}
	slices.Sort(out)
	return out
}

func parse(t *testing.T, path string) *ast.File {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	return f
}
