package containerd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/internal/newroot"
)

// warmFor asks for a warm sandbox that can be claimed for the spec.
func warmFor(spec driver.Spec, tier driver.Tier) driver.WarmSpec {
	w := driver.WarmSpec{
		ID: ids.NewWarmID(), Tier: tier, Image: spec.Image, RunDir: spec.RunDir, Guest: spec.Guest,
		Init: spec.Init, Env: spec.Env, Hostname: "nobodys", Limits: spec.Limits,
	}
	if tier == driver.GVisor { // binds no name at a claim
		w.Hostname = spec.Hostname
	}
	return w
}

// startWarm is start by Prepare and Claim.
func startWarm(t testing.TB, d *Driver, spec driver.Spec, tier driver.Tier) (driver.Sandbox, *drivertest.Talk) {
	t.Helper()
	w := warmFor(spec, tier)
	if _, err := d.Prepare(context.Background(), w); err != nil {
		t.Fatal(err)
	}
	spec.Tier = tier
	sb, err := d.Claim(context.Background(), w.ID, spec)
	if err != nil {
		t.Fatal(err)
	}
	k, err := drivertest.Open(sb.Channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	if sb.Enter != "" {
		if _, err := k.Do("enter", sb.Enter); err != nil {
			t.Fatal(err)
		}
	}
	return sb, k
}

// ask runs an operation of the probe and returns its answer, or its error as text.
func ask(k *drivertest.Talk, op string, args ...string) string {
	out, err := k.Do(op, args...)
	if err != nil {
		return "error: " + err.Error()
	}
	return out
}

// A claimed container whose walls, mounts or files differ from those of one that was started cold: the
// empty root shows, a file system has other options, or a right was left over.
func TestAClaimedContainerIsAsAColdOne(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	one, two := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	two.Hostname, two.Env = one.Hostname, one.Env
	cold, ck := start(t, d, one, driver.Container)
	warm, wk := startWarm(t, d, two, driver.Container)
	for _, file := range []string{"/proc/self/status", "/proc/1/limits", "/proc/mounts", "/proc/self/mountinfo", "/proc/self/cgroup", "/proc/1/environ",
		"/proc/1/cmdline", "/proc/sys/kernel/hostname", "/proc/self/uid_map", "/proc/1/attr/current", "/proc/filesystems", "/proc/net/dev"} {
		a, b := plain(ask(ck, "read", file), cold, one), plain(ask(wk, "read", file), warm, two)
		if a != b {
			t.Errorf("%s differs:\ncold %s\nwarm %s", file, a, b)
		}
	}
	for _, link := range []string{"/proc/1/root", "/proc/1/cwd", "/proc/1/exe"} {
		if a, b := ask(ck, "link", link), ask(wk, "link", link); a != b {
			t.Errorf("%s is %s, not %s", link, b, a)
		}
	}
	for _, dir := range []string{"/", "/proc/1/root", "/proc/1/cwd", "/proc/1/root/..", "/dev", "/sys", "/sys/fs", "/run", "/tmp", "/run/berth", "/proc/1/fd"} {
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
	if got := hostMounts(t, warm.PID); strings.Contains(got, newroot.Slot) || strings.Count(got, "\n") != strings.Count(hostMounts(t, cold.PID), "\n") {
		t.Errorf("a mount of the empty root is left:\n%s", got)
	}
	if out := ask(wk, "write", "/etc/of-the-session", "x"); out != "" {
		t.Error(out)
	}
	if _, err := os.Lstat(filepath.Join(two.Disk, "upper/etc/of-the-session")); err != nil {
		t.Errorf("what the session wrote is not on its disk: %v", err)
	}
}

var (
	numbers = regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ `)
	peers   = regexp.MustCompile(` (master|shared|propagate_from):\d+`)
	moving  = regexp.MustCompile(`(?m)^(State|Vm|Rss|Pid|Tgid|NSpid|NStgid|NSpgid|NSsid|Threads|voluntary|nonvoluntary|Uid|Gid|FDSize|SigQ|SigP|Shd|SigBlk|x86).*$`)
	owners  = regexp.MustCompile(`(uid|gid|0 )\s*=?\s*[1-9]\d{6,9}`)
)

// plain leaves out of a file what differs between any two sandboxes, and sorts its lines.
func plain(s string, sb driver.Sandbox, spec driver.Spec) string {
	for _, r := range []*regexp.Regexp{numbers, peers, moving} {
		s = r.ReplaceAllString(s, "")
	}
	s = owners.ReplaceAllString(s, "$1 OWNER")
	s = strings.NewReplacer(spec.RunDir, "RUN", string(sb.ID), "ID").Replace(s)
	lines := strings.Split(s, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func hostMounts(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A session's disk that has something else where a sandbox's own file systems go: folders that are
// missing are made as a cold start makes them; a link or a file is refused before the warm sandbox
// is touched, which another session can have.
func TestADiskThatIsHostileIsNotClaimed(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	for i, name := range ownFolders() {
		for j, c := range []struct {
			what string
			make func(path string) error
			kind errkind.Kind
		}{
			{"a link", func(p string) error { return os.Symlink("etc", p) }, errkind.Unimplemented},
			{"a link to nothing", func(p string) error { return os.Symlink("/nothing", p) }, errkind.Unimplemented},
			{"a link out", func(p string) error { return os.Symlink("../../../../../../etc", p) }, errkind.Unimplemented},
			{"a file", func(p string) error { return os.WriteFile(p, nil, 0o644) }, errkind.Unimplemented},
			{"a pipe", func(p string) error { return unix.Mkfifo(p, 0o644) }, errkind.Unimplemented},
		} {
			spec := h.Spec(t, 100*i+j, 1)
			spec.Tier = driver.Container
			if err := c.make(filepath.Join(spec.Disk, "upper", name)); err != nil {
				t.Fatal(err)
			}
			w := warmFor(spec, driver.Container)
			if j > 0 { // one of each is prepared; the others fail at the same place
				if err := newroot.Check(spec.Image.Lower, spec.Disk+"/upper", ownFolders()); err == nil {
					t.Errorf("/%s is %s: nothing is wrong with it", name, c.what)
				}
				continue
			}
			if _, err := d.Prepare(t.Context(), w); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Claim(t.Context(), w.ID, spec); !errs.Is(err, c.kind) {
				t.Errorf("/%s is %s: claimed with %v", name, c.what, err)
			}
			if f := only(t, d); f.State != driver.Waiting || f.Session != "" {
				t.Errorf("/%s is %s: it is not warm any more: %+v", name, c.what, f)
			}
			if err := d.Stop(t.Context(), w.ID); err != nil {
				t.Error(err)
			}
		}
	}
}

// The folders that a claim makes, in an image without any, differ from those of a cold start.
func TestMissingFoldersAreMadeAsOnAColdStart(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	h.lower = t.TempDir()
	if err := os.Mkdir(h.lower+"/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	one, two := h.Spec(t, 1, 1), h.Spec(t, 2, 1)
	start(t, d, one, driver.Container)
	_, k := startWarm(t, d, two, driver.Container)
	for _, name := range ownFolders() {
		var a, b unix.Stat_t
		if err := unix.Lstat(filepath.Join(one.Disk, "upper", name), &a); err != nil {
			t.Fatal(err)
		}
		if err := unix.Lstat(filepath.Join(two.Disk, "upper", name), &b); err != nil {
			t.Errorf("/%s: %v", name, err)
		}
		if a.Mode != b.Mode || a.Uid != b.Uid || a.Gid != b.Gid {
			t.Errorf("/%s is %o of %d:%d, not %o of %d:%d", name, b.Mode, b.Uid, b.Gid, a.Mode, a.Uid, a.Gid)
		}
	}
	if out := ask(k, "list", "/proc/self/"); strings.Contains(out, "error") {
		t.Error(out)
	}
}

func only(t *testing.T, d *Driver) driver.Found {
	t.Helper()
	found, err := d.List(t.Context())
	if err != nil || len(found) != 1 {
		t.Fatalf("list %+v, %v", found, err)
	}
	return found[0]
}
