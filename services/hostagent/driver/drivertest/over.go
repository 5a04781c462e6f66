package drivertest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	overName   = "of-the-host"
	overText   = "what the host says\n"
	resolvConf = "/etc/resolv.conf"
)

// withOver gives a spec files over those of its root: over one of the image, over nothing, over the one
// that is made, and over what a link may lead to.
func withOver(t *testing.T, spec *driver.Spec) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(spec.RunDir, overName), []byte(overText), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"/etc/changed", resolvConf, "/etc/nothing/at/all", "/etc/ssl/cert.pem", "/opt/folder", "/var/lib/theirs"} {
		spec.Over = append(spec.Over, driver.Over{From: overName, To: to})
	}
}

// over: a file of the host that a sandbox does not see, can change, or finds on its disk later.
func (s *suite) over(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	withOver(t, &spec)
	sb := s.create(t, d, spec)
	k := s.talk(t, sb)
	for _, path := range []string{"/etc/changed", resolvConf} {
		if got := k.must(t, "read", path); got != overText {
			t.Errorf("%s says %q", path, got)
		}
		if _, err := k.Do("write", path, "mine"); !isReadOnly(err) {
			t.Errorf("%s can be written to: %v", path, err)
		}
		if _, err := k.Do("remove", path); err == nil {
			t.Errorf("%s can be removed", path)
		}
	}
	for _, path := range []string{"/etc/nothing", "/etc/ssl", "/var/lib/theirs"} {
		if _, err := k.Do("stat", path); err == nil {
			t.Errorf("%s was made", path)
		}
	}
	if got := k.must(t, "read", "/opt/folder/file"); got != "image" {
		t.Errorf("a folder was laid over: %q", got)
	}
	k.must(t, "write", "/etc/own", "mine")
	s.stop(t, d, sb)
	plain := s.spec(t, 1, 2)
	_, k = s.onDisk(t, d, plain)
	for path, want := range map[string]string{"/etc/changed": "image", resolvConf: "", "/etc/own": "mine"} {
		if got := k.must(t, "read", path); got != want {
			t.Errorf("without it %s says %q", path, got)
		}
	}
	k.must(t, "write", "/etc/changed", "mine") // the session's own again
}

func (s *suite) onDisk(t *testing.T, d driver.Driver, spec driver.Spec) (driver.Sandbox, *Talk) {
	t.Helper()
	sb := s.create(t, d, spec)
	return sb, s.talk(t, sb)
}

// overLinks: a link that a session left where the host lays a file over one, and that leads the host's mount out
// of the sandbox, or keeps it from starting.
func (s *suite) overLinks(t *testing.T) {
	d := s.open(t)
	outside := t.TempDir()
	for _, name := range []string{"cert.pem", "resolv.conf"} {
		if err := os.WriteFile(filepath.Join(outside, name), []byte("host"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sb, k := s.onDisk(t, d, s.spec(t, 1, 1))
	for n, plant := range [][][2]string{
		{{outside + "/resolv.conf", resolvConf}, {outside, "/etc/ssl"}},
		{{"../../../../../../../.." + outside + "/resolv.conf", resolvConf}, {"../../../../../.." + outside, "/etc/ssl"}},
		{{"/run/berth/nothing", resolvConf}, {"/proc/self/root/etc", "/etc/ssl"}},
		{{"resolv.conf", resolvConf}, {"ssl", "/etc/ssl"}},
		{{"/proc/self/environ", resolvConf}, {"/dev", "/etc/ssl"}},
		{{"changed", resolvConf}, {"../var/ssl", "/etc/ssl"}},
	} {
		for _, p := range plant {
			_, _ = k.Do("remove", p[1])
			k.must(t, "symlink", p[0], p[1])
		}
		s.stop(t, d, sb)
		spec := s.spec(t, 1, uint64(2*n+2))
		withOver(t, &spec)
		sb, k = s.onDisk(t, d, spec)
		s.coveredOnly(t, k, plant, outside)
		s.stop(t, d, sb)
		sb, k = s.onDisk(t, d, s.spec(t, 1, uint64(2*n+3)))
		for _, p := range plant {
			if got := k.must(t, "link", p[1]); got != p[0] {
				t.Errorf("%v: on the disk the link leads to %q", plant, got)
			}
		}
	}
}

// coveredOnly looks at a sandbox on whose disk links were planted, and at what lies outside.
func (s *suite) coveredOnly(t *testing.T, k *Talk, plant [][2]string, outside string) {
	t.Helper()
	if got := k.must(t, "read", "/etc/changed"); got != overText {
		t.Errorf("%v: /etc/changed says %q", plant, got)
	}
	if got, err := k.Do("read", resolvConf); err == nil && got != overText && got != "" && !strings.Contains(got, "=") {
		t.Errorf("%v: %s says %q", plant, resolvConf, got)
	}
	for _, p := range plant {
		if got, err := k.Do("link", p[1]); err == nil && got != p[0] {
			t.Errorf("%v: the link leads to %q", plant, got)
		}
	}
	for _, name := range []string{"cert.pem", "resolv.conf"} {
		if b, err := os.ReadFile(filepath.Join(outside, name)); err != nil || string(b) != "host" {
			t.Errorf("%v: outside: %q, %v", plant, b, err)
		}
	}
	if m := hostMounts(t, overName); len(m) > 0 {
		t.Errorf("%v: mounted on the host: %v", plant, m)
	}
}

// overMissing: a sandbox that starts without a file that it was to have.
func (s *suite) overMissing(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	spec.Over = []driver.Over{{From: "not-there", To: "/etc/changed"}}
	if sb, err := d.Create(ctx(t), spec); err == nil {
		t.Errorf("it was made: %+v", sb)
	}
	if err := d.Stop(ctx(t), spec.ID()); err != nil { // one that does not enter its root is the caller's to end
		t.Error(err)
	}
	s.nothing(t, d, before)
}
