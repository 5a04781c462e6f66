package main

import (
	"io"
	"strings"
	"testing"
)

func read(t *testing.T, lines ...string) (*report, string) {
	t.Helper()
	r := &report{output: map[string][]string{}, seconds: map[string]float64{}}
	r.read(strings.NewReader(strings.Join(lines, "\n")), io.Discard)
	var out strings.Builder
	r.print(&out)
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
