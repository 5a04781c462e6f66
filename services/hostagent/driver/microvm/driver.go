//go:build linux

// Package microvm makes sandboxes that are virtual machines: QEMU's machine "microvm" with a kernel
// of its own, run by KVM where a real boot showed that it works, else by emulation (TCG).
//
// It guarantees, beyond the contract of package driver: QEMU runs as a user of its own without any
// right, sees nothing of the host but its own program, and is in the sandbox's cgroup before its first
// instruction; a machine that was cloned from a template is reseeded, re-clocked and personalised
// before anything of the user runs, and no clone sees what another one or the template writes; the
// session's disk is opened by this driver alone and never mounted on the host; everything that is made
// bears the sandbox's id, so that Stop and List find it without any record; and machines go on when
// the host agent ends, to be adopted by the next.
//
// Emulation is no security boundary by QEMU's own policy: Capabilities say which of the two it is.
package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Config of the driver. NewConfig gives the defaults.
type Config struct {
	// State holds the sandboxes' records and the initramfs.
	State string
	// Accel is the file in which the probe's outcome is kept: it is true for the whole machine, so that
	// hosts and tests on one machine may share it. Only root may write to its folder.
	Accel string
	// Run holds the sandboxes' sockets; its path must be short.
	Run string
	// Kernel is the folder with vmlinux, modules.cpio and version (tools/runtimes).
	Kernel string
	// Guest is the guest agent's program, which is the machine's first process.
	Guest string
	// QEMU is the program qemu-system-x86_64.
	QEMU string
	// Cgroup is the parent of all sandboxes' cgroups, the same for all drivers of one host.
	Cgroup string
	// FirstUser is the first user id of QEMUs, Users how many follow. Drivers on one machine share
	// them through the folder UserDir, which is the same for all.
	FirstUser, Users int
	UserDir          string
	// Overhead is the memory that QEMU itself may use beside the machine's.
	Overhead uint64
	// Network gives each machine a network card, so that it can be given a link; for machines without one
	// its other end leads nowhere. It is on where this host has taps.
	Network bool
	// NoTemplates boots every machine; NoKVM emulates without trying anything else.
	NoTemplates, NoKVM bool
	// Templates is how many templates are kept at most.
	Templates int
	// BootTime bounds a boot, PersonaliseTime what a machine needs to become a sandbox, OffTime an
	// orderly end before it is killed.
	BootTime, PersonaliseTime, OffTime time.Duration
	Log                                *slog.Logger

	shelf *shelf // of tests that share templates among drivers
}

// NewConfig returns the defaults for a host whose state is in dir. kernel is the folder of the kernel's
// files, guest the guest agent's program.
func NewConfig(dir, kernel, guest string) Config {
	sum := sha256.Sum256([]byte(dir))
	name := hex.EncodeToString(sum[:4])
	return Config{
		State: dir, Accel: filepath.Join(dir, "accel.json"), Run: filepath.Join("/run/berth", name, "vm"), Kernel: kernel, Guest: guest,
		QEMU: "/usr/bin/qemu-system-x86_64", Cgroup: "berth-" + name,
		FirstUser: 0x41000000, Users: 65536, UserDir: "/run/berth/vmusers", Overhead: 150 << 20, Templates: 4,
		BootTime: 2 * time.Minute, PersonaliseTime: 45 * time.Second, OffTime: 15 * time.Second,
		Network: exists("/dev/net/tun"),
	}
}

// Driver implements driver.Driver and all of its optional interfaces.
type Driver struct {
	cfg       Config
	log       *slog.Logger
	cgroup    cgroup.Tree
	users     users
	run       steps.Runner
	kernel    kernel
	accel     accel
	templates *templates
	files     *folders
	blank     blankDisk
	maker     string // tells what this very process prepared from what an earlier one did

	mu       sync.Mutex
	locks    map[ids.SandboxID]*sync.Mutex
	known    map[ids.SandboxID]record
	vms      map[ids.SandboxID]*vm
	watchers map[*watcher]bool
	closed   bool
}

var (
	_ driver.Driver      = (*Driver)(nil)
	_ driver.Watcher     = (*Driver)(nil)
	_ driver.Meter       = (*Driver)(nil)
	_ driver.Freezer     = (*Driver)(nil)
	_ driver.Checker     = (*Driver)(nil)
	_ driver.Snapshotter = (*Driver)(nil)
	_ driver.Resizer     = (*Driver)(nil)
	_ driver.DiskResizer = (*Driver)(nil)
	_ driver.Networker   = (*Driver)(nil)
	_ driver.Preparer    = (*Driver)(nil)
)

