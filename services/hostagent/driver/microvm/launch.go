//go:build linux

package microvm

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail/child"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// qemuThreads is what QEMU may have of threads: its own, one for each processor and those that wait
// for the disk.
const qemuThreads = 160

// limitsOf is what QEMU's cgroup gets: the machine's memory and that of QEMU itself.
func (d *Driver) limitsOf(memory uint64, cpuMillis uint32) cgroup.Limits {
	return cgroup.Limits{CPUMillis: cpuMillis, MemoryBytes: memory + d.cfg.Overhead, PIDs: qemuThreads}
}

// listen makes the sockets of a machine, waiting, in a folder that only root may enter. Idempotent.
func listen(room string) (out map[string]*os.File, err error) {
	if err := os.MkdirAll(room, 0o700); err != nil {
		return nil, err
	}
	out = map[string]*os.File{}
	defer func() {
		if err != nil {
			for _, f := range out {
				_ = f.Close()
			}
		}
	}()
	for _, name := range sockets {
		path := filepath.Join(room, name)
		if err := removeEmpty(path); err != nil {
			return nil, err
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return nil, fmt.Errorf("make socket: %w", err)
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		_ = l.Close()
		if err != nil {
			return nil, fmt.Errorf("make socket: %w", err)
		}
		out[name] = f
	}
	return out, nil
}

// launch starts the QEMU of b in its jail and in the cgroup path, which exists. It closes b's files.
// output takes what QEMU says until then.
func (d *Driver) launch(ctx context.Context, b *build, user int, path string) (jail.Process, *os.File, error) {
	defer b.done()
	box, err := d.cgroup.Box(path)
	if err != nil {
		return jail.Process{}, nil, err
	}
	output, err := jail.Output()
	if err != nil {
		return jail.Process{}, nil, err
	}
	o := child.Order{
		UID: user, Program: d.cfg.QEMU, Args: append([]string{d.cfg.QEMU}, b.args...),
		Binds: map[string]string{"/boot/" + fileKernel: d.kernel.vmlinux, "/boot/initrd": d.kernel.initrd},
	}
	for _, dir := range []string{"/usr", "/lib", "/lib64", "/bin"} {
		if _, err := os.Lstat(dir); err == nil {
			o.Binds[dir] = dir
		}
	}
	o.Tap = b.shape.Network && b.tap == nil
	if b.shape.Accel == accelKVM {
		o.Devices = []string{"kvm"}
	}
	p, err := jail.Start(ctx, jail.Spec{Order: o, Files: b.files, Output: output,
		Enter: func(pid int) error { return d.cgroup.Enter(box, pid) }})
	if err != nil {
		err = fmt.Errorf("start QEMU: %w", err)
	}
	return p, output, err
}

// open opens a file for a QEMU; it is closed once it has it.
func (b *build) open(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NOFOLLOW, 0)
	if err == nil {
		b.close = append(b.close, f)
	}
	return f, err
}
