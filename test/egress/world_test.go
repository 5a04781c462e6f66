package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// The tiers that have a network, each with a template.
var (
	tiers     = []string{"container", "gvisor", "microvm"}
	templates = map[string]string{"container": "container", "gvisor": "default", "microvm": "microvm"}
)

// families are IPv4 and IPv6 as a sandbox uses them.
var families = []string{"4", "6"}

const (
	inside = "/usr/local/bin/probe"
	// The gate's doors as a sandbox sees them.
	connectDoor = "100.64.0.1:3128"
	socksDoor   = "100.64.0.1:1080"
	// secretValue is put in for inject.example.test; nothing that this test reads may hold it.
	secretValue = "sk-the-tenants-own-secret-0123456789"
	contact     = "network@acme.example"
)

// policy is what tenant acme may reach.
const policy = `contact: "network@acme.example"
rules:
  - name: api
    allow: {hosts: [api.example.test], ports: [443]}
    addresses: [127.77.1.0/24, "::1/128"]
  - name: plain
    allow: {hosts: [api.example.test], ports: [80], protocol: http}
    addresses: [127.77.1.0/24, "::1/128"]
  - name: other
    allow: {hosts: [other.example.test], ports: [80], protocol: http}
    addresses: [127.77.1.0/24, "::1/128"]
  - name: wild
    allow: {hosts: ["*.wild.example.test"], ports: [443]}
    addresses: [127.77.1.0/24, "::1/128"]
  - name: inject
    allow: {hosts: [inject.example.test], ports: [443], protocol: https}
    addresses: [127.77.1.0/24, "::1/128"]
    inject: {secret: api-key, header: Authorization, format: "Bearer {secret}"}
  - name: other-inject
    allow: {hosts: [other-inject.example.test], ports: [443], protocol: https, methods: [GET]}
    addresses: [127.77.1.0/24, "::1/128"]
  - name: paths
    allow: {hosts: [paths.example.test], ports: [443], protocol: https, methods: [GET], paths: [/acme/]}
    addresses: [127.77.1.0/24, "::1/128"]
    refuse_credentials: true
  - name: raw
    allow: {hosts: [api.example.test], ports: [7000], protocol: tcp}
    addresses: [127.77.1.0/24]
  - name: private
    allow: {hosts: [private.example.test, flips.example.test], ports: [443]}
  - name: never
    deny: {hosts: [denied.wild.example.test]}
`

// world is one tier: the session that is tried, and another tenant's beside it.
type world struct {
	t         *testing.T
	env       *testenv.Env
	in        *internet
	tier      string
	client    *sdk.Client
	session   *sdk.Session
	neighbour *sdk.Session // of a tenant without a policy
}

// up starts an installation whose gate uses the test's internet.
func up(t *testing.T, in *internet) *testenv.Env {
	t.Helper()
	config := filepath.Join(in.dir, "up.yaml")
	text := fmt.Sprintf("gate:\n  resolvers: [%q]\n  roots: [%q]\nhost:\n  network:\n    trust: [%q]\n", in.dns, in.roots(), in.roots())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	e := testenv.Prepare(t, append([]string{"--config", config}, testenv.Tiers()...)...)
	e.Up()
	return e
}

// apply gives tenant acme a policy.
func apply(t *testing.T, e *testenv.Env, document string, scope ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(document), 0o600); err != nil {
		t.Fatal(err)
	}
	if len(scope) == 0 {
		scope = []string{"--tenant", "acme"}
	}
	if _, err := e.CLI(append([]string{"policy", "egress", "apply", "-f", file}, scope...)...); err != nil {
		t.Fatal(err)
	}
}

// secret stores the tenant's secret.
func secret(t *testing.T, e *testenv.Env) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte(secretValue), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := e.CLI("secret", "put", "api-key", "--tenant", "acme", "--host", "inject.example.test", "--value-file", file); err != nil {
		t.Fatal(err)
	}
}

// probe builds the program that runs inside.
func probe(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "probe")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "./probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// tierWait is how long a host may take to prove a tier by a real sandbox.
const tierWait = 5 * time.Minute

// enter opens the sessions of a tier, or skips with the reason why it is not offered.
func enter(t *testing.T, e *testenv.Env, in *internet, tier string, program []byte) *world {
	t.Helper()
	testenv.ForTier(t, tier)
	w := &world{t: t, env: e.For(t), in: in, tier: tier}
	ctx, cancel := context.WithTimeout(t.Context(), tierWait)
	defer cancel()
	why, err := w.env.AwaitTier(ctx, tier)
	if err != nil {
		t.Fatal(err)
	}
	if why != "" {
		fmt.Printf("EGRESS tier %s did not run: %s\n", tier, why)
		t.Skip(why)
	}
	w.session = w.open("acme", program)
	w.neighbour = w.open("globex", program)
	return w
}

