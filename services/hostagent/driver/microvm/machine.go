//go:build linux

package microvm

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// formatVersion changes with anything below that a template must agree on with its clones.
const formatVersion = "1"

// Sockets of a machine.
const (
	sockMonitor = "qmp"
	sockControl = "control"
	sockChannel = "channel"
)

var sockets = []string{sockMonitor, sockControl, sockChannel}

// Names of QEMU's objects.
const (
	nodeRoot = "root"
	nodeDisk = "disk"
	nodeFile = "diskfile" // below the throttle
	throttle = "io"
	// qomThrottle is where the throttle's limits are.
	qomThrottle = "/objects/" + throttle
)

// placeholderBytes is the session's disk of a template.
const placeholderBytes = 1 << 20

// shape is what a template and its clones have in common.
type shape struct {
	Accel     string `json:"accel"`
	Memory    uint64 `json:"memory"`
	CPUs      uint32 `json:"cpus"`
	RootBytes uint64 `json:"root_bytes"`
	Network   bool   `json:"network"`
}

// codeCache bounds what QEMU keeps of translated code, which is most of Config.Overhead: without it a
// machine that runs much code has its QEMU killed.
const codeCache = ",tb-size=80"

// memoryStep is what a machine's memory is a multiple of.
const memoryStep = 1 << 20

func (d *Driver) shapeOf(img driver.Image, l driver.Limits) (shape, error) {
	st, err := os.Stat(img.Block)
	if err != nil {
		return shape{}, fmt.Errorf("root image: %w", err)
	}
	return shape{
		Accel: d.accel.Name, Memory: l.MemoryBytes / memoryStep * memoryStep, CPUs: processors(l),
		RootBytes: uint64(st.Size()), Network: d.cfg.Network,
	}, nil
}

// processors is how many a machine has.
func processors(l driver.Limits) uint32 { return max(1, (l.CPUMillis+999)/1000) }

// build is one QEMU's command line while it grows, with the files that it inherits.
type build struct {
	name  string
	shape shape
	args  []string
	files []*os.File
	close []*os.File // after the start
	tap   *os.File   // of a link; nil: the card's other end is in QEMU's own namespace
}

func (b *build) add(args ...string) { b.args = append(b.args, args...) }

// file lets QEMU inherit f and returns its descriptor there.
func (b *build) file(f *os.File) int {
	b.files = append(b.files, f)
	return jail.FirstFile + len(b.files) - 1
}

// set lets QEMU inherit f for its block layer and returns its name there.
func (b *build) set(f *os.File) string {
	fd := b.file(f)
	b.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, fd))
	return fmt.Sprintf("/dev/fdset/%d", fd)
}

// object adds an option whose value is JSON.
func (b *build) object(option string, v map[string]any) {
	text, _ := json.Marshal(v) // of strings, numbers and booleans
	b.add(option, string(text))
}

// done closes the files that are QEMU's now.
func (b *build) done() {
	for _, f := range b.close {
		_ = f.Close()
	}
	b.close = nil
}

// base is the machine without memory, disks and what it does first. The devices have addresses of
// their own: a clone's must be those of its template.
func (b *build) base(k kernel) {
	cpu, accel := "max", b.shape.Accel
	// A machine that was frozen for a while finds itself late, and nothing is wrong with it.
	line := "quiet loglevel=1 cryptomgr.notests panic=-1 reboot=t 8250.nr_uarts=0 apparmor=0 selinux=0 audit=0 nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
	if b.shape.Accel == accelKVM {
		cpu = "host"
	} else {
		// Emulated code sees no microarchitecture to protect itself from.
		// The counter is the host's: the guest must not distrust it because a busy host made it wait.
		accel += codeCache
		line += " mitigations=off tsc=reliable tsc_early_khz=" + strconv.FormatUint(tscKHz(), 10)
	}
	b.add("-M", "microvm,isa-serial=off,rtc=on,memory-backend=ram", "-accel", accel, "-cpu", cpu,
		"-smp", strconv.FormatUint(uint64(b.shape.CPUs), 10), "-m", strconv.FormatUint(b.shape.Memory>>20, 10)+"M",
		"-name", b.name, "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-serial", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-action", "shutdown=pause,reboot=shutdown,panic=none", "-rtc", "base=utc",
		"-kernel", "/boot/"+fileKernel, "-initrd", "/boot/initrd", "-append", line)
	b.object("-object", map[string]any{"qom-type": "rng-builtin", "id": "rng"})
	b.add("-device", "virtio-rng-device,rng=rng,bus=virtio-mmio-bus.0")
}

