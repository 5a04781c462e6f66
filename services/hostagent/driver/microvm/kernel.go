//go:build linux

package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// Files of Config.Kernel.
const (
	fileKernel  = "vmlinux"
	fileModules = "modules.cpio"
	fileVersion = "version"
)

// kernel is what every machine of this host starts from.
type kernel struct {
	vmlinux, initrd string
	// build names kernel, guest agent, QEMU and the host's kernel: what was learned with one build says
	// nothing about another.
	build string
}

// openKernel prepares the initramfs.
func openKernel(ctx context.Context, cfg Config) (kernel, error) {
	k := kernel{vmlinux: filepath.Join(cfg.Kernel, fileKernel)}
	var err error
	if k.initrd, err = initramfs.Ensure(cfg.State, filepath.Join(cfg.Kernel, fileModules), cfg.Guest); err != nil {
		return k, err
	}
	version, err := os.ReadFile(filepath.Join(cfg.Kernel, fileVersion))
	if err != nil {
		return k, fmt.Errorf("version of the kernel: %w", err)
	}
	qemu, err := exec.CommandContext(ctx, cfg.QEMU, "--version").Output()
	if err != nil {
		return k, errs.Errorf("version of QEMU", errkind.Unavailable, "%s does not run: %w", cfg.QEMU, err)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return k, err
	}
	first, _, _ := strings.Cut(string(qemu), "\n")
	sum := sha256.Sum256([]byte(strings.Join([]string{formatVersion, strings.TrimSpace(string(version)), filepath.Base(k.initrd),
		first, unix.ByteSliceToString(u.Release[:])}, "\n")))
	k.build = hex.EncodeToString(sum[:8])
	return k, nil
}

// Preflight says in one sentence why the driver cannot work on this host; it makes nothing.
func Preflight(cfg Config) error { return preflight(cfg) }

// Preflight implements driver.Checker.
func (d *Driver) Preflight(context.Context) error { return preflight(d.cfg) }

// maxRun keeps the path of a sandbox's socket within what a unix socket's may have.
const maxRun = 107 - len("/template.0123456789abcdef0123/"+sockControl)

func preflight(cfg Config) error {
	bad := func(format string, args ...any) error {
		return errs.Errorf("check this host", errkind.Unavailable, format, args...)
	}
	if os.Geteuid() != 0 {
		return bad("berth must run as root to make sandboxes")
	}
	if machine() != "x86_64" {
		return bad("virtual machines need a host of kind x86_64, this one is %s", machine())
	}
	if _, err := cgroup.Detect(); err != nil {
		return bad("%w", err)
	}
	if err := unix.Access(cfg.QEMU, unix.X_OK); err != nil {
		return bad("QEMU is missing at %s: install qemu-system-x86", cfg.QEMU)
	}
	for _, name := range []string{fileKernel, fileModules, fileVersion} {
		if _, err := os.Stat(filepath.Join(cfg.Kernel, name)); err != nil {
			return bad("the kernel of virtual machines is missing in %s: run go run ./tools/runtimes", cfg.Kernel)
		}
	}
	if _, err := os.Stat(cfg.Guest); err != nil {
		return bad("the guest agent %s is missing", cfg.Guest)
	}
	if len(cfg.Run) > maxRun {
		return bad("the path %s is too long for sockets: at most %d characters", cfg.Run, maxRun)
	}
	if cfg.FirstUser < 1000 || cfg.Users < 1 || int64(cfg.FirstUser)+int64(cfg.Users) > 1<<32-2 {
		return bad("the user ids from %d leave the space of ids", cfg.FirstUser)
	}
	if cfg.Network {
		if _, err := os.Stat("/dev/net/tun"); err != nil {
			return bad("this kernel has no /dev/net/tun for the network of virtual machines (modprobe tun)")
		}
	}
	return nil
}

func machine() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Machine[:])
}
