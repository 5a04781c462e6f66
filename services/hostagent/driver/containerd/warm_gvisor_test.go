package containerd

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/guest/enter"
)

// running says whether the thread that answers is the first one.
var running = regexp.MustCompile(`State:.*`)

// fileServers are what differs between any two sandboxes of gVisor in a table of mounts, and the folder of
// a file server that a mount begins at.
var fileServers = regexp.MustCompile(`(rfdno|wfdno)=\d+| /root( / )`)

// A claimed sandbox of gVisor differs from one that was started cold: a mount of the empty root or the
// slot shows, files are looked at again on each use, or the agent kept the right to mount.
func TestAClaimedGVisorSandboxIsAsAColdOne(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	one, two := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	two.Hostname = one.Hostname
	cold, ck := start(t, d, one, driver.GVisor)
	warm, wk := startWarm(t, d, two, driver.GVisor)
	same := func(s string, sb driver.Sandbox, spec driver.Spec) string {
		s = running.ReplaceAllString(s, "")
		s = strings.ReplaceAll(s, "\x00"+enter.Flag, "") // how it was started shows, and is all that does
		return plain(fileServers.ReplaceAllString(s, " /$2"), sb, spec)
	}
	for _, file := range []string{"/proc/self/status", "/proc/1/limits", "/proc/mounts", "/proc/self/mountinfo", "/proc/self/cgroup", "/proc/1/environ",
		"/proc/1/cmdline", "/proc/sys/kernel/hostname", "/proc/self/uid_map", "/proc/filesystems", "/proc/net/dev", "/proc/cpuinfo"} {
		if a, b := same(ask(ck, "read", file), cold, one), same(ask(wk, "read", file), warm, two); a != b {
			t.Errorf("%s differs:\ncold %s\nwarm %s", file, a, b)
		}
	}
	// Not /proc/1/exe: it names the agent in the mount that it was started from.
	for _, link := range []string{"/proc/1/root", "/proc/1/cwd"} {
		if a, b := ask(ck, "link", link), ask(wk, "link", link); a != b {
			t.Errorf("%s is %s, not %s", link, b, a)
		}
	}
	for _, dir := range []string{"/", "/..", "/proc/1/root", "/proc/1/cwd", "/proc/1/root/..", "/dev", "/sys", "/run", "/tmp", "/run/berth"} {
		if a, b := ask(ck, "list", dir), ask(wk, "list", dir); a != b {
			t.Errorf("%s has %q, not %q", dir, b, a)
		}
	}
	for _, m := range append(slices.Clone(maskedPaths), readonlyPaths...) {
		a, b := ask(ck, "list", m)+ask(ck, "write", m+"/x", ""), ask(wk, "list", m)+ask(wk, "write", m+"/x", "")
		if a != b {
			t.Errorf("%s: %q, not %q", m, b, a)
		}
	}
	anchorAlone(t, ck, wk)
	if out := ask(wk, "write", "/etc/of-the-session", "x"); out != "" {
		t.Error(out)
	}
	if _, err := os.Lstat(filepath.Join(two.Disk, "upper/etc/of-the-session")); err != nil {
		t.Errorf("what the session wrote is not on its disk: %v", err)
	}
}

// anchorAlone: of the empty root nothing is left but a plain file that is mapped, by which nothing is reached.
func anchorAlone(t *testing.T, cold, warm *drivertest.Talk) {
	t.Helper()
	for _, fd := range strings.Fields(ask(warm, "list", "/proc/1/fd")) {
		if to := ask(warm, "link", "/proc/1/fd/"+fd); strings.Contains(to, enter.Anchor) || strings.Contains(to, slotPoint) {
			t.Errorf("%s is open", to)
		}
	}
	if a, b := len(strings.Fields(ask(cold, "list", "/proc/1/fd"))), len(strings.Fields(ask(warm, "list", "/proc/1/fd"))); a != b {
		t.Errorf("%d files are open; %d in a cold one", b, a)
	}
	for line := range strings.Lines(ask(warm, "read", "/proc/1/maps")) {
		if strings.Contains(line, enter.Anchor) && !strings.Contains(line, " ---p ") || strings.Contains(line, slotPoint) {
			t.Errorf("a file of the empty root can be used: %s", line)
		}
	}
	if out := ask(warm, "list", "/proc/1/map_files"); !strings.Contains(out, "error") {
		t.Errorf("what is mapped can be opened: %s", out)
	}
}

// A second root, or a root for a sandbox that has one: the agent must refuse.
func TestAClaimedGVisorSandboxEntersNoOtherRoot(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	one, two := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	two.Hostname = one.Hostname
	_, ck := start(t, d, one, driver.GVisor)
	sb, wk := startWarm(t, d, two, driver.GVisor)
	if out := ask(wk, "enter", sb.Enter); strings.Contains(out, "error") {
		t.Errorf("the same root again: %s", out)
	}
	for _, folder := range []string{"/etc", "/run/berth", "/"} {
		if out := ask(wk, "enter", folder); !strings.Contains(out, "error") {
			t.Errorf("it entered %s: %s", folder, out)
		}
		if out := ask(ck, "enter", folder); !strings.Contains(out, "error") {
			t.Errorf("a cold one entered %s: %s", folder, out)
		}
	}
}

// What gVisor can bind only when a sandbox starts is refused, and the sandbox stays warm.
func TestAHostileDiskIsNotClaimedByGVisor(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	spec := h.Spec(t, 1, 1)
	spec.Tier = driver.GVisor
	w := warmFor(spec, driver.GVisor)
	if _, err := d.Prepare(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../../../etc", filepath.Join(spec.Disk, "upper/tmp")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Claim(t.Context(), w.ID, spec); !errs.Is(err, errkind.Unimplemented) {
		t.Errorf("a link at /tmp: %v", err)
	}
	spec.Hostname = "another"
	if why := d.Fits(w, spec); why == "" {
		t.Error("another host name fits")
	}
	if f := only(t, d); f.State != driver.Waiting || f.Session != "" {
		t.Errorf("it is not warm any more: %+v", f)
	}
	if err := d.Stop(t.Context(), w.ID); err != nil {
		t.Error(err)
	}
}
