package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// namespaces: a sandbox that shares a view of the machine with the host or with a neighbour.
func (s *suite) namespaces(t *testing.T) {
	for _, kind := range []string{"pid", "ipc", "uts", "net", "mnt", "cgroup", "user"} {
		one, two := nsOf(t, s.pair.a.PID, kind), nsOf(t, s.pair.b.PID, kind)
		if host := nsOf(t, os.Getpid(), kind); one == two || one == host || two == host {
			t.Errorf("namespace %s: host %s, sandboxes %s and %s", kind, host, one, two)
		}
	}
}

func nsOf(t *testing.T, pid int, kind string) string {
	t.Helper()
	l, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// alone: a sandbox that sees processes which are not its own.
func (s *suite) alone(t *testing.T) {
	pids := 0
	for _, name := range strings.Split(s.pair.kb.must(t, "list", "/proc"), "\n") {
		if _, err := strconv.Atoi(name); err == nil {
			pids++
		}
	}
	if pids != 1 {
		t.Errorf("it sees %d processes", pids)
	}
	if self := s.pair.ka.must(t, "link", "/proc/self"); self != "1" {
		t.Errorf("the first process is %s", self)
	}
}

// forbiddenCaps reach devices, the network or the kernel: net_admin, net_raw, sys_module,
// sys_rawio, sys_ptrace, sys_admin, sys_boot, sys_time, mknod, mac_admin, syslog, perfmon, bpf.
var forbiddenCaps = []uint{12, 13, 16, 17, 19, 21, 22, 25, 27, 33, 34, 38, 39}

// capabilities: root inside that holds a right over the kernel, which all sandboxes share.
func (s *suite) capabilities(t *testing.T) {
	status := fields(s.pair.ka.must(t, "read", "/proc/self/status"))
	for _, set := range []string{"CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"} {
		caps, err := strconv.ParseUint(status[set], 16, 64)
		if err != nil {
			t.Errorf("%s is %q", set, status[set])
			continue
		}
		for _, c := range forbiddenCaps {
			if caps&(1<<c) != 0 {
				t.Errorf("%s holds capability %d", set, c)
			}
		}
	}
}

// noNewPrivileges: a program that gets more rights than who runs it, or system calls that no filter sees.
func (s *suite) noNewPrivileges(t *testing.T) {
	status := fields(s.pair.ka.must(t, "read", "/proc/self/status"))
	if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" {
		t.Errorf("no-new-privileges %q, seccomp %q", status["NoNewPrivs"], status["Seccomp"])
	}
}

// nobodyOutside: root inside that is root, or another session's user, outside.
func (s *suite) nobodyOutside(t *testing.T) {
	uids := map[string]bool{}
	for _, pid := range []int{s.pair.a.PID, s.pair.b.PID} {
		for _, what := range []string{"Uid", "Gid"} {
			id := strings.Fields(fields(readHost(t, fmt.Sprintf("/proc/%d/status", pid)))[what])
			if slices.Contains(id, "0") {
				t.Errorf("root inside is %s %v outside", what, id)
			}
			if uids[what+id[0]] {
				t.Errorf("two sandboxes run as one user of the host: %v", id)
			}
			uids[what+id[0]] = true
		}
		for _, file := range []string{"uid_map", "gid_map"} {
			for _, line := range strings.Split(strings.TrimSpace(readHost(t, fmt.Sprintf("/proc/%d/%s", pid, file))), "\n") {
				if f := strings.Fields(line); len(f) != 3 || f[1] == "0" {
					t.Errorf("%s maps %q", file, line)
				}
			}
		}
	}
}

// forbiddenCalls: a call with which root inside changes the kernel, or reaches past its wall.
func (s *suite) forbiddenCalls(t *testing.T) {
	for _, what := range []string{"mount", "raw", "userns", "sysctl", "reboot", "settime", "module", "kexec", "bpf", "perf", "pivot", "swapon", "klog", "iopl", "handle"} {
		if _, err := s.pair.ka.Do("try", what); err == nil {
			t.Errorf("it may %s", what)
		}
	}
	s.pair.ka.must(t, "thread")
}

// keyring: keys that all sandboxes of a user share.
func (s *suite) keyring(t *testing.T) {
	if _, err := s.pair.ka.Do("try", "keyring"); err == nil {
		t.Error("it reaches the kernel's keys")
	}
}

// families: a kind of socket that reaches the kernel's seldom used parts, or one that is missing for
// ordinary programs.
func (s *suite) families(t *testing.T) {
	for _, family := range []string{"1", "2", "10", "16"} { // unix, inet, inet6, netlink
		if _, err := s.pair.ka.Do("try", "socket", family); err != nil {
			t.Errorf("no socket of family %s: %v", family, err)
		}
	}
	for _, family := range []string{"9", "21", "29", "30", "31", "38", "40", "44"} { // x25, rds, can, tipc, bluetooth, alg, vsock, xdp
		if _, err := s.pair.ka.Do("try", "socket", family); err == nil {
			t.Errorf("it may make a socket of family %s", family)
		} else if s.caps.UserNamespace && !strings.Contains(err.Error(), "not permitted") {
			t.Errorf("a socket of family %s reaches the kernel: %v", family, err)
		}
	}
}

