package e2e

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// needTier skips a scenario with the reason why this installation has not the tier.
func needTier(t *testing.T, e *testenv.Env, tier string) {
	t.Helper()
	if why := absent(t, e, tier); why != "" {
		t.Skipf("tier %s did not run: %s", tier, why)
	}
}

// TestADiskThatAMachineWroteStaysInMachines: a session goes from a container into a machine with its
// files, and never back: whatever template is asked for later, it wakes in a machine, says why, and
// the host mounts its disk no more.
func TestADiskThatAMachineWroteStaysInMachines(t *testing.T) {
	e := machines.For(t)
	needTier(t, e, "microvm")
	c := e.Client("acme", "mover")
	s := open(t, c, sdk.OpenOptions{Template: "container"})
	sh(t, s, "mkdir -p /opt/kept && echo from-container > /opt/kept/f && chown 1000:1000 /opt/kept/f && rm /etc/issue")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s = open(t, c, sdk.OpenOptions{Template: "microvm"})
	if tier := s.Place().Tier; tier != "microvm" || s.Origin() != sdk.Resumed {
		t.Fatalf("the wake says %s in tier %s", s.Origin(), tier)
	}
	if got := sh(t, s, "cat /opt/kept/f; stat -c %u:%g /opt/kept/f; if test -e /etc/issue; then echo back; fi"); got != "from-container\n1000:1000" {
		t.Errorf("in the machine: %q", got)
	}
	sh(t, s, "echo from-machine > /opt/kept/g")
	for range 2 {
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s = open(t, c, sdk.OpenOptions{Template: "container"})
		if tier := s.Place().Tier; tier != "microvm" || s.Origin() != sdk.Resumed {
			t.Fatalf("asked for a container, the wake says %s in tier %s", s.Origin(), tier)
		}
		if got := sh(t, s, "cat /opt/kept/f /opt/kept/g"); got != "from-container\nfrom-machine" {
			t.Errorf("the files say %q", got)
		}
		if mounted(t, e.Dir, s.Key()) {
			t.Errorf("the host has mounted a disk that a machine wrote")
		}
	}
	if out, err := e.CLI("session", "explain", s.Key()); err != nil || !strings.Contains(out, "virtual machine") {
		t.Errorf("the explanation does not say why: %v\n%s", err, out)
	}
}

// mounted reports whether the disk of a session is mounted on this host.
func mounted(t *testing.T, dir, key string) bool {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if strings.Contains(line, dir) && strings.Contains(line, key) && strings.Contains(line, " ext4 ") {
			return true
		}
	}
	return false
}

