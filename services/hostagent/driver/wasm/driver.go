// Package wasm makes sandboxes that run WebAssembly modules and nothing else.
//
// It guarantees, beyond the contract of package driver: that no program of the machine's own kind ever
// starts from a session's disk or its image, and none but this driver's own runs in a sandbox; that
// the first process has no capability, a user namespace with ids that no other sandbox of this machine
// has, and nothing of the host in sight but the run folder, /dev/null and that program; that machine
// code of modules which more than one sandbox uses was compiled by a process of this driver that saw
// that one module alone, into a folder that no sandbox writes; and that everything made bears the
// sandbox's id, so that Stop and List find it without any record. A sandbox that waits for a session has
// nothing of the host's files in sight, and no disk of another session is held by it.
//
// The root is the image with the session's disk on top, as in other tiers, so that a disk moves between
// them. It is mounted in the sandbox's own mount namespace alone: when the last process is gone,
// nothing holds the disk. What runs inside is package guest/wasm.
package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
	"github.com/berth-dev/berth/services/hostagent/internal/idrange"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Config of the driver. NewConfig gives the defaults.
type Config struct {
	// State holds the sandboxes' folders.
	State string
	// Program is berth-wasm, JS the JavaScript tool; sandboxes have no such tool if JS is empty.
	Program string
	JS      string
	// Cache holds the machine code of modules. Drivers may share it.
	Cache string
	// FirstID, IDRanges and IDs: user ids, shared by all drivers of the machine as in package containerd.
	FirstID  uint32
	IDRanges uint32
	IDs      string
	// Cgroup is the parent of all sandboxes' cgroups.
	Cgroup string
	// CallTime and CallOutput bound one call; 0: no bound of this tier.
	CallTime   time.Duration
	CallOutput uint64
	// OpenFiles of one call where the spec names no number.
	OpenFiles uint64
	// Ahead: after a call of the JavaScript tool the next one's process is started before it is asked for.
	Ahead bool
	Log   *slog.Logger
}

// NewConfig returns the defaults for a host whose state is in dir and whose programs are in bin.
func NewConfig(dir, bin string) Config {
	sum := sha256.Sum256([]byte(dir))
	return Config{
		State: dir, Program: filepath.Join(bin, "berth-wasm"), JS: filepath.Join(bin, "js.wasm"), Cache: filepath.Join(dir, "cache"),
		FirstID: 1 << 20, IDRanges: 16384, IDs: "/run/berth/ids", Cgroup: "berth-" + hex.EncodeToString(sum[:4]),
		CallTime: 5 * time.Minute, CallOutput: 64 << 20, OpenFiles: 256, Ahead: true,
	}
}

// Driver implements driver.Driver, Watcher, Meter, Freezer, Checker, Snapshotter and Preparer.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	cgroup cgroup.Tree
	run    steps.Runner
	code   *code

	mu    sync.Mutex
	locks map[ids.SandboxID]*sync.Mutex
	known map[ids.SandboxID]record
	warm  map[ids.SandboxID]*first // first processes that this driver started for nobody, and that wait
	ends  map[ids.SandboxID]end    // of first processes that this driver started and saw end
	news  map[chan struct{}]bool
	slots idrange.Claims
}

var (
	_ driver.Driver      = (*Driver)(nil)
	_ driver.Watcher     = (*Driver)(nil)
	_ driver.Meter       = (*Driver)(nil)
	_ driver.Freezer     = (*Driver)(nil)
	_ driver.Checker     = (*Driver)(nil)
	_ driver.Snapshotter = (*Driver)(nil)
	_ driver.Preparer    = (*Driver)(nil)
)

// Open takes over what an earlier driver left running, and begins to compile the JavaScript tool if
// that was never done.
func Open(_ context.Context, cfg Config) (*Driver, error) {
	const op = "open wasm driver"
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
		cfg: cfg, log: cfg.Log, cgroup: tree,
		locks: map[ids.SandboxID]*sync.Mutex{}, known: map[ids.SandboxID]record{}, ends: map[ids.SandboxID]end{},
		news: map[chan struct{}]bool{}, warm: map[ids.SandboxID]*first{},
		slots: idrange.Claims{Dir: cfg.IDs, Owner: "wasm-" + cfg.Cgroup, Count: cfg.IDRanges},
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(d.sandboxes(), 0o700); err != nil {
		return nil, errs.E(op, errkind.Internal, cfg.State, err)
	}
	if err := d.recall(); err != nil {
		return nil, errs.E(op, errkind.Internal, cfg.State, err)
	}
	if d.code, err = openCode(cfg, d.compileUser, d.log); err != nil {
		return nil, errs.E(op, errkind.Internal, cfg.Cache, err)
	}
	if cfg.JS != "" {
		d.code.want(cfg.JS)
	}
	return d, nil
}

