package main

import (
	"fmt"
	"io"
	"strings"
	"testing"
)

func read(t *testing.T, lines ...string) (*report, string) {
	t.Helper()
	r := newReport()
	r.read(strings.NewReader(strings.Join(lines, "\n")), io.Discard)
	var out strings.Builder
	r.print(&out, func(io.Writer) {})
	return r, out.String()
}

func TestASkipIsPrintedWithItsReason(t *testing.T) {
	r, out := read(t,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:3: this machine has no cgroup v2\n"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}`,
		`{"Action":"skip","Package":"p","Test":"TestA"}`,
		`{"Action":"pass","Package":"p","Test":"TestB"}`)
	if r.skipped != 1 || !strings.Contains(out, "p TestA: a_test.go:3: this machine has no cgroup v2") {
		t.Errorf("the reason is missing:\n%s", out)
	}
	if !strings.HasSuffix(out, "\n1 passed, 0 failed, 1 skipped\n") {
		t.Errorf("no closing line of counts:\n%s", out)
	}
}

func TestABuildFailureIsAFailure(t *testing.T) {
	r, out := read(t,
		`{"ImportPath":"p","Action":"build-output","Output":"p.go:1: undefined: x\n"}`,
		`{"Action":"fail","Package":"p","Elapsed":0.1}`)
	if r.failed != 1 || !strings.Contains(out, "undefined: x") {
		t.Errorf("a package that does not build must fail with its output:\n%s", out)
	}
}

// A log that is cut keeps its end: that is where failures must be, and short.
func TestFailuresComeLastAndAreCut(t *testing.T) {
	lines := []string{
		`{"Action":"output","Package":"p","Test":"TestS","Output":"    no cgroup\n"}`,
		`{"Action":"skip","Package":"p","Test":"TestS"}`,
	}
	for i := range 100 {
		lines = append(lines, fmt.Sprintf(`{"Action":"output","Package":"p","Test":"TestA","Output":"line %d.\n"}`, i))
	}
	_, out := read(t, append(lines,
		`{"Action":"fail","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Test":"TestB/sub","Output":"why\n"}`,
		`{"Action":"fail","Package":"p","Test":"TestB/sub"}`,
		`{"Action":"fail","Package":"p","Elapsed":2}`)...)
	at := 0
	for _, want := range []string{"no cgroup", "Packages (seconds):", "--- FAILED p TestA\n(70 lines before these)\nline 70.\n", "line 99.\n",
		"--- FAILED p TestB/sub\nwhy\n"} {
		i := strings.Index(out[at:], want)
		if i < 0 {
			t.Fatalf("%q is not there, or not in its place:\n%s", want, out)
		}
		at += i
	}
	if strings.Contains(out, "line 69.") {
		t.Errorf("more than the last 30 lines:\n%s", out)
	}
	if end := "\nFailed: p TestA, p TestB/sub\n0 passed, 2 failed, 1 skipped\n"; !strings.HasSuffix(out, end) {
		t.Errorf("it does not end with the names and the counts:\n%s", out)
	}
}
