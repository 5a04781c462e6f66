// Package containerd makes sandboxes with containerd: tier container on runc, tier gvisor on runsc,
// tier kata on an installed Kata Containers, or whatever runtime handler Config.Handlers names.
//
// It guarantees, beyond the contract of package driver: a root that is the image with the session's
// disk on top and that no other sandbox can reach; in tier container a user namespace with ids that
// no other sandbox of this driver has; the limits on a parent cgroup that the runtime cannot widen;
// that everything made bears the sandbox's id, so that Stop and List find it without any record;
// and that the death of containerd ends no sandbox. A private containerd dies with its host agent
// and is started again by the next one.
//
// In tiers container and gvisor it prepares sandboxes (driver.Preparer): one of nobody runs on an empty
// root, with everything else that it will have, and gets a session's root when it is claimed; see warm.go.
//
// A tier whose parts are not on this host is absent, with the reason, and the others go on.
//
// /tmp and /run of a sandbox are in memory, charged to its limit, and do not outlive it. In tier kata
// the session's disk and the image are block devices of the machine, which alone mounts them; see
// kata.go.
package containerd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
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
	"github.com/berth-dev/berth/services/hostagent/internal/idrange"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Config of the driver. NewConfig gives the defaults.
type Config struct {
	// State holds the sandboxes' folders and the private containerd's data.
	State string
	// Run holds sockets and the mount points of roots; its path must be short and open to all.
	Run string
	// Runtimes is the folder with containerd, runc, runsc and their shims (tools/runtimes).
	Runtimes string
	// Socket of an existing containerd; empty starts a private one.
	Socket string
	// Tiers to offer.
	Tiers []driver.Tier
	// FirstID is the first host id for user namespaces, IDRanges how many ranges of 65536 follow.
	// Drivers on one machine share them through the folder IDs, which is the same for all.
	FirstID  uint32
	IDRanges uint32
	IDs      string
	// Cgroup is the parent of all sandboxes' cgroups; two drivers on one machine must differ.
	Cgroup string
	// GVisor are further flags of runsc, or other values of those set here.
	GVisor map[string]string
	// Handlers are the runtime handlers of tiers whose runtime is installed apart from Berth: kata.
	Handlers map[driver.Tier]Handler
	Log      *slog.Logger
}

// NewConfig returns the defaults for a host whose state is in dir.
func NewConfig(dir, runtimes string) Config {
	sum := sha256.Sum256([]byte(dir))
	name := hex.EncodeToString(sum[:4])
	return Config{
		State: dir, Runtimes: runtimes, Run: filepath.Join("/run/berth", name),
		Tiers: []driver.Tier{driver.Container, driver.GVisor}, FirstID: 1 << 20, IDRanges: 16384, IDs: "/run/berth/ids",
		Cgroup: "berth-" + name,
	}
}

// Names of the binaries in Config.Runtimes.
const (
	binContainerd = "containerd"
	binRunc       = "runc"
	binRunsc      = "runsc"
	binShimRunc   = "containerd-shim-berthrunc-v1"
	binShimRunsc  = "containerd-shim-berthrunsc-v1"
)

// Driver implements driver.Driver, Preparer, Watcher, Meter, Freezer, Checker, Resizer and Networker.
type Driver struct {
	cfg    Config
	log    *slog.Logger
	cgroup cgroup.Tree
	ctrd   *client
	daemon *daemon // nil with an existing containerd
	run    steps.Runner
	// absent says of a tier why this host cannot run it.
	absent map[driver.Tier]string

	mu    sync.Mutex
	locks map[ids.SandboxID]*sync.Mutex
	known map[ids.SandboxID]record
	ran   map[ids.SandboxID]int // seen running, with this first process
	warm  map[ids.SandboxID]*warmed
	slots idrange.Claims
}

var (
	_ driver.Driver  = (*Driver)(nil)
	_ driver.Watcher = (*Driver)(nil)
	_ driver.Meter   = (*Driver)(nil)
	_ driver.Freezer = (*Driver)(nil)
	_ driver.Checker = (*Driver)(nil)

	_ driver.Preparer  = (*Driver)(nil)
	_ driver.Resizer   = (*Driver)(nil)
	_ driver.Networker = (*Driver)(nil)
)

