package drivertest

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/drivers.md")

const page = "../../../../docs/drivers.md"

// comments of the functions of this package, by name.
func comments(t *testing.T) map[string]string {
	t.Helper()
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), f.Name(), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv != nil {
				out[fn.Name.Name] = strings.Join(strings.Fields(fn.Doc.Text()), " ")
			}
		}
	}
	return out
}

// function is the name of a check's function.
func (c check) function() string {
	name := runtime.FuncForPC(reflect.ValueOf(c.run).Pointer()).Name()
	return name[strings.LastIndex(name, ".")+1:]
}

// guards is the fault that the check's comment tells of.
func (c check) guards(all map[string]string) string {
	_, text, _ := strings.Cut(all[c.function()], ": ")
	return text
}

// TestEveryCheckNamesItsFault: there are at least sixty checks, each a function of its own that says what
// it guards against, under a name that no other of its theme has.
func TestEveryCheckNamesItsFault(t *testing.T) {
	if len(checks) < 60 {
		t.Errorf("only %d checks", len(checks))
	}
	all, seen := comments(t), map[string]bool{}
	for _, c := range checks {
		if c.guards(all) == "" || c.fault == "" || c.theme == "" {
			t.Errorf("%s: %s does not say what it guards against", c.name, c.function())
		}
		for _, key := range []string{"check " + c.theme + ", " + c.name, "function " + c.function()} {
			if seen[key] {
				t.Errorf("%s is there twice", key)
			}
			seen[key] = true
		}
	}
	t.Logf("%d checks", len(checks))
}

// TestPageOfDriversIsTrue: docs/drivers.md lists the checks as they are.
func TestPageOfDriversIsTrue(t *testing.T) {
	want := render(t)
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/drivers.md is stale: go test ./services/hostagent/driver/drivertest -update")
	}
}

const intro = `# Drivers and what holds them to their contract

Generated from the table in services/hostagent/driver/drivertest; do not edit.

A driver makes the sandboxes of one or more isolation tiers on one host (` + "`services/hostagent/driver`" + `). Its contract is a small interface,
optional interfaces beside it, and ` + "`Capabilities`" + `: what it really does in a tier on this very host. The suite below runs against every driver,
and against what stands between hostagent and a driver; how to write one is in howto/add-a-driver.md.

A check is skipped only because of what a driver declares, and says so. **Needs** names the capabilities; a check of an optional interface
(watch, usage, freeze, resize, network namespace) is skipped where the driver has none. Checks marked with * look at one pair of sandboxes
that they share. Where sandboxes are prepared ahead (Warm), the suite, or in slow tiers the checks with * alone, runs a second time on
sandboxes that were prepared for nobody and then claimed. The last column is the kind of fault that the check belongs to; docs/faults.md tells what holds for each kind.
`

func render(t *testing.T) string {
	all := comments(t)
	var b strings.Builder
	b.WriteString(intro)
	fmt.Fprintf(&b, "\n%d checks.\n", len(checks))
	theme := ""
	for _, c := range checks {
		if c.theme != theme {
			theme = c.theme
			fmt.Fprintf(&b, "\n## %s%s\n\n| Check | Needs | Guards against | Kind of fault |\n|---|---|---|---|\n", strings.ToUpper(theme[:1]), theme[1:])
		}
		var needs []string
		for _, n := range c.needs {
			needs = append(needs, n.name)
		}
		star := ""
		if c.shared {
			star = " *"
		}
		fmt.Fprintf(&b, "| %s%s | %s | %s | %s |\n", c.name, star, strings.Join(needs, ", "), strings.TrimSuffix(c.guards(all), "."), c.fault)
	}
	return b.String()
}
