package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTimesOfPackagesTestsAndWaits(t *testing.T) {
	_, out := read(t,
		`{"Action":"attr","Package":"m/a","Test":"TestA","Key":"wait","Value":"1.5s: the lease expires"}`,
		`{"Action":"attr","Package":"m/a","Test":"TestA","Key":"other","Value":"1s: no wait"}`,
		`{"Action":"pass","Package":"m/a","Test":"TestA/sub","Elapsed":3}`,
		`{"Action":"pass","Package":"m/a","Test":"TestA","Elapsed":3.5}`,
		`{"Action":"pass","Package":"m/a","Elapsed":4}`,
		`{"Action":"pass","Package":"m/b","Test":"TestB","Elapsed":9}`,
		`{"Action":"pass","Package":"m/b","Elapsed":9.25}`)
	at := 0
	for _, want := range []string{
		"       9.2       0.0       0.0  m/b\n", "       4.0       0.0       1.5  m/a\n",
		"The 2 slowest tests:\n       9.0 s  m/b TestB\n       3.5 s  m/a TestA\n",
		"     1.5 s  m/a TestA: the lease expires\n",
	} {
		i := strings.Index(out[at:], want)
		if i < 0 {
			t.Fatalf("%q is not there, or not in its place:\n%s", want, out)
		}
		at += i
	}
}

func TestTotalStandsBesideBudgetAndLoad(t *testing.T) {
	dir := t.TempDir()
	graph := `[
		{"Mode":"build","TimeStart":"2026-12-01T10:00:00Z","TimeDone":"2026-12-01T10:00:20Z","CmdUser":15000000000,"CmdSys":1000000000},
		{"Mode":"link","TimeStart":"2026-12-01T10:00:00Z","TimeDone":"2026-12-01T10:00:05Z","CmdUser":4000000000},
		{"Mode":"test run","TimeStart":"2026-12-01T10:00:00Z","TimeDone":"2026-12-01T11:00:00Z","CmdUser":90000000000}]`
	usage := `{"Binary":"core.test","Dir":"/x/services/b/core","CPU":30}` + "\n" + `{"Binary":"core.test","Dir":"/x/services/a/core","CPU":2}` + "\n"
	for name, text := range map[string]string{"graph-1.json": graph, "usage.json": usage} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, _ := read(t,
		`{"Action":"pass","Package":"m/services/a/core","Test":"T","Elapsed":3}`, `{"Action":"pass","Package":"m/services/a/core","Elapsed":3}`,
		`{"Action":"pass","Package":"m/services/b/core","Test":"T","Elapsed":40}`, `{"Action":"pass","Package":"m/services/b/core","Elapsed":40}`)
	if err := r.times.readDir(dir); err != nil {
		t.Fatal(err)
	}
	r.times.wall = 90 * time.Second
	var out strings.Builder
	r.times.print(&out)
	r.times.printTotal(&out, time.Minute, loadAt{seconds: 97, cores: 2, average: "1 2 3", ok: true})
	for _, want := range []string{
		"      40.0      30.0       0.0  m/services/b/core\n", "       3.0       2.0       0.0  m/services/a/core\n",
		"Building 20 s, linking 5 s, vetting 0 s; tests 43 s, of which declared waits 0 s",
		"52 s of builds and tests, 45 s of everything else on this machine (0.50 of 2 cores); load average 1 2 3.",
		"Wall time: 1m30s, the budget is 1m0s (150 %).",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not there:\n%s", want, out.String())
		}
	}
}