// Open starts or finds containerd and takes over what an earlier driver left running.
func Open(ctx context.Context, cfg Config) (*Driver, error) {
	const op = "open containerd driver"
	if err := preflight(cfg); err != nil {
		return nil, err
	}
	absent, _ := absentTiers(cfg)
	tree, err := cgroup.Detect()
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	if cfg.State, err = filepath.Abs(cfg.State); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", err)
	}
	d := &Driver{
		cfg: cfg, log: cfg.Log, cgroup: tree, absent: absent,
		locks: map[ids.SandboxID]*sync.Mutex{}, known: map[ids.SandboxID]record{}, ran: map[ids.SandboxID]int{},
		warm:  map[ids.SandboxID]*warmed{},
		slots: idrange.Claims{Dir: cfg.IDs, Owner: cfg.Cgroup, Count: cfg.IDRanges},
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if err := d.folders(); err != nil {
		return nil, errs.E(op, errkind.Internal, cfg.State, err)
	}
	if err := d.recall(); err != nil {
		return nil, errs.E(op, errkind.Internal, cfg.State, err)
	}
	socket := cfg.Socket
	if socket == "" {
		if d.daemon, err = startDaemon(ctx, cfg, d.log); err != nil {
			return nil, errs.E(op, errkind.Unavailable, cfg.State, err)
		}
		socket = d.daemon.socket()
	}
	if d.ctrd, err = dial(socket); err == nil {
		err = d.ctrd.ping(ctx)
	}
	if err != nil {
		_ = d.Close()
		return nil, errs.E(op, errkind.Unavailable, socket, err)
	}
	return d, nil
}

// folders makes the driver's folders. The roots are in Run: a sandbox's first process has no rights
// on the host on its way there, and State may lie where only root may go.
func (d *Driver) folders() error {
	for _, dir := range []string{d.sandboxes(), filepath.Join(d.cfg.State, "runsc")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := passage(d.roots()); err != nil {
		return err
	}
	if err := d.writeRunscConfigs(); err != nil {
		return err
	}
	return mounts.Share(d.roots())
}

// passage makes dir and what is missing above it so that everybody may pass through, whatever the
// umask; a folder above that is closed to others is an error.
func passage(dir string) error {
	if dir == "/" || dir == "." {
		return nil
	}
	if err := passage(filepath.Dir(dir)); err != nil {
		return err
	}
	err := os.Mkdir(dir, 0o711)
	if err == nil {
		return os.Chmod(dir, 0o711)
	}
	st, serr := os.Stat(dir)
	switch {
	case serr != nil:
		return err
	case st.Mode()&0o001 == 0:
		return fmt.Errorf("%s is closed to others: roots of sandboxes cannot be in it", dir)
	}
	return nil
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
		d.recallRan(ids.SandboxID(e.Name()))
	}
	return d.slots.Recall(used)
}

// Capabilities implements driver.Driver.
func (d *Driver) Capabilities() map[driver.Tier]driver.Capabilities {
	out := map[driver.Tier]driver.Capabilities{}
	for _, t := range d.cfg.Tiers {
		c := driver.Capabilities{
			Absent: d.absent[t],
			Native: true, Isolated: true, Disk: true, Memory: true, PIDs: true, CPU: true, OpenFiles: true, Adopts: true, Holds: true,
			Network: true, DiskIO: d.cgroup.IO(), UserNamespace: t == driver.Container, OOMKillsAll: t == driver.GVisor,
		}
		_, c.Warm = warmTiers[t]
		if t == driver.Kata {
			c.OwnKernel, c.RawDisk, c.Accel = true, true, "kvm"
		}
		if !c.DiskIO {
			c.Missing = append(c.Missing, "a limit on disk bandwidth (cgroup v2 with its controller io)")
		}
		if !d.cgroup.V2() {
			c.Missing = append(c.Missing, "cgroup v2")
		}
		out[t] = c
	}
	return out
}

