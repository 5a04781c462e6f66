// Package hostagent owns everything on one host: sandboxes, the claim itself, disks, limits, last
// activity and the data plane. It guarantees that
//
//   - it acts on a session only by an exact match of generation and epoch, and only while its lease
//     holds, which it counts on its own clock from before the renewal was sent; fencing_test.go lists
//     every place that acts, and what it asks;
//   - after a lease that was lost, and at a start, nothing runs or begins until the host has compared
//     itself with what it owns and removed the compute of what it does not;
//   - a wake hands out the session's newest disk or refuses; it never makes a blank one for a
//     session that has files; ready means that the guest answered in this very epoch;
//   - a sleep is refused while there is work, in the same critical section that admits work, and is
//     answered only when the manifest is committed and no compute is left;
//   - everything made is in one inventory or found by the driver, whatever crashed: a start adopts
//     every live sandbox that scheduler's fresh and complete answer says is owned, and a sweep
//     removes compute that is not. No sweep removes a disk; only a delete does;
//   - a warm sandbox is nobody's until one wake claims it, which takes it for good: after a claim that
//     failed it is removed, and the wake goes on cold. There are never more of a template and tier than
//     the pool allows, and none outlives this process unclaimed, a lost lease, or a drain;
//   - what leaves a sandbox comes out of a link of its own, at the doors of this host's gate and nowhere
//     else: while the gate knows whose it is, the kernel lets the link through, and the lease holds, by the
//     kernel's clock. Whoever stops a sandbox ends that first, and leaves no link;
//   - a host that scheduler says was removed for good stops what runs here and ends: only files stay.
//
// Ordering: commands for one session run one at a time; those for different sessions at once.
// Redelivery: every command is idempotent by its epoch. Backpressure: at most Config.MaxWakes wakes
// run at once, more wait until their deadline.
package hostagent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/box"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/diskpool"
	"github.com/berth-dev/berth/services/hostagent/internal/fence"
	"github.com/berth-dev/berth/services/hostagent/internal/image"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

// Loader finds the image that a reference names: an OCI layout, an archive or a registry reference.
type Loader = image.Loader

// Preflight says in one clear sentence why this host cannot run sessions. It makes nothing.
func Preflight(cfg Config) error {
	if err := cfg.check(); err != nil {
		return err
	}
	if err := cfg.preflight(); err != nil {
		return err
	}
	if cfg.bare() {
		return nil
	}
	if st, err := os.Stat(cfg.Guest); err != nil || st.Mode()&0o111 == 0 {
		return errs.Errorf("check this host", errkind.Unavailable, "the guest agent %q is not there or not executable", cfg.Guest)
	}
	if err := diskpool.Preflight(cfg.pool(nil)); err != nil {
		return err
	}
	return disk.Preflight(filepath.Join(cfg.Dir, "disks"), cfg.Disk.Reserve)
}

// Run serves the host until ctx ends. conn is the identity host-<id>; load finds images (unused by
// the null driver); ready, when not nil, is called once sessions can be placed here. When ctx ends,
// running sandboxes stay for the next Run.
func Run(ctx context.Context, cfg Config, conn *bus.Conn, load Loader, log *slog.Logger, ready func()) error {
	if err := Preflight(cfg); err != nil {
		return err
	}
	h, err := open(ctx, cfg, conn, load, log)
	if err != nil {
		return err
	}
	return errors.Join(h.run(ctx, ready), h.close())
}

// open opens what the host keeps, in the order in which it is needed.
func open(ctx context.Context, cfg Config, conn *bus.Conn, load Loader, log *slog.Logger) (h *host, err error) {
	if log == nil {
		log = slog.Default()
	}
	log = log.With("host", cfg.Host)
	h = &host{
		cfg: cfg, id: ids.Host(cfg.Host), boot: string(ids.NewSandboxID()), conn: conn, log: log,
		lease: newLease(cfg.Margin, cfg.Fence == fenceStop), meters: newMeters(), wakes: make(chan struct{}, cfg.MaxWakes),
		ready: make(chan struct{}), removed: make(chan struct{}), rejoin: make(chan struct{}, 1), erase: make(chan struct{}, 1), retell: make(chan struct{}, 1), sweeping: make(chan struct{}, 1),
		sessions: map[ids.SessionKey]*session{}, bySand: map[ids.SandboxID]*session{}, oom: map[ids.SandboxID]time.Time{},
		limits: map[ids.SandboxID]map[driver.EventKind]time.Time{},
	}
	h.keeper, h.net = newKeeper(h), newNets(h)
	// Parts that are opened below may tell of something at once: a pool that is full, for one.
	h.ctx, h.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			h.cancel()
			err = errors.Join(err, h.close())
			h = nil
		}
	}()
	if h.key, err = hostKey(filepath.Join(cfg.Dir, "host.key")); err != nil {
		return h, err
	}
	if h.inv, err = inventory.Open(filepath.Join(cfg.Dir, "inventory.db")); err != nil {
		return h, err
	}
	h.net.begin(ctx)
	if err = h.load(); err != nil {
		return h, err
	}
	h.keeper.recall()
	if err = h.openFence(); err != nil {
		return h, err
	}
	if h.drv, h.caps, err = openDrivers(ctx, cfg, cfg.sandboxes(log), h.runs); err != nil {
		return h, err
	}
	h.bare = cfg.bare()
	if err = h.openDisks(ctx, load); err != nil {
		return h, err
	}
	if err = h.net.open(); err != nil {
		return h, err
	}
	if err = h.proveTiers(ctx); err != nil {
		return h, err
	}
	feed := grant.NewFeed(h.fetchKeys, func() time.Duration { return h.lease.now() })
	h.box, err = box.New(box.Config{Bus: conn.NATS(), Host: h.id, Key: h.key, Grants: feed, Log: log, Ended: h.meters.stream})
	return h, err
}

