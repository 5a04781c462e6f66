package drivertest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// persists: files that are lost on a later wake.
func (s *suite) persists(t *testing.T) {
	d := s.open(t)
	for n := range 3 {
		sb, k := s.start(t, d, 1, uint64(n+1))
		for i := range n {
			if got := k.must(t, "read", "/etc/mine"+itoa(i)); got != "kept"+itoa(i) {
				t.Errorf("in life %d, file %d says %q", n+1, i, got)
			}
		}
		k.must(t, "write", "/etc/mine"+itoa(n), "kept"+itoa(n))
		k.must(t, "write", "/etc/changed", "in life "+itoa(n))
		s.stop(t, d, sb)
	}
}

// deleted: files of the image that a session removed and that come back.
func (s *suite) deleted(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	k.must(t, "remove", "/etc/doomed")
	k.must(t, "remove", "/opt/folder")
	k.must(t, "write", "/etc/changed", "by me")
	s.stop(t, d, sb)
	s.sameDisk(t, d, func(t *testing.T, tier driver.Tier, k *Talk) {
		if got := k.must(t, "read", "/etc/changed"); got != "by me" {
			t.Errorf("%s: the changed file says %q", tier, got)
		}
		for _, path := range []string{"/etc/doomed", "/opt/folder"} {
			if _, err := k.Do("stat", path); err == nil {
				t.Errorf("%s: the deleted %s is back", tier, path)
			}
		}
	})
}

// sameDisk runs look in every tier of the driver that takes the session's disk as this one does.
func (s *suite) sameDisk(t *testing.T, d driver.Driver, look func(*testing.T, driver.Tier, *Talk)) {
	t.Helper()
	for tier, caps := range s.all {
		if caps.Absent != "" || !caps.Disk || caps.RawDisk != s.caps.RawDisk || caps.Native != s.caps.Native {
			continue
		}
		sub := &suite{host: s.host, tier: tier, caps: caps, all: s.all}
		sb, k := sub.start(t, d, 1, 2)
		look(t, tier, k)
		s.stop(t, d, sb)
	}
}

// moves: a disk that is another one after the session moved to another wall.
func (s *suite) moves(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	k.must(t, "write", "/etc/mine", "kept")
	k.must(t, "mkdir", "/opt/mine/below")
	k.must(t, "write", "/opt/mine/below/file", "deep")
	target := "/etc/mine"
	if !s.caps.Native { // a module may make no link to an absolute path
		target = "../../etc/mine"
	}
	k.must(t, "symlink", target, "/opt/mine/link")
	s.stop(t, d, sb)
	s.sameDisk(t, d, func(t *testing.T, tier driver.Tier, k *Talk) {
		for path, want := range map[string]string{"/etc/mine": "kept", "/opt/mine/below/file": "deep", "/opt/mine/link": "kept"} {
			if got := k.must(t, "read", path); got != want {
				t.Errorf("%s: %s says %q", tier, path, got)
			}
		}
		if got := k.must(t, "link", "/opt/mine/link"); got != target {
			t.Errorf("%s: the link leads to %q", tier, got)
		}
	})
}

// owners: files that belong to somebody else after a wake, or to a user of the host.
func (s *suite) owners(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	k.must(t, "write", "/etc/owned", "x")
	k.must(t, "chown", "/etc/owned", "1234")
	if got := k.must(t, "stat", "/etc/changed"); !strings.HasPrefix(got, "0:0 ") {
		t.Errorf("a file of the image belongs to %s", got)
	}
	s.stop(t, d, sb)
	s.sameDisk(t, d, func(t *testing.T, tier driver.Tier, k *Talk) {
		if got := k.must(t, "stat", "/etc/owned"); !strings.HasPrefix(got, "1234:1234 ") {
			t.Errorf("%s: inside it belongs to %s", tier, got)
		}
	})
	if s.caps.RawDisk {
		return // nobody on the host looks into it
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(spec.Disk, "upper/etc/owned"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Uid != 1234 || st.Gid != 1234 {
		t.Errorf("on disk it belongs to %d:%d", st.Uid, st.Gid)
	}
}

// diskIsHarmless: a program or a device on a session's disk that works on the host.
func (s *suite) diskIsHarmless(t *testing.T) {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.pair.one.Disk, &fs); err != nil || fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 {
		t.Errorf("the disk is mounted on the host with flags %#x, %v", fs.Flags, err)
	}
}

// killedKeeps: synced files that are lost because the compute was killed.
func (s *suite) killedKeeps(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	k.must(t, "sync", "/var/synced", "3")
	want := k.must(t, "sum", "/var/synced")
	s.kill(t, sb)
	s.stop(t, d, sb)
	_, k = s.start(t, d, 1, 2)
	if got := k.must(t, "sum", "/var/synced"); got != want {
		t.Errorf("before the kill %s, after it %s", want, got)
	}
}

// lyingDisk: a disk on which a folder that the host mounts on is a link to somewhere on the host.
func (s *suite) lyingDisk(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "secret"), []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tmp", "run", "proc", "sys", "dev"} {
		link := filepath.Join(spec.Disk, "upper", name)
		_ = os.RemoveAll(link)
		if err := os.Symlink(outside, link); err != nil {
			t.Fatal(err)
		}
	}
	sb, err := d.Create(ctx(t), spec)
	if err == nil { // links are looked up inside, or replaced; a refusal is right as well
		k := s.talk(t, sb)
		for _, path := range []string{"/tmp/secret", "/run/secret", "/proc/secret", filepath.Join(outside, "secret")} {
			if got, err := k.Do("read", path); err == nil && strings.Contains(got, "of the host") {
				t.Errorf("it reads the host's file at %s", path)
			}
		}
	}
	if err := d.Stop(ctx(t), spec.ID()); err != nil {
		t.Errorf("stop: %v", err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("the host's folder holds %v, %v", entries, err)
	}
	s.nothing(t, d, nil)
}

// brokenDisk: a disk image that is no file system, which hangs the start or leaves a part of it.
func (s *suite) brokenDisk(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	f, err := os.OpenFile(spec.DiskImage, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(strings.Repeat("\xff", 1<<20)), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(ctx(t), spec); err == nil {
		t.Error("a sandbox runs on a disk that is none")
	} else if strings.Contains(err.Error(), "\n") {
		t.Errorf("not one sentence: %v", err)
	}
	s.nothing(t, d, before)
}
