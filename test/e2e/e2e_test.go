// Package e2e runs whole scenarios against the real thing: `berth up` as a
// process, real runtimes, real disks.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/testsize"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
	"github.com/berth-dev/berth/test/testenv"
)

// tiers maps each isolation tier with programs of the machine's own kind to the template that has it.
var tiers = map[string]string{"container": "container", "gvisor": "default", "microvm": "microvm"}

// eachTier runs a scenario in every tier; one that this installation has not is skipped with the reason.
func eachTier(t *testing.T, e *testenv.Env, scenario func(t *testing.T, tier, template string)) {
	t.Helper()
	for _, tier := range slices.Sorted(maps.Keys(tiers)) {
		t.Run(tier, func(t *testing.T) {
			testenv.ForTier(t, tier)
			if why := absent(t, e, tier); why != "" {
				t.Skipf("tier %s did not run: %s", tier, why)
			}
			scenario(t, tier, tiers[tier])
		})
	}
}

// offered are the tiers that this installation has, for a scenario that needs all at once.
func offered(t *testing.T, e *testenv.Env) map[string]string {
	t.Helper()
	out := map[string]string{}
	for tier, template := range tiers {
		if tier == "microvm" && !testsize.Long() {
			t.Log("tier microvm is left to make test-long")
			continue
		}
		if why := absent(t, e, tier); why != "" {
			t.Logf("tier %s did not run: %s", tier, why)
			continue
		}
		out[tier] = template
	}
	return out
}

func absent(t *testing.T, e *testenv.Env, tier string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	why, err := e.AwaitTier(ctx, tier)
	if err != nil {
		t.Fatal(err)
	}
	return why
}

// TestConformance runs the SDK's own suite on the real system.
func TestConformance(t *testing.T) { conformance(t, common.For(t)) }

func conformance(t *testing.T, e *testenv.Env) {
	n := 0
	sdktest.Conformance(t, func(t *testing.T) sdktest.Env {
		n++
		base := n
		return sdktest.Env{
			Client: e.Client("acme", "nobody"),
			User: func(name string) sdk.TokenSource {
				return func(ctx context.Context) (string, error) {
					return e.Token(ctx, "acme", fmt.Sprintf("%s-%d", name, base))
				}
			},
		}
	})
}

// TestFilesSurviveSleep goes through sleep and wake twice in each tier, with a
// package's worth of changes to the root: new, changed and deleted files, owners and modes.
func TestFilesSurviveSleep(t *testing.T) { filesSurviveSleep(t, common.For(t)) }

func filesSurviveSleep(t *testing.T, e *testenv.Env) {
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "sleeper-"+tier)
		s := open(t, c, sdk.OpenOptions{Template: template})
		if s.Place().Tier != sdk.Tier(tier) {
			t.Fatalf("the tier is %s", s.Place().Tier)
		}
		sh(t, s, `mkdir -p /opt/pkg/bin && echo tool > /opt/pkg/bin/tool && chmod 4755 /opt/pkg/bin/tool &&
			chown 1000:1000 /opt/pkg && rm /etc/issue && echo changed >> /etc/profile && ln -s tool /opt/pkg/bin/link`)
		for range 2 {
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			if s = open(t, c, sdk.OpenOptions{Template: template}); s.Origin() != sdk.Resumed {
				t.Fatalf("the wake says %s", s.Origin())
			}
			got := sh(t, s, `stat -c '%a %u:%g' /opt/pkg/bin/tool /opt/pkg; cat /opt/pkg/bin/link; test -e /etc/issue && echo back; tail -n1 /etc/profile`)
			if want := "4755 0:0\n755 1000:1000\ntool\nchanged"; got != want {
				t.Fatalf("after waking:\n%s\nwant:\n%s", got, want)
			}
		}
	})
}

// TestThePlaceSaysWhatItIs: the file inside and the answer outside agree.
func TestThePlaceSaysWhatItIs(t *testing.T) { placeSaysWhatItIs(t, common.For(t)) }

func placeSaysWhatItIs(t *testing.T, e *testenv.Env) {
	s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{Template: "default"})
	var place struct {
		Tier, Network string
	}
	inside := sh(t, s, "cat /run/berth/session.json")
	if err := json.Unmarshal([]byte(inside), &place); err != nil {
		t.Fatalf("session.json: %v\n%s", err, inside)
	}
	if place.Tier != "gvisor" || place.Network != "named" || s.Place().Network != "named" {
		t.Errorf("inside %+v, outside %+v", place, s.Place())
	}
	info, err := s.Info(t.Context())
	if err != nil || strings.TrimSpace(info) != strings.TrimSpace(inside) {
		t.Errorf("info is %q (%v)", info, err)
	}
	if out, err := s.Output(t.Context(), "sh", "-c", "echo x > /run/berth/session.json"); err == nil {
		t.Errorf("the file can be written from inside: %s", out)
	}
}

// TestComputeRemovedFromOutsideIsNoticed: killed by hand, the session wakes
// again with its newest files.
func TestComputeRemovedFromOutsideIsNoticed(t *testing.T) {
	computeRemovedIsNoticed(t, common.For(t))
}