// openFence takes over the watchdog, or starts one, before anything can run here.
func (h *host) openFence() (err error) {
	if h.cfg.bare() {
		return nil
	}
	if h.fence, err = fence.Start(h.cfg.Dir, h.cfg.sandboxes(nil).cgroup(), h.log); err != nil {
		return errs.E("fence this host", errkind.Unavailable, string(h.id), err)
	}
	h.lease.fence = h.fence
	return nil
}

func (h *host) openDisks(ctx context.Context, load Loader) error {
	if !hasDisk(h.caps) {
		mem := newNullDisks()
		h.disks, h.saves = mem, nullSaves{mem, h}
		h.cfg.Capacity = h.cfg.Capacity.measured(1 << 50)
		return nil
	}
	store, err := h.openPool(ctx)
	if err != nil {
		return err
	}
	h.disks = store
	if err := h.openSaves(ctx, store); err != nil {
		return err
	}
	if h.images, err = image.Open(cmp.Or(h.cfg.ImageStore, filepath.Join(h.cfg.Dir, "images")), load); err != nil {
		return err
	}
	h.unpackImages(ctx)
	sp, err := store.Space()
	if err != nil {
		return err
	}
	h.cfg.Capacity = h.cfg.Capacity.measured(sp.Room())
	return nil
}

// openPool opens the file system of the images, and the store of images on it.
func (h *host) openPool(ctx context.Context) (store *disk.Store, err error) {
	if h.pool, err = diskpool.Open(ctx, h.cfg.pool(h.log)); err != nil {
		return nil, err
	}
	if why := h.pool.Missing(); why != "" {
		h.log.Warn("disks are copied for every snapshot", "reason", why)
	}
	return disk.Open(ctx, disk.Config{
		Dir: h.pool.Dir(), Outer: h.pool.Outer(), Reflink: h.pool.Reflink(),
		Reserve: h.cfg.Disk.Reserve, HighWater: float64(h.cfg.Disk.EvictAbove) / 100,
		Blanks: disk.Blanks{Sizes: h.cfg.Disk.Sizes, Ready: h.cfg.Disk.Ready},
		Frozen: h.poolFull, Thawed: func(k disk.Key) { h.poolFull(k, "The host's disk pool has space again: programs go on.") },
		MarkFrozen: h.markFrozen, Log: h.log,
	})
}

// poolFull tells the user of a session whose writers wait because the host's pool has no space.
func (h *host) poolFull(k disk.Key, reason string) {
	h.mu.Lock()
	s := h.sessions[k.Session]
	h.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	go h.tell(refOf(rec), telling{what: "quota", reason: reason, again: true})
}

// unpackImages has the named images ready before the first session asks for one, which would wait
// for it. One that cannot be had now is tried again by the wake that needs it.
func (h *host) unpackImages(ctx context.Context) {
	for name, ref := range h.cfg.Images {
		began := time.Now()
		if _, err := h.images.Ensure(ctx, ref); err != nil {
			h.log.Warn("image is not ready", "image", name, "error", err)
			continue
		}
		h.log.Info("image is ready", "image", name, "took", time.Since(began))
	}
}

// load reads what an earlier process knew.
func (h *host) load() error {
	recs, err := h.inv.All()
	if err != nil {
		return err
	}
	for _, r := range recs {
		s := h.session(r.Session)
		s.rec = r
		s.st = core.State{
			Phase: core.Phase(r.Phase), Generation: r.Generation, Epoch: r.Epoch,
			Spent: r.Spent, Slept: r.Slept, LastActivity: r.LastActivity,
		}
		s.count()
	}
	return nil
}