// recall reads the records of sandboxes that an earlier process made.
func (d *Driver) recall() error {
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return err
	}
	used := map[uint32]bool{}
	for _, e := range entries {
		r, err := readRecord(d.folder(ids.SandboxID(e.Name())))
		if err != nil {
			continue // half-made: List shows it
		}
		d.known[ids.SandboxID(e.Name())] = r
		used[r.Slot] = true
	}
	return d.slots.Recall(used)
}

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	c := driver.Capabilities{
		Isolated: true, UserNamespace: true, Disk: true, Memory: true, PIDs: true, CPU: true, OpenFiles: true,
		Adopts: true, Holds: true, Warm: true, Missing: []string{"a limit on disk bandwidth"},
	}
	if d.cfg.JS == "" {
		c.Missing = append(c.Missing, "the JavaScript tool")
	}
	return map[driver.Tier]driver.Capabilities{driver.WASM: c}
}

// Snapshot implements driver.Snapshotter: it compiles the modules of the image and the JavaScript tool,
// and returns when that is done.
func (d *Driver) Snapshot(ctx context.Context, t driver.Tier, img driver.Image, _ driver.Limits) error {
	const op = "compile modules"
	if t != driver.WASM {
		return errs.Errorf(op, errkind.Unimplemented, "this driver has no tier %.32q", t)
	}
	paths := imageModules(img.Lower)
	if d.cfg.JS != "" {
		paths = append(paths, d.cfg.JS)
	}
	for _, p := range paths {
		if err := d.code.wait(ctx, p); err != nil {
			return errs.E(op, errkind.Internal, filepath.Base(p), err)
		}
	}
	return nil
}

// Close implements driver.Driver: sandboxes go on, but for those that wait for this driver's order.
func (d *Driver) Close() error {
	d.code.close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.warm {
		_ = f.sock.Close()
	}
	clear(d.warm)
	if len(d.known) > 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if len(d.cgroup.Children(d.cfg.Cgroup)) == 0 {
		_ = d.cgroup.Remove(ctx, d.cfg.Cgroup) // another driver's sandbox may have come meanwhile
	}
	return nil
}

func (d *Driver) sandboxes() string                { return filepath.Join(d.cfg.State, "sandboxes") }
func (d *Driver) folder(id ids.SandboxID) string   { return filepath.Join(d.sandboxes(), string(id)) }
func (d *Driver) cgroupOf(id ids.SandboxID) string { return filepath.Join(d.cfg.Cgroup, string(id)) }
func (d *Driver) channel(id ids.SandboxID) driver.Channel {
	return driver.Channel{Stdin: filepath.Join(d.folder(id), stdinFile), Stdout: filepath.Join(d.folder(id), stdoutFile)}
}

// firstID is the host id that root of a sandbox has.
func (d *Driver) firstID(slot uint32) uint32 { return d.cfg.FirstID + slot*idRange }

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

// claim notes a sandbox that is about to be made, with ids of its own. Busy if its session has
// another one.
func (d *Driver) claim(spec driver.Spec) (record, error) {
	const op = "create sandbox"
	id := spec.ID()
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok {
		return r, nil
	}
	if err := d.busy(op, spec.Session); err != nil {
		return record{}, err
	}
	return d.note(op, id, record{Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch})
}

// busy refuses what would give a session a second sandbox. d.mu is held.
func (d *Driver) busy(op string, s ids.SessionKey) error {
	for other, r := range d.known {
		if r.Session == s {
			return errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here (%s)", r.Epoch, other)
		}
	}
	return nil
}

// note notes a sandbox with ids of its own. d.mu is held.
func (d *Driver) note(op string, id ids.SandboxID, r record) (record, error) {
	slot, err := d.slots.Take()
	if err != nil {
		return record{}, errs.E(op, errkind.NoCapacity, string(id), err)
	}
	r.Slot = slot
	d.known[id] = r
	return r, nil
}

// lockOf locks the sandbox that an epoch of a session has or would have: the one that was claimed for it,
// or that of its own name.
func (d *Driver) lockOf(spec driver.Spec) (ids.SandboxID, func()) {
	for {
		id := d.nameOf(spec)
		unlock := d.lock(id)
		if d.nameOf(spec) == id {
			return id, unlock
		}
		unlock() // it was claimed, or removed, meanwhile
	}
}

func (d *Driver) nameOf(spec driver.Spec) ids.SandboxID {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, r := range d.known {
		if r.of(spec) {
			return id
		}
	}
	return spec.ID()
}

// compileUser is a user of the host for one compilation.
func (d *Driver) compileUser() (uint32, func(), error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	slot, err := d.slots.Take()
	return d.firstID(slot), func() { d.slots.Give(slot) }, err
}

func (d *Driver) forget(id ids.SandboxID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok {
		d.slots.Give(r.Slot)
	}
	if f := d.warm[id]; f != nil {
		_ = f.sock.Close()
	}
	delete(d.warm, id)
	delete(d.known, id)
	delete(d.ends, id)
}

// fail gives an error its operation and keeps its kind.
func fail(op string, id ids.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	kind := errs.Kind(err)
	switch {
	case errors.Is(err, unix.EBUSY):
		kind = errkind.Busy
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EAGAIN):
		kind = errkind.NoCapacity
	}
	return errs.E(op, kind, string(id), err)
}
