package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

func (s *suite) namespaces(t *testing.T) {
	d := s.open(t)
	a, ka := s.start(t, d, 1, 1)
	b, kb := s.start(t, d, 2, 1)
	if s.tier == driver.Container {
		kinds := []string{"pid", "ipc", "uts", "net", "mnt", "cgroup", "user"}
		for _, kind := range kinds {
			one, two := nsOf(t, a.PID, kind), nsOf(t, b.PID, kind)
			if host := nsOf(t, os.Getpid(), kind); one == two || one == host || two == host {
				t.Errorf("namespace %s: host %s, sandboxes %s and %s", kind, host, one, two)
			}
		}
	}
	for _, k := range []*Talk{ka, kb} {
		if self := k.must(t, "link", "/proc/self"); self != "1" {
			t.Errorf("the first process is %s", self)
		}
	}
	if one, two := ka.must(t, "hostname"), kb.must(t, "hostname"); one == two {
		t.Errorf("both are called %s", one)
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

// forbiddenCaps reach devices, the network or the kernel: net_admin, net_raw, sys_module,
// sys_rawio, sys_ptrace, sys_admin, sys_boot, sys_time, mknod, mac_admin, syslog, perfmon, bpf.
var forbiddenCaps = []uint{12, 13, 16, 17, 19, 21, 22, 25, 27, 33, 34, 38, 39}

func (s *suite) privileges(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	status := fields(k.must(t, "read", "/proc/self/status"))
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
	if s.tier == driver.Container {
		if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" {
			t.Errorf("no-new-privileges %q, seccomp %q", status["NoNewPrivs"], status["Seccomp"])
		}
		host := fields(readHost(t, fmt.Sprintf("/proc/%d/status", sb.PID)))
		if uid := strings.Fields(host["Uid"])[0]; uid == "0" {
			t.Error("root inside is root outside")
		}
	}
	for _, what := range []string{"mount", "mknod", "raw", "userns", "keyring", "sysctl", "reboot"} {
		if _, err := k.Do("try", what); err == nil {
			t.Errorf("it may %s", what)
		}
	}
	k.must(t, "thread")
	for _, family := range []string{"1", "2", "10", "16"} { // unix, inet, inet6, netlink
		if _, err := k.Do("try", "socket", family); err != nil {
			t.Errorf("no socket of family %s: %v", family, err)
		}
	}
	for _, family := range []string{"9", "21", "29", "30", "31", "38", "40", "44"} { // x25, rds, can, tipc, bluetooth, alg, vsock, xdp
		if _, err := k.Do("try", "socket", family); err == nil {
			t.Errorf("it may make a socket of family %s", family)
		} else if s.tier == driver.Container && !strings.Contains(err.Error(), "not permitted") {
			t.Errorf("a socket of family %s reaches the kernel: %v", family, err)
		}
	}
	for _, path := range []string{"/proc/kcore", "/proc/keys", "/sys/firmware/x", "/dev/mem", "/dev/loop0", "/dev/kmsg"} {
		if out, err := k.Do("read", path); err == nil && out != "" {
			t.Errorf("it reads %s", path)
		}
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

func (s *suite) hostPaths(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	if err := os.WriteFile(filepath.Join(spec.RunDir, "session.json"), []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	if got := k.must(t, "read", "/run/berth/session.json"); got != "one" {
		t.Errorf("session.json says %q", got)
	}
	next := filepath.Join(spec.RunDir, ".next")
	if err := os.WriteFile(next, []byte("two"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, filepath.Join(spec.RunDir, "session.json")); err != nil {
		t.Fatal(err)
	}
	if got := k.must(t, "read", "/run/berth/session.json"); got != "two" {
		t.Errorf("a changed session.json says %q", got)
	}
	for _, path := range []string{"/run/berth/x", "/run/berth/session.json", "/proc/sys/kernel/hostname", "/sys/x", "/proc/sysrq-trigger"} {
		if _, err := k.Do("write", path, "x"); err == nil {
			t.Errorf("%s is writable", path)
		}
	}
	// What it writes to its root is not in the image.
	k.must(t, "write", "/etc/mine", "x")
	if _, err := os.Lstat(filepath.Join(spec.Image.Lower, "etc/mine")); err == nil {
		t.Error("it wrote into the image")
	}
}

func (s *suite) network(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	if got := k.must(t, "netifs"); got != "lo" && got != "" {
		t.Errorf("network interfaces: %s", got)
	}
	if _, err := k.Do("try", "dial"); err == nil {
		t.Error("it reached the network")
	}
}

func (s *suite) neighbours(t *testing.T) {
	d := s.open(t)
	secret := "MARK=4711-of-the-first"
	spec := s.spec(t, 1, 1)
	spec.Env = append(spec.Env, secret)
	a := s.create(t, d, spec)
	ka := s.talk(t, a)
	if !slices.Contains(strings.Split(ka.must(t, "env"), "\n"), secret) {
		t.Error("its own environment is missing")
	}
	_, kb := s.start(t, d, 2, 1)
	for _, dir := range []string{"/tmp", "/run", "/dev/shm", "/etc", "/var"} {
		ka.must(t, "write", dir+"/first", "mine")
		if _, err := kb.Do("read", dir+"/first"); err == nil {
			t.Errorf("%s is shared", dir)
		}
	}
	pids := 0
	for _, name := range strings.Split(kb.must(t, "list", "/proc"), "\n") {
		if _, err := strconv.Atoi(name); err != nil {
			continue
		}
		pids++
		env, _ := kb.Do("read", "/proc/"+name+"/environ")
		if strings.Contains(env, secret) {
			t.Errorf("process %s shows the other's environment", name)
		}
	}
	if pids != 1 {
		t.Errorf("it sees %d processes", pids)
	}
	host, _ := os.Hostname()
	if got := kb.must(t, "hostname"); got == host {
		t.Error("it has the host's name")
	}
	for _, path := range []string{"/proc/self/mountinfo", "/proc/mounts", "/proc/self/cgroup"} {
		if out, err := kb.Do("read", path); err == nil && strings.Contains(out, string(a.ID)) {
			t.Errorf("%s names the other sandbox", path)
		}
	}
}

func (s *suite) persists(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	k.must(t, "write", "/etc/mine", "kept")
	k.must(t, "remove", "/etc/doomed")
	k.must(t, "remove", "/opt/folder")
	k.must(t, "write", "/etc/changed", "by me")
	s.stop(t, d, sb)
	for tier, caps := range s.all { // a disk moves between tiers
		if caps.Absent != "" || !caps.Disk || caps.RawDisk != s.caps.RawDisk {
			continue
		}
		sub := &suite{host: s.host, tier: tier, caps: caps, all: s.all}
		sb, k := sub.start(t, d, 1, 2)
		if got := k.must(t, "read", "/etc/mine"); got != "kept" {
			t.Errorf("%s: the file says %q", tier, got)
		}
		if got := k.must(t, "read", "/etc/changed"); got != "by me" {
			t.Errorf("%s: the changed file says %q", tier, got)
		}
		for _, path := range []string{"/etc/doomed", "/opt/folder"} {
			if _, err := k.Do("stat", path); err == nil {
				t.Errorf("%s: the deleted %s is back", tier, path)
			}
		}
		s.stop(t, d, sb)
	}
}

func (s *suite) owners(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	k.must(t, "write", "/etc/owned", "x")
	k.must(t, "chown", "/etc/owned", "1234")
	if got := k.must(t, "stat", "/etc/owned"); !strings.HasPrefix(got, "1234:1234 ") {
		t.Errorf("inside it belongs to %s", got)
	}
	if got := k.must(t, "stat", "/etc/changed"); !strings.HasPrefix(got, "0:0 ") {
		t.Errorf("a file of the image belongs to %s", got)
	}
	s.stop(t, d, sb)
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(spec.Disk, "upper/etc/owned"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Uid != 1234 || st.Gid != 1234 {
		t.Errorf("on disk it belongs to %d:%d", st.Uid, st.Gid)
	}
}

func (s *suite) setuid(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	if got, err := k.Do("setuid", "/usr/suid"); err == nil && got != "1000" {
		t.Errorf("a set-user-id program became user %s", got)
	}
	if got := k.must(t, "stat", "/usr/suid"); !strings.HasSuffix(got, " 4755") {
		t.Errorf("its mode is %s", got)
	}
	s.stop(t, d, sb)
	// The bit is the session's to keep, and worth nothing on the host.
	var fs unix.Statfs_t
	if err := unix.Statfs(spec.Disk, &fs); err != nil || fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 {
		t.Errorf("the disk is mounted on the host with flags %#x, %v", fs.Flags, err)
	}
}

func (s *suite) memory(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	limit := int(s.spec(t, 1, 1).Limits.MemoryBytes >> 20)
	k.must(t, "spawn", "alloc", strconv.Itoa(limit/4))
	events := make(<-chan driver.Event)
	if w, ok := d.(driver.Watcher); ok {
		var cancel func()
		events, cancel = watch(t, w)
		defer cancel()
	}
	out, err := k.Do("spawn", "alloc", strconv.Itoa(limit*2))
	if err == nil {
		t.Fatalf("it took %s bytes, twice its limit", out)
	}
	if s.tier == driver.Container {
		k.must(t, "echo", "the first process lives")
	}
	if _, ok := d.(driver.Watcher); !ok {
		return
	}
	for c := ctx(t); ; {
		select {
		case e := <-events:
			if e.ID == sb.ID && e.Kind == driver.EventOOM {
				return
			}
		case <-c.Done():
			t.Fatal("running out of memory was not told")
		}
	}
}

func (s *suite) processes(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	limit := int(s.spec(t, 1, 1).Limits.PIDs)
	n, err := strconv.Atoi(k.must(t, "fork", "1000"))
	if err != nil || n >= max(limit, 400) {
		t.Errorf("it started %d processes with a limit of %d, %v", n, limit, err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", sb.PID)); err != nil {
		t.Errorf("the first process died of its limit: %v", err)
	}
	s.stop(t, d, sb)
}

func (s *suite) cpu(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	spec.Limits.CPUMillis = 200
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	m, ok := d.(driver.Meter)
	if !ok {
		t.Skip("skipped by capability: it is no Meter")
	}
	before, err := m.Stats(ctx(t), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	k.must(t, "spawn", "burn", "2000") // the guest's own account of its time is not asked
	after, err := m.Stats(ctx(t), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if share := float64(after.CPU-before.CPU) / float64(time.Since(began)); share > 0.3 || share < 0.01 {
		t.Errorf("it got %.2f of a core with a limit of 0.20", share)
	}
}
