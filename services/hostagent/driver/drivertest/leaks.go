package drivertest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// leaks looks for what gets into a sandbox without being its own: open files of the host, words of
// the host's environment, writable mounts from outside, and the names of another session.
func (s *suite) leaks(t *testing.T) {
	d := s.open(t)
	other := s.spec(t, 1, 1)
	s.create(t, d, other)
	spec := s.spec(t, 2, 1)
	spec.Env = append(spec.Env, "OWN=1")
	k := s.talk(t, s.create(t, d, spec))

	for _, fd := range strings.Fields(k.must(t, "list", "/proc/self/fd")) {
		to, err := k.Do("link", "/proc/self/fd/"+fd)
		if err != nil { // the one that read the list
			continue
		}
		if strings.HasPrefix(to, "/") && to != "/dev/null" || strings.HasPrefix(to, "socket:") {
			t.Errorf("open file %s of the first process is %s", fd, to)
		}
	}
	own := append([]string{"PATH", "HOME"}, spec.Env...)
	for _, v := range strings.Split(k.must(t, "env"), "\n") {
		name, _, _ := strings.Cut(v, "=")
		if !slices.Contains(own, name) && !slices.Contains(own, v) {
			t.Errorf("its environment holds %s, which nobody asked for", name)
		}
	}
	for _, m := range strings.Split(strings.TrimSpace(k.must(t, "read", "/proc/mounts")), "\n") {
		f := strings.Fields(m)
		fresh := slices.Contains([]string{"tmpfs", "proc", "devpts", "mqueue", "dev", "sysfs"}, f[2]) // made for it alone
		device := f[2] == "devtmpfs" && (strings.HasPrefix(f[1], "/dev/") || strings.HasPrefix(f[1], "/proc/"))
		if rw := strings.HasPrefix(f[3], "rw"); rw && f[1] != "/" && !fresh && !device {
			t.Errorf("a mount from outside is writable: %s", m)
		}
	}
	for _, name := range []string{string(other.Session), string(other.ID()), other.Disk} {
		for _, below := range []string{"/proc", "/sys/devices/virtual", "/sys/block", "/sys/fs", "/run", "/dev"} {
			if found, err := k.Do("find", below, name); err != nil || found != "" {
				t.Errorf("the name of another session, its sandbox or its disk is below %s: %s %v", below, found, err)
			}
		}
	}
	if found := k.must(t, "find", "/proc/1", "OWN=1"); found == "" {
		t.Error("the search finds nothing at all")
	}
	// What disks do is a neighbour's business.
	for _, path := range []string{"/proc/diskstats", "/proc/partitions", "/sys/block", "/sys/fs/ext4", "/proc/fs/ext4", "/proc/fs/jbd2"} {
		list, _ := k.Do("list", path)
		text, _ := k.Do("read", path)
		if list+text != "" {
			t.Errorf("%s tells of the host's disks: %s", path, fmt.Sprintf("%.80s", list+text))
		}
	}
}