func (w *world) open(tenant string, program []byte) *sdk.Session {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	c := w.env.Client(tenant, "egress-"+w.tier)
	if w.client == nil {
		w.client = c // of the first, who is tried
	}
	s, err := c.Open(ctx, w.ask())
	for err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "does not offer it") {
		time.Sleep(200 * time.Millisecond) // not every part of Berth has heard of a tier that was proved just now
		s, err = c.Open(ctx, w.ask())
	}
	if err != nil {
		w.t.Fatal(err)
	}
	if got := string(s.Place().Tier); got != w.tier {
		w.t.Fatalf("the session is in tier %s", got)
	}
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Delete(ctx); err != nil {
			w.t.Errorf("delete the session: %v", err)
		}
	})
	if _, err := s.Files().Write(w.t.Context(), inside, bytes.NewReader(program), sdk.WriteOptions{Mode: 0o755}); err != nil {
		w.t.Fatalf("bring the probe in: %v", err)
	}
	return s
}

func (w *world) ask() sdk.OpenOptions {
	return sdk.OpenOptions{Template: templates[w.tier], Risk: sdk.OwnCode()}
}

// outcome is what the probe prints.
type outcome struct {
	Status int
	Header map[string]string
	Body   string
	Error  string
	Ms     int64
}

func (o outcome) String() string { return fmt.Sprintf("%d %.300q %s", o.Status, o.Body, o.Error) }

// refused: it did not get what it asked for, by a denial or a broken connection.
func (o outcome) refused() bool {
	return o.Error != "" || o.Status == 403 || o.Status == 421 || o.Status == 400
}

// tryTime is for one attempt; in an emulated machine a handshake alone takes seconds.
const tryTime = 90 * time.Second

// try runs one attempt inside.
func (w *world) try(t *testing.T, words ...string) outcome {
	t.Helper()
	return tryIn(t, w.session, words...)
}

func tryIn(t *testing.T, s *sdk.Session, words ...string) outcome {
	t.Helper()
	o, err := attempt(t, s, words...)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// attempt runs the probe once; the error says why it could not be run.
func attempt(t *testing.T, s *sdk.Session, words ...string) (o outcome, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), tryTime)
	defer cancel()
	raw, err := s.Output(ctx, inside, words...)
	if jerr := json.Unmarshal(raw, &o); err != nil || jerr != nil {
		return o, fmt.Errorf("%s: %q, %w", strings.Join(words, " "), raw, errors.Join(err, jerr))
	}
	return o, nil
}

// passes fails unless the attempt got 200.
func (w *world) passes(t *testing.T, words ...string) outcome {
	t.Helper()
	o := w.try(t, words...)
	if o.Error != "" || o.Status != 200 {
		t.Errorf("%s: %s; it must come through", strings.Join(words, " "), o)
	}
	return o
}

// refuses fails if the attempt came through, or any connection reached the test's internet for it.
func (w *world) refuses(t *testing.T, words ...string) outcome {
	t.Helper()
	before := w.in.all()
	o := w.try(t, words...)
	if !o.refused() {
		t.Errorf("%s: %s; it must be refused", strings.Join(words, " "), o)
	}
	if n := w.in.all() - before; n != 0 {
		t.Errorf("%s: %d connections went out for it", strings.Join(words, " "), n)
	}
	return o
}

// refusesInside is for what is seen to be wrong on a connection that was allowed: no request for host comes.
func (w *world) refusesInside(t *testing.T, host string, words ...string) outcome {
	t.Helper()
	before := w.in.heard(host)
	o := w.try(t, words...)
	if !o.refused() {
		t.Errorf("%s: %s; it must be refused", strings.Join(words, " "), o)
	}
	if n := w.in.heard(host) - before; n != 0 {
		t.Errorf("%s: %d requests for %s went out", strings.Join(words, " "), n, host)
	}
	return o
}

// records are the audit records of the session so far.
func (w *world) records(t *testing.T) string {
	t.Helper()
	out, err := w.env.CLI("audit", "egress", w.session.Key(), "--since", "1h", "--json")
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// recorded waits until an audit record of the session holds all words.
func (w *world) recorded(t *testing.T, words ...string) {
	t.Helper()
	var out string
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		out = w.records(t)
		for line := range strings.Lines(out) {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
				return
			}
		}
	}
	t.Errorf("no audit record holds %q; the last ones are %.2000s", words, out[max(0, len(out)-2000):])
}

// output runs a program of the image inside.
func (w *world) output(t *testing.T, wait time.Duration, script string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	out, err := w.session.Output(ctx, "bash", "-c", script+" 2>&1")
	return string(out), err
}