// TestAMachinesDiskIsSavedAndRestored: checkpoint, snapshot, restore, growth, export and import of a
// disk that the host never mounts.
func TestAMachinesDiskIsSavedAndRestored(t *testing.T) {
	e := machines.For(t)
	needTier(t, e, "microvm")
	c := e.Client("acme", "saver")
	o := sdk.OpenOptions{Template: "microvm"}
	s := open(t, c, o)
	sh(t, s, "echo one > /root/f")
	m, err := s.Checkpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sh(t, s, "echo two > /root/f && head -c 3000000 /dev/urandom > /root/noise && sync")
	var archive bytes.Buffer
	if _, err := s.Export(t.Context(), &archive); err != nil {
		t.Errorf("export: %v", err)
	}
	before := sh(t, s, "df -k --output=size / | tail -n1")
	if out, err := e.CLI("disk", "grow", s.Key(), "6GiB"); err != nil {
		t.Errorf("grow: %v\n%s", err, out)
	}
	if after := sh(t, s, "df -k --output=size / | tail -n1"); after == before {
		t.Errorf("the machine's disk still has %s KiB", after)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out, err := e.CLI("disk", "restore", s.Key(), "--snapshot", m.ID); err != nil {
		t.Fatalf("restore: %v\n%s", err, out)
	}
	if s = open(t, c, o); s.Origin() != sdk.Restored {
		t.Errorf("the wake says %s", s.Origin())
	}
	if got := sh(t, s, "cat /root/f; ls /root/noise 2>/dev/null || true"); got != "one" {
		t.Errorf("restored: %q", got)
	}
	if _, err := s.Import(t.Context(), &archive, "/"); err != nil {
		t.Errorf("import: %v", err)
	} else if got := sh(t, s, "cat /root/f; stat -c %s /root/noise"); got != "two\n3000000" {
		t.Errorf("imported: %q", got)
	}
}

// TestTheChoiceOfTierIsExplained: the event admitted says which rule chose the tier, from which facts.
func TestTheChoiceOfTierIsExplained(t *testing.T) {
	e := common.For(t)
	for _, x := range []struct {
		template string
		risk     sdk.Risk
		tier     string
	}{
		{"container", sdk.OwnCode(), "container"},
		{"container", sdk.Risk{}, "gvisor"}, // nothing is known: the riskiest that this machine can wall off
	} {
		s, err := e.Client("acme", "chooser-"+x.tier).Open(t.Context(), sdk.OpenOptions{Template: x.template, Risk: x.risk})
		if err != nil {
			t.Fatal(err)
		}
		if got := string(s.Place().Tier); got != x.tier && got != "microvm" {
			t.Errorf("facts %+v: tier %s, want %s", x.risk, got, x.tier)
		}
		ev, err := e.Operator().LastEvent(t.Context(), "acme", s.Key(), "admitted")
		if err != nil {
			t.Fatal(err)
		}
		admitted, ok := ev.Body.(*schedulerv1.Event)
		d := admitted.GetAdmitted().GetTierDecision()
		if !ok || d.GetRule() == "" || d.GetChosen() == corev1.Tier_TIER_UNSPECIFIED || len(d.GetFacts()) == 0 {
			t.Errorf("the event explains nothing: %+v", ev)
		}
		if x.risk == (sdk.Risk{}) && len(d.GetUnknown()) == 0 {
			t.Errorf("it does not say what was unknown: %v", d)
		}
	}
}

// TestModulesAreTools: the WebAssembly tier runs modules, and nothing else, on the session's disk.
func TestModulesAreTools(t *testing.T) {
	e := common.For(t)
	needTier(t, e, "wasm")
	c := e.Client("acme", "tools")
	o := sdk.OpenOptions{Template: "wasm", Risk: sdk.Risk{CodeAuthor: sdk.OperatorCode, Tools: sdk.BoundedTools, Network: sdk.NoNetwork, DataClass: "public"}}
	s := open(t, c, o)
	if got := output(t, s, "js", "-e", `console.log(JSON.stringify({sum: 1 + 2}))`); got != `{"sum":3}` {
		t.Errorf("js says %q", got)
	}
	if _, err := s.Files().Write(t.Context(), "/data/in.txt", strings.NewReader("from outside"), sdk.WriteOptions{Parents: true}); err != nil {
		t.Fatal(err)
	}
	if got := output(t, s, "js", "-e", `console.log(readFile("/data/in.txt"))`); got != "from outside" {
		t.Errorf("the module reads %q", got)
	}
	for _, argv := range [][]string{{"/bin/sh", "-c", "id"}, {"/data/in.txt"}} {
		var exit *sdk.ExitError
		if _, err := s.Output(t.Context(), argv[0], argv[1:]...); err == nil || errors.As(err, &exit) && exit.Code == 0 {
			t.Errorf("%v ran: %v", argv, err)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s = open(t, c, o); s.Origin() != sdk.Resumed {
		t.Errorf("the wake says %s", s.Origin())
	}
	if got := output(t, s, "js", "-e", `console.log(readFile("/data/in.txt"))`); got != "from outside" {
		t.Errorf("after a sleep the module reads %q", got)
	}
}

func output(t *testing.T, s *sdk.Session, argv ...string) string {
	t.Helper()
	out, err := s.Output(t.Context(), argv[0], argv[1:]...)
	if err != nil {
		t.Errorf("%v: %v", argv, err)
	}
	return strings.TrimSpace(string(out))
}
