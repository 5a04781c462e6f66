//go:build linux

package microvm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// TestKVMOnlyAfterARealBoot: what this host really runs machines with is found by booting one, said
// with the reason, and remembered; another build or another host kernel is tried anew.
func TestKVMOnlyAfterARealBoot(t *testing.T) {
	h := newHost(t)
	h.cfg.NoKVM = false
	d := h.Open(t).(*Driver)
	c := d.Capabilities()[driver.MicroVM]
	_, kerr := os.Stat("/dev/kvm")
	t.Logf("/dev/kvm: %v; machines run with %s: %s (booted in %s)", kerr, c.Accel, d.accel.Why, d.accel.Boot.Round(time.Millisecond))
	if c.Accel != accelKVM && (c.Accel != accelTCG || d.accel.Why == "" || len(c.Missing) == 0) {
		t.Errorf("it runs with %q because %q", c.Accel, d.accel.Why)
	}
	if c.Accel == accelKVM && d.accel.Boot == 0 {
		t.Error("nothing was booted with it")
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	// A second start believes the file: an accel that no boot could have found shows it.
	file := h.cfg.Accel
	kept := d.accel
	kept.Why = "as it was remembered"
	if err := writeJSON(file, kept); err != nil {
		t.Fatal(err)
	}
	again := h.Open(t).(*Driver)
	_ = again.Close()
	if again.accel != kept {
		t.Errorf("got %+v, want %+v", again.accel, kept)
	}
	kept.Build = "of another kernel"
	if err := writeJSON(file, kept); err != nil {
		t.Fatal(err)
	}
	third := h.Open(t).(*Driver)
	_ = third.Close()
	if third.accel.Build != d.accel.Build || third.accel.Why == kept.Why {
		t.Errorf("it believed what was found with another build: %+v", third.accel)
	}
}

// TestABusyMachineLosesNoKVM: a boot with KVM that ran out of time on a machine on which an emulated one
// takes as long says nothing, and is not remembered.
func TestABusyMachineLosesNoKVM(t *testing.T) {
	for _, c := range []struct {
		tried bool
		took  time.Duration
		want  bool
	}{{true, 3 * time.Second, true}, {true, kvmTime, false}, {false, kvmTime, true}} {
		if got := conclusive(c.tried, c.took); got != c.want {
			t.Errorf("tried %v, emulated in %s: %v", c.tried, c.took, got)
		}
	}
}

// TestWhereNothingBootsTheTierIsAbsent: a kernel that does not boot makes no error of every session.
func TestWhereNothingBootsTheTierIsAbsent(t *testing.T) {
	h := newHost(t)
	kernel := t.TempDir()
	for name, text := range map[string]string{fileVersion: "broken", fileModules: "none"} {
		if err := os.WriteFile(filepath.Join(kernel, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run(t, "cp", filepath.Join(h.cfg.Kernel, fileVersion), filepath.Join(kernel, fileKernel)) // no kernel at all
	h.cfg.Kernel, h.cfg.BootTime = kernel, 20*time.Second
	d, err := Open(t.Context(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	c := d.Capabilities()[driver.MicroVM]
	if c.Absent == "" || strings.Contains(c.Absent, "\n") {
		t.Errorf("absent: %q", c.Absent)
	}
	if _, err := d.Create(t.Context(), h.Spec(t, 1, 1)); err == nil {
		t.Error("it made a machine")
	}
	if left := h.Left(t); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	if exists(h.cfg.Accel) {
		var a accel
		if readJSON(h.cfg.Accel, &a) == nil && a.Absent != "" {
			t.Error("it remembers a failure that may be over at the next start")
		}
	}
}

func TestPreflightIsOneSentenceAndMakesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: needs root")
	}
	dir := filepath.Join(t.TempDir(), "state")
	kernel := t.TempDir()
	for _, name := range []string{fileKernel, fileModules, fileVersion} {
		touch(t, filepath.Join(kernel, name))
	}
	for name, c := range map[string]struct {
		change func(*Config)
		say    string
	}{
		"qemu":   {func(c *Config) { c.QEMU = "/no/qemu" }, "QEMU is missing"},
		"kernel": {func(c *Config) { c.Kernel = dir }, "the kernel of virtual machines is missing"},
		"guest":  {func(c *Config) { c.Guest = dir }, "guest agent"},
		"run":    {func(c *Config) { c.Run = "/run/" + strings.Repeat("x", 80) }, "too long"},
		"users":  {func(c *Config) { c.FirstUser = 0 }, "user ids"},
	} {
		cfg := NewConfig(dir, kernel, "/proc/self/exe")
		cfg.QEMU = "/bin/true"
		c.change(&cfg)
		err := Preflight(cfg)
		if err == nil || !strings.Contains(err.Error(), c.say) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v", name, err)
		}
		if exists(dir) {
			t.Errorf("%s: it made something", name)
		}
	}
}

// TestTheNamespaceOfAMachineLeadsNowhere: a QEMU that its machine has taken over finds lo and, without a link,
// a tap that is down. The one tap that it holds is that, or its link's in the router.
func TestTheNamespaceOfAMachineLeadsNowhere(t *testing.T) {
	h := newHost(t)
	if !h.cfg.Network {
		t.Skip("skipped: this kernel has no taps")
	}
	r, err := network.Open(t.Context(), network.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	d := openDriver(t, h)
	plain, linked := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	l, err := r.Make(t.Context(), string(linked.ID()), true)
	if err != nil {
		t.Fatal(err)
	}
	linked.Link = &l
	for tap, spec := range map[string]driver.Spec{"tap0": plain, l.Name: linked} {
		sb, _ := start(t, d, spec)
		path, err := d.Netns(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		var st, host unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || unix.Stat("/proc/self/ns/net", &host) != nil || st.Ino == host.Ino {
			t.Errorf("its namespace is the host's: %v", err)
		}
		want := []string{"lo"}
		if spec.Link == nil {
			want = append(want, tap)
		}
		if got := devices(t, sb.PID); !slices.Equal(got, want) {
			t.Errorf("its namespace has %v, not %v", got, want)
		}
		if route := proc(t, sb.PID, "net/route"); strings.Count(route, "\n") > 1 {
			t.Errorf("its namespace leads somewhere: %s", route)
		}
		if got := taps(t, sb.PID); !slices.Equal(got, []string{tap}) {
			t.Errorf("it holds the taps %v, not %s", got, tap)
		}
	}
	if _, err := d.Netns(t.Context(), "bnone"); err == nil {
		t.Error("a network of nothing")
	}
}

// devices are the interfaces in a process's network namespace.
func devices(t *testing.T, pid int) (out []string) {
	t.Helper()
	for line := range strings.Lines(proc(t, pid, "net/dev")) {
		name, _, ok := strings.Cut(strings.TrimSpace(line), ":")
		// Some kernels put tunnels that are down into every namespace.
		if ok && !slices.Contains(strings.Fields("tunl0 gre0 gretap0 erspan0 ip_vti0 ip6_vti0 sit0 ip6tnl0 ip6gre0"), name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// taps are the interfaces whose descriptors a process holds.
func taps(t *testing.T, pid int) (out []string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for line := range strings.Lines(string(b)) {
			if name, ok := strings.CutPrefix(line, "iff:"); ok {
				out = append(out, strings.TrimSpace(name))
			}
		}
	}
	return out
}
