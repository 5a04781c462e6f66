package hostile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// templates of the tiers with programs of the machine's own kind.
var templates = map[string]string{"container": "container", "gvisor": "default", "kata": "default", "microvm": "microvm", wasmTier: "wasm"}

var tiers = []string{"container", "gvisor", "kata", "microvm"}

const inside = "/usr/local/bin/probe"

// world is one tier: the session that attacks, and another user's that is attacked.
type world struct {
	t        *testing.T
	env      *testenv.Env
	tier     string
	client   *sdk.Client
	attacker *sdk.Session
	victim   *sdk.Session
	mark     string
	inside   string // the probe's path
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

// enter opens the two sessions of a tier with native programs, or skips with the reason why it is not
// offered.
func enter(t *testing.T, e *testenv.Env, tier string, program []byte) *world {
	t.Helper()
	testenv.ForTier(t, tier)
	w := sessions(t, e, tier)
	for _, s := range []*sdk.Session{w.attacker, w.victim} {
		put(t, s, w.inside, program)
	}
	w.hold()
	return w
}

// sessions opens the session that attacks and another user's, or skips.
func sessions(t *testing.T, e *testenv.Env, tier string) *world {
	t.Helper()
	w := &world{t: t, env: e.For(t), tier: tier, mark: "mark-of-the-other-" + tier, inside: inside}
	if tier == wasmTier {
		w.inside = insideWasm
	}
	ctx, cancel := context.WithTimeout(t.Context(), tierWait)
	defer cancel()
	why, err := w.env.AwaitTier(ctx, tier)
	if err != nil {
		t.Fatal(err)
	}
	if why != "" {
		notRun(t, tier, why)
	}
	w.client = w.env.Client("acme", "mallory-"+tier)
	w.attacker = w.open(w.client)
	w.victim = w.open(w.env.Client("globex", "victor-"+tier))
	return w
}

// tierWait is how long a host may take to prove a tier by a real sandbox.
const tierWait = 5 * time.Minute

func put(t *testing.T, s *sdk.Session, path string, content []byte) {
	t.Helper()
	if _, err := s.Files().Write(t.Context(), path, bytes.NewReader(content), sdk.WriteOptions{Mode: 0o755}); err != nil {
		t.Fatalf("bring %s in: %v", path, err)
	}
}

func (w *world) open(c *sdk.Client) *sdk.Session {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	s, err := c.Open(ctx, w.ask())
	for err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "does not offer it") {
		time.Sleep(200 * time.Millisecond) // not every part of Berth has heard of a tier that was proved just now
		s, err = c.Open(ctx, w.ask())
	}
	if err != nil {
		w.t.Fatal(err)
	}
	if string(s.Place().Tier) != w.tier {
		w.t.Fatalf("the session is in tier %s", s.Place().Tier)
	}
	w.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := c.DeleteSession(ctx, sdk.UserSession{}); err != nil {
			w.t.Errorf("delete the session: %v", err)
		}
	})
	return s
}

// ask is an open in the tier. What is told of the risk lets the template's own tier be chosen.
func (w *world) ask() sdk.OpenOptions {
	risk := sdk.OwnCode()
	if w.tier == wasmTier { // whose modules the default policy takes from the operator alone
		risk.CodeAuthor, risk.Tools = sdk.OperatorCode, sdk.BoundedTools
	}
	o := sdk.OpenOptions{Template: templates[w.tier], Risk: risk}
	if w.tier == "kata" { // which no template of the default policy names
		o.MinTier = "kata"
	}
	return o
}

// hold starts the program that keeps the victim's secrets.
func (w *world) hold() {
	w.t.Helper()
	r, out, err := os.Pipe()
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.Close()
	p, err := w.victim.Exec(w.t.Context(), sdk.Cmd{Args: []string{w.inside, "hold-secret", w.mark}, Env: map[string]string{"SECRET": w.mark}, Stdout: out})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { p.Detach(); _ = out.Close() })
	b := make([]byte, 5)
	if _, err := r.Read(b); err != nil || string(b) != "ready" {
		w.t.Fatalf("the other session says %q (%v)", b, err)
	}
}

// notWalled is the exit code of a module's call of which nothing ran, since its jail failed: a row that
// ends with it shows nothing.
const notWalled = 125

// outcome of a row, as the probe prints it.
type outcome struct {
	Through bool
	Detail  string
}

// try runs the probe as a user and returns what it says. A probe that was killed came through nothing.
func (w *world) try(user string, args ...string) (outcome, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	var out, errOut bytes.Buffer
	err := w.attacker.Run(ctx, sdk.Cmd{Args: append([]string{w.inside}, w.fill(args)...), User: user, Stdout: &out, Stderr: &errOut})
	var o outcome
	if json.Unmarshal(bytes.TrimSpace(out.Bytes()), &o) == nil {
		return o, nil
	}
	var exit *sdk.ExitError
	if errors.As(err, &exit) && (w.tier != wasmTier || exit.Code != notWalled) {
		return outcome{Detail: fmt.Sprintf("it was ended: %v %.200s", err, errOut.String())}, nil
	}
	return o, fmt.Errorf("the probe says %.200q %.200q: %w", out.String(), errOut.String(), err)
}

func (w *world) fill(args []string) []string {
	var out []string
	for _, a := range args {
		switch a {
		case "MARK":
			out = append(out, w.mark)
		case "KEY":
			out = append(out, w.victim.Key())
		case "BUS":
			_, port, _ := net.SplitHostPort(strings.TrimPrefix(w.env.URL, "tls://"))
			out = append(out, port)
		case "BUS ADDRESS":
			out = append(out, strings.TrimPrefix(w.env.URL, "tls://"))
		case "HOSTS":
			out = append(out, hostAddresses()...)
		default:
			out = append(out, a)
		}
	}
	return out
}

func hostAddresses() (out []string) {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			out = append(out, n.IP.String())
		}
	}
	return out
}

// look is what of the host a sandbox must not change.
func look(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, path := range []string{"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname",
		"/proc/sys/vm/panic_on_oom", "/proc/sys/net/core/rmem_max", "/proc/swaps", "/sys/kernel/uevent_helper"} {
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		out[path] = string(b)
	}
	b, _ := os.ReadFile("/proc/modules")
	var modules []string
	for line := range strings.Lines(string(b)) {
		modules = append(modules, strings.Fields(line)[0])
	}
	slices.Sort(modules)
	out["modules"] = strings.Join(modules, " ")
	var now, since unix.Timespec
	if err := errors.Join(unix.ClockGettime(unix.CLOCK_REALTIME, &now), unix.ClockGettime(unix.CLOCK_BOOTTIME, &since)); err != nil {
		t.Fatal(err)
	}
	out["clock"] = time.Unix(now.Sec-since.Sec, 0).UTC().Round(time.Minute).Format(time.RFC3339)
	var names []string
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if !strings.HasPrefix(i.Name, "berth") { // a cluster of another installation comes and goes
			names = append(names, i.Name)
		}
	}
	slices.Sort(names)
	out["interfaces"] = strings.Join(names, " ")
	return out
}
