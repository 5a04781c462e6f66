package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	maxFile     = 500
	maxFunction = 70
)

// longer lists what may exceed the bounds. It only shrinks.
var longer = map[string]string{}

// TestNoFileOrFunctionOutgrowsItsRoom: a file over 500 lines or a function over
// about 60 asks to be cut.
func TestNoFileOrFunctionOutgrowsItsRoom(t *testing.T) {
	root := repoRoot(t)
	for _, p := range packages(t) {
		if strings.Contains(p.ImportPath, "/schemas/gen/") {
			continue
		}
		for _, f := range p.GoFiles {
			path := filepath.Join(p.Dir, f)
			rel, _ := filepath.Rel(root, path)
			checkSize(t, path, rel)
		}
	}
}

func checkSize(t *testing.T, path, rel string) {
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(raw), "\n"); n > maxFile && longer[rel] == "" {
		t.Errorf("%s has %d lines; at most %d", rel, n, maxFile)
	}
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, raw, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		lines := set.Position(fn.End()).Line - set.Position(fn.Pos()).Line
		if name := rel + ":" + fn.Name.Name; lines > maxFunction && longer[name] == "" {
			t.Errorf("%s has %d lines; at most %d", name, lines, maxFunction)
		}
	}
}