// masked: files of the kernel that tell its secrets.
func (s *suite) masked(t *testing.T) {
	for _, path := range []string{"/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware/x", "/sys/kernel/security/x",
		"/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/proc/kmsg", "/proc/acpi/x", "/proc/scsi/scsi", "/sys/kernel/debug/x", "/proc/kpagecount"} {
		if out, err := s.pair.ka.Do("read", path); err == nil && strings.TrimSpace(out) != "" {
			t.Errorf("it reads %s: %.60q", path, out)
		}
	}
}

// readOnly: a file of the kernel or of the host that a sandbox changes for all.
func (s *suite) readOnly(t *testing.T) {
	for _, path := range []string{"/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
		"/proc/irq/default_smp_affinity", "/sys/x", "/sys/kernel/mm/ksm/run", "/sys/power/state", "/sys/fs/cgroup/x", "/proc/1/oom_score_adj_"} {
		if _, err := s.pair.ka.Do("write", path, "1"); err == nil {
			t.Errorf("%s is writable", path)
		}
	}
}

// runFolder: what the host hands in, changed by a session; or news that the host hands in and that do
// not appear.
func (s *suite) runFolder(t *testing.T) {
	k, dir := s.pair.ka, s.pair.one.RunDir
	for _, text := range []string{"one", "two"} {
		next := filepath.Join(dir, ".next")
		if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, filepath.Join(dir, "session.json")); err != nil {
			t.Fatal(err)
		}
		if got := k.must(t, "read", "/run/berth/session.json"); got != text {
			t.Errorf("session.json says %q, not %q", got, text)
		}
	}
	for _, path := range []string{"/run/berth/x", "/run/berth/session.json"} {
		if _, err := k.Do("write", path, "x"); err == nil {
			t.Errorf("%s is writable", path)
		}
	}
	if _, err := k.Do("remove", "/run/berth/session.json"); err == nil {
		t.Error("it removed what the host handed in")
	}
}

// imageIsNobodys: a session that writes into the image that all sessions share.
func (s *suite) imageIsNobodys(t *testing.T) {
	s.pair.ka.must(t, "write", "/etc/into-image", "x")
	s.pair.ka.must(t, "write", "/etc/changed-by-one", "x")
	if _, err := os.Lstat(filepath.Join(s.pair.one.Image.Lower, "etc/into-image")); err == nil {
		t.Error("it wrote into the image")
	}
	if _, err := s.pair.kb.Do("read", "/etc/into-image"); err == nil {
		t.Error("another session reads what it wrote to its root")
	}
}

// devices: a device of the host inside, or one that root inside makes for itself.
func (s *suite) devices(t *testing.T) {
	known := []string{"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "mqueue", "fd", "stdin", "stdout", "stderr", "core", "net", "fuse", "first", "char", "block"}
	for _, name := range strings.Fields(s.pair.kb.must(t, "list", "/dev")) {
		if !slices.Contains(known, name) && !strings.HasPrefix(name, ".") {
			t.Errorf("it has the device %s", name)
		}
	}
	for _, path := range []string{"/disk", "/dev/disk", "/tmp/disk"} {
		if _, err := s.pair.ka.Do("mknod", path, itoa(7<<8)); err != nil {
			continue
		}
		if out, err := s.pair.ka.Do("read", path); err == nil && out != "" {
			t.Errorf("it made a block device at %s and reads it", path)
		}
	}
	for _, name := range []string{"/dev/loop0", "/dev/loop-control", "/dev/kvm", "/dev/sda", "/dev/vda", "/dev/mapper/control", "/dev/net/tun"} {
		if name == "/dev/net/tun" && !s.caps.UserNamespace {
			continue // a kernel between it and the host's may have one of its own
		}
		if _, err := s.pair.ka.Do("open", name); err == nil {
			t.Errorf("it opens %s", name)
		}
	}
}

// setuid: a file on the disk that makes its user somebody else.
func (s *suite) setuid(t *testing.T) {
	if got, err := s.pair.ka.Do("setuid", "/usr/suid"); err == nil && got != "1000" {
		t.Errorf("a set-user-id program became user %s", got)
	}
	if got := s.pair.ka.must(t, "stat", "/usr/suid"); !strings.HasSuffix(got, " 4755") {
		t.Errorf("its mode is %s; the bit is the session's to keep", got)
	}
}

func readHost(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func fields(status string) map[string]string {
	out := map[string]string{}
	for _, l := range strings.Split(status, "\n") {
		if k, v, ok := strings.Cut(l, ":"); ok {
			out[k] = strings.TrimSpace(v)
		}
	}
	return out
}
