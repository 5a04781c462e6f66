package containerd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// maxRun keeps the shims' sockets (64 more characters) within what a unix socket's path may have.
const maxRun = 64 - len("/s/")

// Preflight implements driver.Checker.
func (d *Driver) Preflight(context.Context) error { return preflight(d.cfg) }

// Preflight says in one sentence why the driver cannot work on this host; it makes nothing.
func Preflight(cfg Config) error { return preflight(cfg) }

func preflight(cfg Config) error {
	bad := func(format string, args ...any) error {
		return errs.Errorf("check this host", errkind.Unavailable, format, args...)
	}
	if os.Geteuid() != 0 {
		return bad("berth must run as root to make sandboxes")
	}
	major, minor := kernel()
	if major < 5 || major == 5 && minor < 19 {
		return bad("this kernel is %d.%d; 5.19 or newer is needed for id-mapped sandbox roots", major, minor)
	}
	if b, err := os.ReadFile("/proc/filesystems"); err == nil && !strings.Contains(string(b), "\toverlay\n") {
		return bad("this kernel has no overlay file system (modprobe overlay)")
	}
	if b, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err != nil || strings.TrimSpace(string(b)) == "0" {
		return bad("this kernel allows no user namespaces (sysctl user.max_user_namespaces)")
	}
	if _, err := cgroup.Detect(); err != nil {
		return bad("%w", err)
	}
	if len(cfg.Tiers) == 0 {
		return bad("no tier is configured")
	}
	if len(cfg.Run) > maxRun {
		return bad("the path %s is too long for sockets: at most %d characters", cfg.Run, maxRun)
	}
	if uint64(cfg.FirstID)+uint64(cfg.IDRanges)*idRange > 1<<32-2 || cfg.IDRanges == 0 {
		return bad("the ranges of user ids from %d leave the space of ids", cfg.FirstID)
	}
	return runnable(cfg)
}

// runnable refuses if no tier can run: a tier that cannot does not keep the others from it.
func runnable(cfg Config) error {
	absent, err := absentTiers(cfg)
	if err != nil {
		return err
	}
	if cfg.Socket == "" {
		if why := lacks(cfg, binContainerd); why != "" {
			return errs.E("check this host", errkind.Unavailable, "", why)
		}
	}
	if len(absent) < len(cfg.Tiers) {
		return nil
	}
	return errs.E("check this host", errkind.Unavailable, "", absent[cfg.Tiers[0]])
}

// absentTiers says of each tier that cannot run here why.
func absentTiers(cfg Config) (map[driver.Tier]string, error) {
	out := map[driver.Tier]string{}
	for _, t := range cfg.Tiers {
		why := ""
		switch t {
		case driver.Container:
			why = lacks(cfg, binRunc, binShimRunc)
		case driver.GVisor:
			why = lacks(cfg, binRunsc, binShimRunsc)
		case driver.Kata:
			_, why = findKata(cfg, "/")
		default:
			return nil, errs.Errorf("check this host", errkind.Unimplemented, "containerd runs no tier %q", t)
		}
		if why != "" {
			out[t] = why
		}
	}
	return out, nil
}

// lacks names the first of these programs that is missing.
func lacks(cfg Config, names ...string) string {
	for _, name := range names {
		if unix.Access(filepath.Join(cfg.Runtimes, name), unix.X_OK) != nil {
			return fmt.Sprintf("the runtime %s is missing in %s: run go run ./tools/runtimes", name, cfg.Runtimes)
		}
	}
	return ""
}

func kernel() (major, minor int) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return 0, 0
	}
	_, _ = fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	return major, minor
}