// ports adds the monitor and the two serial ports, each a socket that waits already.
func (b *build) ports(listeners map[string]*os.File) {
	for _, name := range sockets {
		b.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", name, b.file(listeners[name])))
	}
	b.add("-mon", "chardev="+sockMonitor+",mode=control", "-device", "virtio-serial-device,max_ports=4,bus=virtio-mmio-bus.3",
		"-device", "virtserialport,nr=1,chardev="+sockControl+",name="+vmwire.Control,
		"-device", "virtserialport,nr=2,chardev="+sockChannel+",name="+vmwire.Channel)
}

// memory gives the machine its memory: from a file that it shares, or has copies of what it changes,
// or its own.
func (b *build) memory(f *os.File, share bool) {
	o := map[string]any{"qom-type": "memory-backend-ram", "id": "ram", "size": b.shape.Memory, "dump": false, "merge": false}
	if f != nil {
		o["qom-type"], o["share"] = "memory-backend-file", share
		o["mem-path"] = fmt.Sprintf("/proc/self/fd/%d", b.file(f))
	}
	b.object("-object", o)
}

// placeholders are the disks of a machine that is nobody's yet.
func (b *build) placeholders() {
	b.object("-blockdev", map[string]any{"driver": "null-co", "node-name": nodeRoot, "size": b.shape.RootBytes, "read-only": true, "read-zeroes": true})
	b.object("-blockdev", map[string]any{"driver": "null-co", "node-name": nodeDisk, "size": placeholderBytes, "read-zeroes": true})
	b.drives()
}

// disks are the image, which cannot be written, and the session's own behind a throttle.
func (b *build) disks(root, disk *os.File, l driver.Limits) {
	b.root(root)
	b.object("-blockdev", diskNode(nodeFile, b.set(disk)))
	b.throttled(nodeFile, l)
	b.drives()
}

func (b *build) root(f *os.File) {
	b.object("-blockdev", map[string]any{"driver": "file", "node-name": nodeRoot, "filename": b.set(f), "read-only": true, "discard": "unmap"})
}

// throttled puts the throttle before a node.
func (b *build) throttled(node string, l driver.Limits) {
	b.object("-object", map[string]any{"qom-type": "throttle-group", "id": throttle, "limits": ioLimits(l)})
	b.object("-blockdev", throttleNode(node))
}

// diskNode is a file that the guest may write to.
func diskNode(name, file string) map[string]any {
	return map[string]any{"driver": "file", "node-name": name, "filename": file, "discard": "unmap", "aio": "threads"}
}

// throttleNode is what the guest's disk is: a throttle before another node.
func throttleNode(below string) map[string]any {
	return map[string]any{"driver": "throttle", "node-name": nodeDisk, "throttle-group": throttle, "file": below, "discard": "unmap"}
}

// drives are vda and vdb: the guest finds the bus with the higher number first.
func (b *build) drives() {
	b.add("-device", "virtio-blk-device,id=vda,drive="+nodeRoot+",serial=berth-root,num-queues=1,bus=virtio-mmio-bus.2",
		"-device", "virtio-blk-device,id=vdb,drive="+nodeDisk+",serial=berth-session,werror=enospc,num-queues=1,bus=virtio-mmio-bus.1")
}

// ioLimits of a throttle group; all of them, so that a change replaces what was.
func ioLimits(l driver.Limits) map[string]any {
	return map[string]any{"bps-total": l.DiskBytesPerSecond, "iops-total": l.DiskOpsPerSecond}
}

// network adds the card, with the link's tap at its other end or else one that has the descriptor after all
// files: call it last.
func (b *build) network() {
	if !b.shape.Network {
		return
	}
	fd := jail.FirstFile + len(b.files)
	if b.tap != nil {
		fd = b.file(b.tap)
	}
	b.add("-netdev", fmt.Sprintf("tap,id=net,fd=%d", fd),
		"-device", "virtio-net-device,netdev=net,mac="+templateMAC+",bus=virtio-mmio-bus.4")
}
