// Package script runs decision scripts in tests: blocks that a blank line
// parts, each an event in words, a line of dashes, and what is decided. It
// guarantees that the whole text is compared, so that nothing that is decided
// goes unread; the flag -rewrite accepts what the code says now.
package script

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write what the code decides into testdata")

// Run runs testdata/*.txt of the test's package, each file as a subtest. begin
// starts a file with a state of its own and returns the step that decides one
// line. A block whose last line is a comment decides nothing.
func Run(t *testing.T, begin func(t *testing.T) (step func(line string) string)) {
	t.Helper()
	files, _ := filepath.Glob("testdata/*.txt")
	if len(files) == 0 {
		t.Fatal("testdata holds no scripts")
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) { run(t, file, begin(t)) })
	}
}

func run(t *testing.T, file string, step func(line string) string) {
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for block := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n\n") {
		input, _, _ := strings.Cut(block, "\n----")
		lines := strings.Split(input, "\n")
		out.WriteString(input + "\n")
		if last := lines[len(lines)-1]; !strings.HasPrefix(last, "#") {
			out.WriteString("----\n" + step(last))
		}
		out.WriteByte('\n')
	}
	got := strings.TrimSpace(out.String()) + "\n"
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if got != string(raw) {
		t.Errorf("%s is not what the code decides; got:\n%s", file, got)
	}
}
