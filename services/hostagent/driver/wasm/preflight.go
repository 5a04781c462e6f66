package wasm

import (
	"context"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// Preflight implements driver.Checker.
func (d *Driver) Preflight(context.Context) error { return preflight(d.cfg) }

// Preflight says in one sentence why the driver cannot work on this host; it makes nothing.
func Preflight(cfg Config) error { return preflight(cfg) }

// settings of kernels that allow user namespaces to root alone, with the value that does so. The first
// process of a sandbox is nobody on the host and makes one for each call.
var settings = map[string]string{
	"kernel/unprivileged_userns_clone":                   "0",
	"user/max_user_namespaces":                           "0",
	"kernel/apparmor_restrict_unprivileged_userns":       "1",
	"kernel/apparmor_restrict_unprivileged_userns_force": "1",
}

func preflight(cfg Config) error {
	bad := func(format string, args ...any) error {
		return errs.Errorf("check this host", errkind.Unavailable, format, args...)
	}
	if os.Geteuid() != 0 {
		return bad("berth must run as root to make sandboxes")
	}
	if b, err := os.ReadFile("/proc/filesystems"); err == nil && !strings.Contains(string(b), "\toverlay\n") {
		return bad("this kernel has no overlay file system (modprobe overlay)")
	}
	for name, forbids := range settings {
		if b, err := os.ReadFile("/proc/sys/" + name); err == nil && strings.TrimSpace(string(b)) == forbids {
			return bad("this kernel allows a sandbox no user namespace for each call (sysctl %s)", strings.ReplaceAll(name, "/", "."))
		}
	}
	if _, err := cgroup.Detect(); err != nil {
		return bad("%w", err)
	}
	if uint64(cfg.FirstID)+uint64(cfg.IDRanges)*idRange > 1<<32-2 || cfg.IDRanges == 0 {
		return bad("the ranges of user ids from %d leave the space of ids", cfg.FirstID)
	}
	if err := unix.Access(cfg.Program, unix.X_OK); err != nil {
		return bad("the program %s is missing: run make build", cfg.Program)
	}
	if cfg.JS != "" {
		if err := unix.Access(cfg.JS, unix.R_OK); err != nil {
			return bad("the JavaScript tool %s is missing: run make build", cfg.JS)
		}
	}
	return nil
}