// Close implements driver.Driver: it ends the private containerd, not the sandboxes.
func (d *Driver) Close() error {
	if d.ctrd != nil {
		d.ctrd.close()
	}
	if d.daemon != nil {
		d.daemon.stop()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.warm { // the next driver removes them
		w.close()
	}
	clear(d.warm)
	if len(d.known) > 0 {
		return nil
	}
	// runsc binds an empty network namespace there and leaves it.
	points, err := mounts.Below(filepath.Join(d.cfg.State, "runsc"))
	for _, p := range points {
		err = errors.Join(err, mounts.Unshare(p))
	}
	if err := errors.Join(err, mounts.Unshare(d.roots())); err != nil {
		return errs.E("close containerd driver", errkind.Busy, d.cfg.State, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if len(d.cgroup.Children(d.cfg.Cgroup)) == 0 {
		_ = d.cgroup.Remove(ctx, d.cfg.Cgroup)
	}
	if d.cfg.Socket == "" {
		_ = os.RemoveAll(d.cfg.Run)
	}
	_, _ = os.Remove(d.roots()), os.Remove(d.cfg.Run)
	return nil
}

func (d *Driver) sandboxes() string              { return filepath.Join(d.cfg.State, "sandboxes") }
func (d *Driver) folder(id ids.SandboxID) string { return filepath.Join(d.sandboxes(), string(id)) }
func (d *Driver) roots() string                  { return filepath.Join(d.cfg.Run, "roots") }

// room is the folder around a sandbox's root, which only its own first process may pass: users of
// the host must not read what a session left open to all of its own.
func (d *Driver) room(id ids.SandboxID) string { return filepath.Join(d.roots(), string(id)) }
func (d *Driver) root(id ids.SandboxID) string { return filepath.Join(d.room(id), "root") }

// slot is a folder that a warm sandbox sees, slotRoot one in it where its root appears when it is claimed.
func (d *Driver) slot(id ids.SandboxID) string     { return filepath.Join(d.room(id), "slot") }
func (d *Driver) slotRoot(id ids.SandboxID) string { return filepath.Join(d.slot(id), "root") }

func (d *Driver) cgroupOf(id ids.SandboxID) string { return filepath.Join(d.cfg.Cgroup, string(id)) }
func (d *Driver) bin(name string) string           { return filepath.Join(d.cfg.Runtimes, name) }
func (d *Driver) runscConfig(warm, linked bool) string {
	name := "config"
	if warm {
		name = "warm"
	}
	if linked {
		name += "-network"
	}
	return filepath.Join(d.cfg.State, "runsc", name+".toml")
}
func (d *Driver) channel(id ids.SandboxID) driver.Channel {
	return driver.Channel{Stdin: filepath.Join(d.folder(id), "stdin"), Stdout: filepath.Join(d.folder(id), "stdout")}
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
	for other, r := range d.known {
		if r.Session == spec.Session {
			return r, errs.Errorf(op, errkind.Busy, "the session has compute of epoch %s here (%s)", r.Epoch, other)
		}
	}
	slot, err := d.slots.Take()
	if err != nil {
		return record{}, errs.E(op, errkind.NoCapacity, string(id), err)
	}
	r := record{Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch, Tier: spec.Tier, Slot: slot, OpenFiles: spec.Limits.OpenFiles}
	if spec.Tier == driver.GVisor {
		r.PIDs = spec.Limits.PIDs
	}
	d.known[id] = r
	return r, nil
}

func (d *Driver) forget(id ids.SandboxID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r, ok := d.known[id]; ok {
		d.slots.Give(r.Slot)
		delete(d.known, id)
		delete(d.ran, id)
	}
}

// firstID is the host id that root of a tier-container sandbox has.
func (d *Driver) firstID(slot uint32) uint32 { return d.cfg.FirstID + slot*idRange }

// fail gives an error its operation and keeps its kind.
func fail(op string, id ids.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return errs.E(op, kindOf(err), string(id), err)
}