// stopTime is what operations under way get to end when the process is stopped; what does not end
// goes on at the next start.
const stopTime = 10 * time.Second

func (h *host) run(ctx context.Context, ready func()) error {
	defer h.cancel()
	svc, err := h.conn.Serve(ctx, bus.ServiceConfig{Name: "host", Description: "everything on one host", Metadata: map[string]string{"host": string(h.id)}})
	if err != nil {
		return err
	}
	if err := h.endpoints(svc); err != nil {
		return errors.Join(err, svc.Stop(ctx))
	}
	bg, stopBg := context.WithCancel(ctx)
	defer stopBg()
	if err := h.begin(bg); h.wasRemoved(err) {
		stopBg()
		return h.dismiss(svc)
	} else if err != nil {
		return errors.Join(err, svc.Stop(bg))
	}
	h.ops.Go(func() { h.watch(bg) })
	h.ops.Go(func() { h.snapshots(bg) })
	h.ops.Go(func() { h.quotas(bg) })
	h.ops.Go(func() { h.erasures(bg) })
	h.ops.Go(func() { h.looksAtHealth(bg) })
	h.ops.Go(func() { h.proveLater(bg) })
	close(h.ready)
	if err := svc.Announce(); err != nil {
		h.log.Warn("calls that an earlier process took are asked again later", "error", err)
	}
	if ready != nil {
		ready()
	}
	select {
	case <-ctx.Done():
		return h.finish(svc)
	case <-h.removed:
		stopBg()
		return h.dismiss(svc)
	}
}

// begin joins, removes what runs and is not owned, and only then lets run, and takes over, what is;
// from then on, beside the path, it keeps the lease and cleans the rest.
func (h *host) begin(ctx context.Context) error {
	keep := sync.OnceFunc(func() { h.ops.Go(func() { h.keepLease(ctx) }) })
	var own ownership
	err := h.persist(ctx, func(context.Context) (err error) {
		if own, err = h.join(ctx); err == nil {
			keep()
			err = h.settle(ctx, own)
		}
		if err != nil && ctx.Err() == nil {
			h.log.Warn("this host does not know yet what it owns", "error", err)
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := h.persist(ctx, func(ctx context.Context) error { return h.recover(ctx, own) }); err != nil {
		return err
	}
	if h.net.links != nil { // from here on it is known what is bound
		h.ops.Go(func() { h.net.keepLease(ctx) })
		h.ops.Go(func() { h.net.keepGate(ctx) })
		h.net.renewed()
	}
	// What was subscribed to must have reached the bus before anybody is told that this host is ready.
	if err := h.conn.NATS().FlushTimeout(callTime); err != nil {
		h.log.Warn("the bus is not reachable at this moment", "error", err)
	}
	h.ops.Go(func() {
		if err := h.sweep(ctx, own); err != nil && ctx.Err() == nil {
			h.log.Warn("the first sweep is not complete", "error", err)
		}
		h.tellFacts(ctx, true)
		h.sweeps(ctx)
	})
	return nil
}

// finish lets requests and operations end within stopTime.
func (h *host) finish(svc *bus.Service) error {
	ctx, stop := context.WithTimeout(context.Background(), stopTime)
	defer stop()
	h.keeper.shut("this host ends")
	err := svc.Stop(ctx)
	if rerr := h.keeper.retireAll(ctx); rerr != nil { // the next process finds what is left
		h.log.Warn("warm sandboxes are left", "error", rerr)
	}
	h.box.Close()
	done := make(chan struct{})
	go func() { h.ops.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		h.cancel()
		<-done
	}
	return err
}

// close lets go of everything; sandboxes run on.
func (h *host) close() error {
	var out []error
	if h.box != nil {
		h.box.Close()
	}
	for _, s := range h.all() {
		s.mu.Lock()
		if s.sb != nil && s.sb.guest != nil {
			out = append(out, s.sb.guest.Close())
		}
		s.sb = nil
		s.mu.Unlock()
	}
	h.keeper.close()
	if h.drv != nil {
		out = append(out, h.drv.Close())
	}
	out = append(out, h.net.close())
	if h.fence != nil {
		out = append(out, h.fence.Close())
	}
	if h.disks != nil {
		out = append(out, h.disks.Close())
	}
	if h.pool != nil {
		out = append(out, h.pool.Close())
	}
	if h.bucket != nil {
		out = append(out, h.bucket.Close())
	}
	if h.inv != nil {
		out = append(out, h.inv.Close())
	}
	return errors.Join(out...)
}