// Open takes over what an earlier driver left running, and finds out by booting a machine how this
// host runs them, unless that is known already.
func Open(ctx context.Context, cfg Config) (*Driver, error) {
	const op = "open microvm driver"
	if err := preflight(cfg); err != nil {
		return nil, err
	}
	tree, err := cgroup.Detect()
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	if cfg.State, err = filepath.Abs(cfg.State); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	d := &Driver{
		cfg: cfg, log: cfg.Log, cgroup: tree, maker: newID(),
		locks: map[ids.SandboxID]*sync.Mutex{}, known: map[ids.SandboxID]record{}, vms: map[ids.SandboxID]*vm{},
		watchers: map[*watcher]bool{},
		users:    users{dir: cfg.UserDir, owner: cfg.Cgroup, first: cfg.FirstUser, count: cfg.Users},
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	d.templates = newTemplates(d)
	if err := d.open(ctx); err != nil {
		_ = d.Close()
		return nil, errs.E(op, errs.Kind(err), cfg.State, err)
	}
	return d, nil
}

func (d *Driver) open(ctx context.Context) error {
	for _, dir := range []string{d.sandboxes(), d.cfg.Run} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	var err error
	if d.kernel, err = openKernel(ctx, d.cfg); err != nil {
		return err
	}
	if d.files, err = openFolders(d); err != nil {
		return err
	}
	if err := d.recall(); err != nil {
		return err
	}
	d.accel = d.probe(ctx)
	return nil
}

// recall reads the records of sandboxes that an earlier process made, takes those that run over, and
// removes what it left of templates.
func (d *Driver) recall() error {
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return err
	}
	used := map[int]bool{}
	for _, e := range entries {
		id := ids.SandboxID(e.Name())
		r, err := readRecord(d.folder(id))
		if err != nil {
			continue // half-made: List shows it
		}
		d.known[id] = r
		used[r.User] = true
		d.adopt(id, r)
	}
	d.sweepHelpers()
	return d.users.recall(used)
}

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	c := driver.Capabilities{
		Absent: d.accel.Absent, Accel: d.accel.Name,
		Native: true, Isolated: true, OwnKernel: true, Disk: true, RawDisk: true,
		Memory: true, PIDs: true, CPU: true, DiskIO: true, OpenFiles: true, Adopts: true, Holds: true,
		Clones: !d.cfg.NoTemplates, Warm: true, Network: d.cfg.Network, Tap: true,
	}
	if d.accel.Why != "" {
		c.Missing = append(c.Missing, "KVM ("+d.accel.Why+")")
	}
	return map[driver.Tier]driver.Capabilities{driver.MicroVM: c}
}

// Close implements driver.Driver: templates go, sandboxes stay.
func (d *Driver) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	vms := d.vms
	d.vms = map[ids.SandboxID]*vm{}
	left := len(d.known)
	d.mu.Unlock()
	for _, v := range vms {
		v.close()
	}
	d.templates.close()
	d.blank.close()
	if d.files != nil {
		d.files.close()
	}
	if left > 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if d.cfg.Cgroup != "" && len(d.cgroup.Children(d.cfg.Cgroup)) == 0 {
		_ = d.cgroup.Remove(ctx, d.cfg.Cgroup)
	}
	_, _ = os.Remove(d.cfg.Run), os.Remove(filepath.Dir(d.cfg.Run))
	return nil
}

func (d *Driver) sandboxes() string              { return filepath.Join(d.cfg.State, "vms") }
func (d *Driver) folder(id ids.SandboxID) string { return filepath.Join(d.sandboxes(), string(id)) }
func (d *Driver) room(id ids.SandboxID) string   { return filepath.Join(d.cfg.Run, string(id)) }
func (d *Driver) cgroupOf(id ids.SandboxID) string {
	return filepath.Join(d.cfg.Cgroup, string(id))
}

func (d *Driver) channel(id ids.SandboxID) driver.Channel {
	return driver.Channel{Socket: filepath.Join(d.room(id), sockChannel)}
}

// lock serialises the calls for one sandbox.
func (d *Driver) lock(id ids.SandboxID) func() {
	d.mu.Lock()
	m := d.locks[id]
	if m == nil {
		m = &sync.Mutex{}
		d.locks[id] = m
	}
	d.mu.Unlock()
	m.Lock()
	return m.Unlock
}

// note notes a sandbox that is about to be made, with a user of its own. Busy if its session has
// another one.
func (d *Driver) note(op string, id ids.SandboxID, r record) (record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok {
		return r, nil
	}
	if err := d.busy(op, r); err != nil {
		return r, err
	}
	user, err := d.users.take()
	if err != nil {
		return record{}, errs.E(op, errkind.NoCapacity, string(id), err)
	}
	r.User = user
	d.known[id] = r
	return r, nil
}

// busy says whether something else here is of the record's session or has its disk. The caller holds mu.
func (d *Driver) busy(op string, want record) error {
	if want.Session == "" {
		return nil // nobody's
	}
	for other, r := range d.known {
		if r.Session == want.Session {
			return errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here (%s)", r.Epoch, other)
		}
		if r.DiskImage == want.DiskImage {
			return errs.Errorf(op, errkind.Busy, "the disk is in use by %s", other)
		}
	}
	return nil
}

func (d *Driver) forget(id ids.SandboxID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok {
		d.users.give(r.User)
		delete(d.known, id)
	}
}

// fail gives an error its operation and keeps its kind.
func fail(op string, id ids.SandboxID, err error) error { return errs.Wrap(op, string(id), err) }
