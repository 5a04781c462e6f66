package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// named is a test on docs/faults.md: `folder: TestName` or `folder: "a check of a suite"`.
var named = regexp.MustCompile("`([a-z0-9/_-]+): ((?:Test|Fuzz)[A-Za-z0-9]+|\"[^\"`]+\")`")

// TestFaultsPageNamesRealTests: a test that docs/faults.md names exists.
func TestFaultsPageNamesRealTests(t *testing.T) {
	root := repoRoot(t)
	page, err := os.ReadFile(filepath.Join(root, "docs", "faults.md"))
	if err != nil {
		t.Fatal(err)
	}
	if n := checkNamed(t, root, "docs/faults.md", string(page)); n < 100 {
		t.Errorf("only %d tests are named", n)
	}
	for _, line := range strings.Split(string(page), "\n") {
		row := strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "|---") && !strings.HasSuffix(line, "| test |")
		if row && !named.MatchString(line) && !strings.Contains(line, "**Open**") {
			t.Errorf("no test and no word about it: %s", line)
		}
	}
}

// checkNamed finds every test that a page names, and returns how many there are.
func checkNamed(t *testing.T, root, file, page string) int {
	t.Helper()
	folders := map[string]string{}
	all := named.FindAllStringSubmatch(page, -1)
	for _, m := range all {
		folder, name := m[1], m[2]
		if _, ok := folders[folder]; !ok {
			folders[folder] = source(t, filepath.Join(root, folder))
		}
		want := "func " + name + "("
		if strings.HasPrefix(name, "\"") {
			want = "{" + name + ", "
		}
		if !strings.Contains(folders[folder], want) {
			t.Errorf("%s names %s in %s; there is none", file, name, folder)
		}
	}
	return len(all)
}

// source is all of a folder's Go files.
func source(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("%s has no Go files", dir)
	}
	var b strings.Builder
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(raw)
	}
	return b.String()
}