func computeRemovedIsNoticed(t *testing.T, e *testenv.Env) {
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{Template: "container"})
	sh(t, s, "echo precious > /root/f; sync")
	events, err := e.Operator().Events(t.Context(), sdk.EventFilter{Session: s.Key()})
	if err != nil {
		t.Fatal(err)
	}
	guests := strings.Fields(run(t, "pgrep", "-f", "^/run/berth/guest"))
	ours := sandboxed(e) // another installation may run on this machine
	at := slices.IndexFunc(guests, func(pid string) bool { n, _ := strconv.Atoi(pid); return slices.Contains(ours, n) })
	if at < 0 {
		t.Fatalf("none of the guests %v is in the sandboxes %v", guests, ours)
	}
	killed := time.Now()
	run(t, "kill", "-9", guests[at])
	for ev, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Name == "exited" {
			break
		}
	}
	if late := time.Since(killed); late > 5*time.Second {
		t.Errorf("noticed after %s", late)
	}
	eventually(t, 20*time.Second, func() error { // the event may be there before scheduler knows
		s = open(t, c, sdk.OpenOptions{Template: "container"})
		got, err := s.Output(t.Context(), "cat", "/root/f")
		if err == nil && string(got) != "precious\n" {
			t.Errorf("the file says %q", got)
		}
		return err
	})
}

// TestOneOpenIsOneTrace reads the spans of every service that took part.
func TestOneOpenIsOneTrace(t *testing.T) {
	spans := filepath.Join(t.TempDir(), "spans.jsonl")
	e := testenv.Start(t, "--spans", spans)
	open(t, e.Client("acme", "ann"), sdk.OpenOptions{Template: "container"})
	e.Down()
	raw, err := os.ReadFile(spans)
	if err != nil {
		t.Fatal(err)
	}
	byTrace := map[string]map[string]bool{}
	for _, line := range strings.Split(strings.TrimSpace(string(raw)), "\n") {
		var span struct{ Trace, Name string }
		if err := json.Unmarshal([]byte(line), &span); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if byTrace[span.Trace] == nil {
			byTrace[span.Trace] = map[string]bool{}
		}
		byTrace[span.Trace][span.Name] = true
	}
	want := []string{"serve identity.open", "serve lifecycle.open", "serve scheduler.wake", "serve host.wake", "serve credentials.mint"}
	for _, names := range byTrace {
		if names[want[0]] {
			for _, w := range want {
				if !names[w] {
					t.Errorf("the open's trace lacks %q; it has %v", w, names)
				}
			}
			return
		}
	}
	t.Error("no trace of an open was written")
}

// TestPlainNatsCLIOpensASession uses the real natscli with a JSON body.
func TestPlainNatsCLIOpensASession(t *testing.T) {
	natscli(t)
	plainNats(t, common.For(t))
}

// natscli is the nats program, or the test is skipped.
func natscli(t *testing.T) string {
	t.Helper()
	nats := os.Getenv("BERTH_NATSCLI")
	if _, err := os.Stat(nats); nats == "" || err != nil {
		t.Skip("natscli is not built (make test does it)")
	}
	return nats
}

func plainNats(t *testing.T, e *testenv.Env) {
	nats := natscli(t)
	key := filepath.Join(t.TempDir(), "reply.key")
	body, err := e.CLI("request", "seal", "--tenant", "acme", "--user", "ann", "--verb", "open", "--key-out", key)
	if err != nil {
		t.Fatal(err)
	}
	login, err := sdk.ReadClientFile(e.ClientFile("fe-acme-web"))
	if err != nil {
		t.Fatal(err)
	}
	seed := filepath.Join(t.TempDir(), "seed.nk")
	if err := os.WriteFile(seed, []byte(login.Seed), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), nats, "--server", login.URL, "--tlsca", e.Roots(), "--nkey", seed, "--inbox-prefix", login.Inbox,
		"req", "berth.v1.rpc.identity.open.acme.web", "--raw", "--timeout", "30s", "-H", "Content-Type:application/json", strings.TrimSpace(body))
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+t.TempDir())
	answer, err := cmd.Output()
	if err != nil {
		t.Fatalf("nats req: %v", err)
	}
	unseal := exec.CommandContext(t.Context(), e.Bin, "request", "unseal", "--key", key)
	unseal.Stdin = bytes.NewReader(answer)
	plain, err := unseal.Output()
	if err != nil {
		t.Fatalf("unseal: %v\n%s", err, answer)
	}
	if !bytes.Contains(plain, []byte("grant")) || !bytes.Contains(plain, []byte("berth.v1.box.")) {
		t.Errorf("the answer is %s", plain)
	}
}

// TestAWholeLife opens, sleeps, resumes and deletes a session, by one door and by both.
func TestAWholeLife(t *testing.T) {
	e := common.For(t)
	t.Run("direct", func(t *testing.T) { wholeLife(t, e.For(t)) })
	t.Run("both doors", func(t *testing.T) {
		e.ForgetAll(t)
		bothDoors(t, e.For(t))
	})
}

func open(t *testing.T, c *sdk.Client, o sdk.OpenOptions) *sdk.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if o.Risk == (sdk.Risk{}) {
		o.Risk = sdk.OwnCode() // so that the template's own tier is chosen
	}
	s, err := c.Open(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sh runs a shell script as root in the session.
func sh(t *testing.T, s *sdk.Session, script string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := s.Run(ctx, sdk.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errOut})
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", script, err, out.String(), errOut.String())
	}
	return strings.TrimSpace(out.String())
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}
