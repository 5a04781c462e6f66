package drivertest

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// filesApart: a folder that two sandboxes share.
func (s *suite) filesApart(t *testing.T) {
	for _, dir := range []string{"/tmp", "/run", "/dev/shm", "/etc", "/var"} {
		s.pair.ka.must(t, "write", dir+"/"+s.pair.file, "mine")
		if _, err := s.pair.kb.Do("read", dir+"/"+s.pair.file); err == nil {
			t.Errorf("%s is shared", dir)
		}
		s.pair.ka.must(t, "remove", dir+"/"+s.pair.file)
	}
}

// environmentsApart: a secret in one session's environment that another reads from its process list.
func (s *suite) environmentsApart(t *testing.T) {
	if !slices.Contains(strings.Split(s.pair.ka.must(t, "env"), "\n"), s.pair.secret) {
		t.Error("its own environment is missing")
	}
	for _, name := range strings.Split(s.pair.kb.must(t, "list", "/proc"), "\n") {
		if _, err := strconv.Atoi(name); err != nil {
			continue
		}
		if env, _ := s.pair.kb.Do("read", "/proc/"+name+"/environ"); strings.Contains(env, s.pair.secret) {
			t.Errorf("process %s shows the other's environment", name)
		}
	}
}

// onlyGiven: a word of the host's environment, and perhaps a secret, inside a sandbox.
func (s *suite) onlyGiven(t *testing.T) {
	own := append([]string{"PATH", "HOME", "TERM", "HOSTNAME"}, s.pair.two.Env...)
	own = append(own, s.pair.two.Image.Env...)
	for _, v := range strings.Split(s.pair.kb.must(t, "env"), "\n") {
		name, _, _ := strings.Cut(v, "=")
		if v != "" && !slices.Contains(own, name) && !slices.Contains(own, v) {
			t.Errorf("its environment holds %s, which nobody asked for", name)
		}
	}
	if got := s.pair.kb.must(t, "env"); !strings.Contains(got, "OWN=1") {
		t.Errorf("what it was given is missing: %q", got)
	}
}

// noFiles: a file of the host that the first process has open without knowing it.
func (s *suite) noFiles(t *testing.T) {
	for _, fd := range strings.Fields(s.pair.kb.must(t, "list", "/proc/self/fd")) {
		to, err := s.pair.kb.Do("link", "/proc/self/fd/"+fd)
		if err != nil { // the one that read the list
			continue
		}
		if strings.HasPrefix(to, "/") && to != "/dev/null" || strings.HasPrefix(to, "socket:") {
			t.Errorf("open file %s of the first process is %s", fd, to)
		}
	}
}

// mountsFromOutside: a folder of the host that can be written from inside.
func (s *suite) mountsFromOutside(t *testing.T) {
	for _, m := range strings.Split(strings.TrimSpace(s.pair.kb.must(t, "read", "/proc/mounts")), "\n") {
		f := strings.Fields(m)
		fresh := slices.Contains([]string{"tmpfs", "proc", "devpts", "mqueue", "dev", "sysfs"}, f[2]) // made for it alone
		device := f[2] == "devtmpfs" && (strings.HasPrefix(f[1], "/dev/") || strings.HasPrefix(f[1], "/proc/"))
		if rw := strings.HasPrefix(f[3], "rw"); rw && f[1] != "/" && !fresh && !device {
			t.Errorf("a mount from outside is writable: %s", m)
		}
	}
}

// names: the name of another session, of its sandbox or of its disk, which its files and its network go by.
func (s *suite) names(t *testing.T) {
	names := slices.DeleteFunc([]string{string(s.pair.one.Session), string(s.pair.a.ID), s.pair.one.Disk, s.pair.one.DiskImage},
		func(name string) bool { return name == "" })
	for _, below := range []string{"/proc", "/sys/devices/virtual", "/sys/block", "/sys/fs", "/run", "/dev"} {
		if found, err := s.pair.kb.Do("find", append([]string{below}, names...)...); err != nil || found != "" {
			t.Errorf("the name of another session, its sandbox or its disk is below %s: %s %v", below, found, err)
		}
	}
	if found := s.pair.kb.must(t, "find", "/proc/self", "OWN=1"); found == "" {
		t.Error("the search finds nothing at all")
	}
}

// disksOfHost: what the host's disks do, which is a neighbour's business.
func (s *suite) disksOfHost(t *testing.T) {
	for _, path := range []string{"/proc/diskstats", "/proc/partitions", "/sys/block", "/sys/fs/ext4", "/proc/fs/ext4", "/proc/fs/jbd2"} {
		list, _ := s.pair.kb.Do("list", path)
		text, _ := s.pair.kb.Do("read", path)
		if list+text != "" {
			t.Errorf("%s tells of the host's disks: %s", path, fmt.Sprintf("%.80s", list+text))
		}
	}
}

// hostnames: the host's name inside, or one name for two.
func (s *suite) hostnames(t *testing.T) {
	host, _ := os.Hostname()
	one, two := s.pair.ka.must(t, "hostname"), s.pair.kb.must(t, "hostname")
	if one == two || one == host || two == host {
		t.Errorf("the host is called %q, its sandboxes %q and %q", host, one, two)
	}
	if one != s.pair.one.Hostname {
		t.Errorf("it was given the name %q and is called %q", s.pair.one.Hostname, one)
	}
}

// clock: a sandbox that begins in the past, as one that was copied from an earlier one does.
func (s *suite) clock(t *testing.T) {
	for _, k := range []*Talk{s.pair.ka, s.pair.kb} {
		before := time.Now().UnixMilli()
		at, err := strconv.ParseInt(k.must(t, "clock"), 10, 64)
		if after := time.Now().UnixMilli(); err != nil || at < before-2000 || at > after+2000 {
			t.Errorf("its clock says %d, the host's %d: %v", at, before, err)
		}
	}
}

// random: two sandboxes that draw the same random numbers, as copies of one machine do.
func (s *suite) random(t *testing.T) {
	seen := map[string]bool{}
	for range 3 {
		for _, k := range []*Talk{s.pair.ka, s.pair.kb} {
			r := k.must(t, "random")
			if seen[r] || len(r) < 64 {
				t.Errorf("the random number %q was drawn twice, or is short", r)
			}
			seen[r] = true
		}
	}
}

// bootIDs: a number by which two sandboxes find out that they run on one machine.
func (s *suite) bootIDs(t *testing.T) {
	for _, path := range []string{"/proc/sys/kernel/random/boot_id", "/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid",
		"/sys/class/dmi/id/product_serial", "/sys/class/dmi/id/board_serial", "/sys/hypervisor/uuid"} {
		one, _ := s.pair.ka.Do("read", path)
		two, _ := s.pair.kb.Do("read", path)
		one, two = strings.TrimSpace(one), strings.TrimSpace(two)
		host, _ := os.ReadFile(path)
		if one != "" && (one == two || one == strings.TrimSpace(string(host))) {
			t.Errorf("%s is the host's, or the same for two: %s", path, one)
		}
	}
}
