package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// bareBoot times QEMU alone, emulated, with the kernel and the agent of the microvm tier, from the
// start of the process to the agent's first word: no jail, no template, no disk of a session.
func (b *bench) bareBoot(ctx context.Context) (took time.Duration, err error) {
	dir, err := os.MkdirTemp("", "bb-") // a socket's path is short
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	args, err := b.bareArgs(dir)
	if err != nil {
		return 0, err
	}
	control := filepath.Join(dir, "control")
	l, err := net.Listen("unix", control)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", append(args, "-chardev", "socket,id=control,path="+control)...)
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, cmd.Process.Kill()); _ = cmd.Wait() }()
	if err := l.(*net.UnixListener).SetDeadline(began.Add(time.Minute)); err != nil {
		return 0, err
	}
	c, err := l.Accept()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetReadDeadline(began.Add(time.Minute)); err != nil {
		return 0, err
	}
	m, err := vmwire.NewReader(c).Next()
	if err != nil || m.Ready == nil {
		return 0, fmt.Errorf("the machine says %+v: %w", m, err)
	}
	return time.Since(began), nil
}

func (b *bench) bareArgs(dir string) ([]string, error) {
	kernel, err := locate.MicroVM()
	if err != nil {
		return nil, err
	}
	roots, err := filepath.Glob(filepath.Join(b.dir, "host", "*", "images", "*", "rootfs.erofs"))
	if err != nil || len(roots) == 0 {
		return nil, fmt.Errorf("the host made no image for machines (%w)", err)
	}
	initrd, err := initramfs.Ensure(dir, filepath.Join(kernel, locate.Modules), filepath.Join(filepath.Dir(b.bin), "berth-guest"))
	if err != nil {
		return nil, err
	}
	return []string{
		"-M", "microvm,accel=tcg,rtc=on,isa-serial=off,pcie=off,usb=off", "-cpu", "max", "-smp", "1", "-m", "512M",
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-kernel", filepath.Join(kernel, locate.VMLinux), "-initrd", initrd,
		"-append", "console=hvc0 panic=-1 quiet loglevel=0 " + tscHint(),
		"-device", "virtio-serial-device,max_ports=5", "-device", "virtserialport,chardev=control,name=" + vmwire.Control,
		"-chardev", "null,id=channel", "-device", "virtserialport,chardev=channel,name=" + vmwire.Channel,
		"-drive", "if=none,id=root,format=raw,readonly=on,file=" + roots[0], "-device", "virtio-blk-device,drive=root",
		"-drive", "if=none,id=disk,driver=null-co,size=1M,read-zeroes=on", "-device", "virtio-blk-device,drive=disk",
	}, nil
}

// tscHint spares the kernel the calibration of its clock, which fails when it is emulated.
func tscHint() string {
	raw, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(raw)) {
		var mhz float64
		if n, _ := fmt.Sscanf(line, "cpu MHz : %f", &mhz); n == 1 {
			return fmt.Sprintf("tsc_early_khz=%d", int(mhz*1000))
		}
	}
	return ""
}
