//go:build linux

package microvm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

func proc(t *testing.T, pid int, file string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func status(t *testing.T, pid int) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(proc(t, pid, "status")) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			out[k] = strings.TrimSpace(v)
		}
	}
	return out
}

// TestQEMUHasNoRights: a machine that took its QEMU over is a user of nothing, in an empty room.
func TestQEMUHasNoRights(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	a, _ := start(t, d, h.Spec(t, 1, 1))
	b, _ := start(t, d, h.Spec(t, 2, 1))
	users := map[string]bool{"0": true}
	for _, sb := range []driver.Sandbox{a, b} {
		s := status(t, sb.PID)
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if strings.Trim(s[set], "0") != "" {
				t.Errorf("%s is %s", set, s[set])
			}
		}
		if s["NoNewPrivs"] != "1" || s["Seccomp"] != "2" || s["Groups"] != "" {
			t.Errorf("no-new-privileges %q, seccomp %q, groups %q", s["NoNewPrivs"], s["Seccomp"], s["Groups"])
		}
		ids := strings.Fields(s["Uid"] + " " + s["Gid"])
		slices.Sort(ids)
		if ids = slices.Compact(ids); len(ids) != 1 || users[ids[0]] {
			t.Errorf("it runs as %v; taken: %v", ids, users)
		}
		users[ids[0]] = true
		for _, ns := range []string{"net", "mnt", "ipc", "uts", "pid"} {
			own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", sb.PID, ns))
			host, herr := os.Readlink("/proc/self/ns/" + ns)
			if err != nil || herr != nil || own == host {
				t.Errorf("namespace %s is the host's: %s, %v, %v", ns, own, err, herr)
			}
		}
		if !strings.Contains(proc(t, sb.PID, "cgroup"), "/"+sb.Cgroup+"/box\n") {
			t.Errorf("it is not in its cgroup: %s", proc(t, sb.PID, "cgroup"))
		}
		limits := proc(t, sb.PID, "limits")
		if !strings.Contains(limits, "Max core file size        0") {
			t.Errorf("it may dump the memory of a session: %s", limits)
		}
	}
}

// TestQEMUSeesNothingOfTheHost: its root holds programs, read-only, and no file of a session; all that
// it writes to was open when it began and is its own.
func TestQEMUSeesNothingOfTheHost(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	spec := h.Spec(t, 1, 1)
	sb, _ := start(t, d, spec)
	root := fmt.Sprintf("/proc/%d/root", sb.PID)
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains([]string{"boot", "dev", "lib", "lib64", "bin", "old", "proc", "usr"}, e.Name()) {
			t.Errorf("it sees /%s", e.Name())
		}
	}
	if left, err := os.ReadDir(root + "/old"); err != nil || len(left) != 0 {
		t.Errorf("it sees the host's root: %v, %v", left, err)
	}
	for line := range strings.Lines(proc(t, sb.PID, "mountinfo")) {
		f := strings.Fields(line)
		point, options := f[4], strings.Split(f[5], ",")
		device := strings.HasPrefix(point, "/dev/")
		if !slices.Contains(options, "ro") && point != "/proc" && !device || !slices.Contains(options, "nosuid") {
			t.Errorf("mount %s: %s", point, f[5])
		}
		for _, word := range []string{string(sb.Session), h.dir, h.cfg.State + "/vms"} {
			if strings.Contains(line, word) {
				t.Errorf("a mount names a session: %s", line)
			}
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", sb.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", sb.PID, fd.Name()))
		if err != nil || !strings.HasPrefix(to, "/") || strings.HasPrefix(to, "/memfd:") || strings.HasPrefix(to, "/dev/") {
			continue
		}
		if strings.HasSuffix(to, "/net/tun") { // the tap of its card; which one, see TestTheNamespaceOfAMachineLeadsNowhere
			continue
		}
		if !slices.Contains([]string{spec.DiskImage, h.image}, to) && !strings.HasPrefix(to, "/usr/") && !strings.HasPrefix(to, "/boot/") {
			t.Errorf("it holds %s", to)
		}
	}
	for _, dir := range []string{d.room(sb.ID), d.folder(sb.ID)} {
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
			t.Errorf("%s is open to others: %v, %v", filepath.Base(dir), st, err)
		}
	}
}

// TestUsersAreSharedByDrivers: two host agents of one machine never give two QEMUs one user.
func TestUsersAreSharedByDrivers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "users")
	a, b := users{dir, "a", 1000, 3}, users{dir, "b", 1000, 3}
	for _, u := range []users{a, b} {
		if err := u.recall(nil); err != nil {
			t.Fatal(err)
		}
	}
	one, _ := a.take()
	two, _ := b.take()
	three, err := a.take()
	if err != nil || one == two || two == three || one == three {
		t.Fatalf("got %d, %d, %d, %v", one, two, three, err)
	}
	if _, err := b.take(); err == nil {
		t.Error("a fourth user of three")
	}
	b.give(one) // not its own
	if _, err := b.take(); err == nil {
		t.Error("it gave away another's user")
	}
	if err := a.recall(map[int]bool{three: true}); err != nil { // a restart with one sandbox left
		t.Fatal(err)
	}
	if got, err := b.take(); err != nil || got != one {
		t.Errorf("got %d, %v, want %d", got, err, one)
	}
}
