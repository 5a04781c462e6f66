//go:build linux

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// What runs a machine.
const (
	accelKVM = "kvm"
	accelTCG = "tcg"
)

const (
	// kvmTime bounds the boot that is to show that KVM works: it takes under a second where it does.
	kvmTime = 10 * time.Second
	// probeMemory is that of the machine which is booted.
	probeMemory = 192 << 20
)

// accel is what the probe found. It is kept in a file and holds for one build of kernel, guest, QEMU
// and host kernel alone.
type accel struct {
	Build string `json:"build"`
	Name  string `json:"name"`
	// Why says why it is not KVM, Absent why no machine runs here at all.
	Why    string `json:"why"`
	Absent string `json:"absent"`
	// Boot is how long the boot took that proved it.
	Boot time.Duration `json:"boot"`
}

// probe finds out what runs machines here. Only a boot up to the hello of the guest counts: a
// processor can have KVM and still not run a whole kernel with it.
func (d *Driver) probe(ctx context.Context) accel {
	file := d.cfg.Accel
	key := fmt.Sprintf("%s kvm=%v", d.kernel.build, kvmWanted(d.cfg) == "")
	var a accel
	if readJSON(file, &a) == nil && a.Build == key {
		return a
	}
	a = accel{Build: key, Name: accelTCG, Why: kvmWanted(d.cfg)}
	if a.Why == "" {
		took, err := d.tryBoot(ctx, accelKVM, kvmTime)
		if err == nil {
			a.Name, a.Boot = accelKVM, took
			d.keep(file, a)
			return a
		}
		a.Why = fmt.Sprintf("a machine did not boot with it: %v", err)
	}
	took, err := d.tryBoot(ctx, accelTCG, d.cfg.BootTime)
	if err != nil {
		a.Absent = fmt.Sprintf("no virtual machine boots here: %v", err)
		return a // not kept: the next start tries again
	}
	if a.Boot = took; !conclusive(kvmWanted(d.cfg) == "", took) {
		d.log.Warn("this machine is too busy to find out whether KVM works; the next start tries again", "emulated boot", took, "kvm", a.Why)
		return a
	}
	d.keep(file, a)
	return a
}

// conclusive reports whether an emulated boot shows that a failure of KVM before it was not for want of
// time: where KVM works it is several times as fast.
func conclusive(tried bool, emulated time.Duration) bool { return !tried || emulated < kvmTime }

func (d *Driver) keep(file string, a accel) {
	d.log.Info("virtual machines run", "with", a.Name, "booted in", a.Boot, "why not kvm", a.Why)
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o711), writeJSON(file, a)); err != nil {
		d.log.Warn("the next start has to find out again what runs machines", "err", err)
	}
}

// kvmWanted says why KVM is not even tried; empty if it is.
func kvmWanted(cfg Config) string {
	if cfg.NoKVM {
		return "turned off by configuration"
	}
	if err := unix.Access("/dev/kvm", unix.R_OK|unix.W_OK); err != nil {
		return "/dev/kvm: " + err.Error()
	}
	return ""
}

func (d *Driver) tryBoot(ctx context.Context, name string, limit time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	h, err := d.boot(ctx, probePrefix, shape{Accel: name, Memory: probeMemory, CPUs: 1, RootBytes: placeholderBytes, Network: d.cfg.Network}, nil)
	if err != nil {
		return 0, err
	}
	return h.took, h.remove()
}
