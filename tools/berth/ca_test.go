package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/certs"
)

// atCA runs a command on a state folder of its own.
func atCA(dir string, now time.Time, args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	a := &app{ctx: context.Background(), stdin: strings.NewReader(""), stdout: &out, stderr: &errs, now: func() time.Time { return now }}
	code = run(a, append([]string{"--dir", dir}, args...))
	return out.String(), errs.String(), code
}

// What berth ca prints names the authority and its certificates, and no key.
func TestTheAuthorityIsMadeShownAndRotated(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	if _, stderr, code := atCA(dir, now, "ca", "show"); code != 1 || !strings.Contains(stderr, "berth ca init") {
		t.Errorf("without an authority: exit %d, %q", code, stderr)
	}
	show := func(args ...string) (out caOut) {
		t.Helper()
		stdout, stderr, code := atCA(dir, now, append([]string{"--json"}, args...)...)
		if code != 0 || strings.Contains(stdout, "PRIVATE") {
			t.Fatalf("%v: exit %d, %s%s", args, code, stdout, stderr)
		}
		if err := json.Unmarshal([]byte(stdout), &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	first := show("ca", "init")
	if again := show("ca", "init"); len(first.Roots) != 1 || again.Roots[0] != first.Roots[0] {
		t.Errorf("init replaced the root: %+v, %+v", first, again)
	}
	file := filepath.Join(dir, "tls", "scheduler-1.pem")
	if _, stderr, code := atCA(dir, now, "ca", "issue", "scheduler", "scheduler-1", "--addr", "10.0.0.1", "--addr", "one.example", "--out", file); code != 0 {
		t.Fatal(stderr)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := certs.Pair(raw, raw)
	if err != nil || pair.Leaf.VerifyHostname("10.0.0.1") != nil || pair.Leaf.VerifyHostname("one.example") != nil {
		t.Errorf("the certificate does not name its addresses: %v", err)
	}
	next := show("ca", "rotate")
	if len(next.Roots) != 2 || !next.Roots[0].Signing || next.Roots[1].SHA256 != first.Roots[0].SHA256 || next.Roots[1].Signing {
		t.Errorf("after rotate the roots are %+v", next.Roots)
	}
	if len(next.Certificates) != 1 || next.Certificates[0].ID != "spiffe://berth/scheduler/scheduler-1" {
		t.Errorf("the certificates are %+v", next.Certificates)
	}
	now = now.Add(40 * 24 * time.Hour)
	if late := show("ca", "show"); len(late.Roots) != 1 {
		t.Errorf("long after rotate the roots are %+v", late.Roots)
	}
}

func TestWhatCannotBeIssuedIsOneSentence(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "x.pem")
	if _, stderr, code := atCA(dir, time.Now(), "ca", "init"); code != 0 {
		t.Fatal(stderr)
	}
	for want, args := range map[string][]string{
		"must be one of":  {"operator", "x", "--out", out},
		"a-z, 0-9":        {"host", "../x", "--out", out},
		"names no addr":   {"host", "h1", "--addr", "10.0.0.1", "--out", out},
		"neither a host":  {"nats", "n1", "--addr", strings.Repeat("x", 300), "--out", out},
		"missing flags":   {"nats", "n1"},
		"holds the trust": {"nats", "n1", "--out", filepath.Join(dir, "tls", "ca.pem")},
	} {
		if _, stderr, code := atCA(dir, time.Now(), append([]string{"ca", "issue"}, args...)...); code == 0 || !strings.Contains(stderr, want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%v: exit %d, %q", args, code, stderr)
		}
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("a refusal wrote a file")
	}
}
