package containerd

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

func TestPreflightIsOneSentenceAndMakesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: needs root")
	}
	dir := filepath.Join(t.TempDir(), "state")
	for name, c := range map[string]struct {
		change func(*Config)
		say    string
	}{
		"runtimes": {func(*Config) {}, "is missing"},
		"tiers":    {func(c *Config) { c.Tiers = nil }, "no tier"},
		"tier":     {func(c *Config) { c.Tiers = []driver.Tier{"wasm"} }, "no tier"},
		"run":      {func(c *Config) { c.Run = "/run/" + strings.Repeat("x", 80) }, "too long"},
		"ids":      {func(c *Config) { c.FirstID = 1 << 31; c.IDRanges = 1 << 16 }, "ranges of user ids"},
	} {
		cfg := NewConfig(dir, filepath.Join(dir, "none"))
		c.change(&cfg)
		err := Preflight(cfg)
		if err == nil || !strings.Contains(err.Error(), c.say) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %v", name, err)
		}
		if k := errs.Kind(err); k != errkind.Unavailable && k != errkind.Unimplemented {
			t.Errorf("%s: kind %v", name, k)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: it made something", name)
		}
	}
}

// An existing containerd is used by its socket; two drivers on it do not see each other's sandboxes.
func TestAnExistingContainerd(t *testing.T) {
	h := newHost(t)
	first := openDriver(t, h)
	cfg := NewConfig(filepath.Join(h.dir, "second"), h.cfg.Runtimes)
	cfg.Run = h.cfg.Run + "-2"
	cfg.Socket = first.daemon.socket()
	second := openDriver(t, &host{cfg: cfg})
	for i, tier := range cfg.Tiers {
		a, _ := start(t, first, h.Spec(t, 10*i+1, 1), tier)
		b, _ := start(t, second, h.Spec(t, 10*i+2, 1), tier)
		for _, c := range []struct {
			d    *Driver
			want driver.Sandbox
		}{{first, a}, {second, b}} {
			found, err := c.d.List(t.Context())
			if err != nil || len(found) != 1 || found[0].ID != c.want.ID || found[0].State != driver.Running {
				t.Errorf("%s: list %+v, %v", tier, found, err)
			}
			if err := c.d.Stop(t.Context(), c.want.ID); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestUsersOfTheHostReadNoSession: a user of the host without rights reaches neither a session's
// files, which it may have left open to all of its own, nor its channel, nor the driver's state.
func TestUsersOfTheHostReadNoSession(t *testing.T) {
	h := newHost(t)
	if err := os.Chmod(h.dir, 0o711); err != nil { // the state's own modes are what counts
		t.Fatal(err)
	}
	d := openDriver(t, h)
	for i, tier := range h.cfg.Tiers {
		sb, _ := start(t, d, h.Spec(t, 20+i, 1), tier)
		for _, path := range []string{filepath.Join(d.root(sb.ID), "etc/changed"), d.roots(), sb.Channel.Stdin, sb.Channel.Stdout,
			filepath.Join(d.folder(sb.ID), recordFile), filepath.Join(h.dir, "disks/sessions")} {
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("%s: %v", path, err)
			}
			cmd := exec.Command("dd", "if="+path, "bs=1", "count=1", "iflag=nonblock")
			if filepath.Ext(path) == "" && !strings.Contains(path, "changed") && !strings.Contains(path, "std") {
				cmd = exec.Command("ls", path)
			}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65533, Gid: 65533}}
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "ermission denied") {
				t.Errorf("%s: any user of the host reads %s: %v %s", tier, path, err, out)
			}
		}
		if err := d.Stop(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
	}
}

func TestRootsAreOpenToAllWhateverTheUmask(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: needs root")
	}
	dir := "/run/berth/test-passage/a/b"
	defer func() { _ = os.RemoveAll("/run/berth/test-passage") }()
	old := syscall.Umask(0o077)
	err := passage(dir)
	syscall.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if st, err := os.Stat(d); err != nil || st.Mode()&0o001 == 0 {
			t.Errorf("%s: %v, %v", d, st, err)
		}
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := passage(dir + "/c"); err == nil || !strings.Contains(err.Error(), "closed to others") {
		t.Errorf("got %v", err)
	}
}
