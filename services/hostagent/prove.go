package hostagent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// A host offers only tiers that it has proved: a sandbox of each was made, with a disk of its own, its
// guest answered, and it was taken away again. It belongs to a driver of its own, whose cgroup no
// lease freezes, and holds nothing of anybody. What was proved is remembered until a runtime, the guest
// or the kernel changes; what failed is tried again at the next start.

// proveTime bounds the proof of all tiers, slowHello how long a machine may take to boot in one.
const (
	proveTime = 3 * time.Minute
	slowHello = 90 * time.Second
)

// proofs is the content of proved.json.
type proofs struct {
	// Of names kernel, runtimes and guest that were proved.
	Of    string        `json:"of"`
	Tiers []driver.Tier `json:"tiers"`
}

func (h *host) proofFile() string { return filepath.Join(h.cfg.Dir, "proved.json") }

// recall reads what was proved of the runtimes that are here now.
func (h *host) recall() proofs {
	known, of := readProofs(h.proofFile()), provable(h.cfg)
	if known.Of != of {
		return proofs{Of: of}
	}
	return known
}

// proveTiers finds out which tiers this host offers at once. What takes long to prove, since a machine
// has to boot, is left for proveLater, unless nothing else is there to offer.
func (h *host) proveTiers(ctx context.Context) error {
	can, err := offered(h.cfg.Tiers, h.caps)
	if h.cfg.bare() {
		h.tiers.offer(can, nil)
		return err
	}
	known := h.recall()
	var now, later []driver.Tier
	for t, c := range h.caps {
		if c.Absent == opens {
			later = append(later, t)
		}
	}
	if err != nil && len(later) == 0 {
		return err
	}
	for _, t := range can {
		switch {
		case slices.Contains(known.Tiers, t):
		case slices.Contains(quickTiers, t):
			now = append(now, t)
		default:
			later = append(later, t)
		}
	}
	h.tiers.offer(can, append(slices.Clone(now), later...))
	h.proveAll(ctx, now)
	if len(h.tiers.offered()) == 0 {
		for _, t := range later {
			h.proveOne(ctx, t)
		}
	}
	if len(h.tiers.offered()) > 0 {
		return nil
	}
	return errs.Errorf("start hostagent", errkind.Unavailable, "this host can run none of the tiers %v: %v", h.cfg.Tiers, lacking(h.abilities()))
}

// proveLater proves what waits for it, one after the other, and has scheduler hear of each; then it
// makes what sandboxes of the offered tiers start from.
func (h *host) proveLater(ctx context.Context) {
	for _, t := range h.tiers.toProve() {
		if h.proveOne(ctx, t); ctx.Err() != nil {
			return
		}
		h.askRejoin()
	}
	for _, t := range h.tiers.offered() {
		h.makeAhead(ctx, t)
	}
}

// openLook is how often a driver is looked at that is being opened.
const openLook = 100 * time.Millisecond

// proveOne proves a tier as soon as its driver is open, unless that was remembered.
func (h *host) proveOne(ctx context.Context, t driver.Tier) {
	absent := func() string {
		c := h.drv.Capabilities()[t]
		return cmp.Or(c.Absent, h.net.bars(c))
	}
	for h.drv != nil && absent() == opens {
		select {
		case <-ctx.Done():
			return
		case <-time.After(openLook):
		}
	}
	switch {
	case h.drv != nil && absent() != "":
		h.tiers.settle(t, errors.New(absent()))
	case slices.Contains(h.recall().Tiers, t):
		h.tiers.settle(t, nil)
	default:
		h.proveAll(ctx, []driver.Tier{t})
	}
}

// proveAll proves tiers, and remembers those that came up.
func (h *host) proveAll(ctx context.Context, todo []driver.Tier) {
	if len(todo) == 0 {
		return
	}
	began := time.Now()
	pctx, cancel := context.WithTimeout(ctx, proveTime)
	defer cancel()
	prove := h.proof
	if prove == nil {
		prove = h.prove
	}
	failed := prove(pctx, todo)
	if ctx.Err() != nil {
		return // the host ends: nothing was found out
	}
	known := h.recall()
	for _, t := range todo {
		h.tiers.settle(t, failed[t])
		if err := failed[t]; err != nil {
			h.log.Warn("this host does not offer a tier", "tier", t, "reason", err)
		} else if !slices.Contains(known.Tiers, t) {
			known.Tiers = append(known.Tiers, t)
		}
	}
	h.log.Info("proved what this host runs", "tiers", known.Tiers, "took", time.Since(began))
	if err := writeProofs(h.proofFile(), known); err != nil {
		h.log.Warn("cannot note which tiers were proved", "error", err)
	}
}

func readProofs(path string) (p proofs) {
	b, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(b, &p) != nil {
		return proofs{}
	}
	return p
}

func writeProofs(path string, p proofs) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// provable names what a proof depends on: the kernel, everything that tools/runtimes made, the guest,
// and what is installed apart from Berth.
func provable(c Config) string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	sum := sha256.New()
	fmt.Fprintln(sum, unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:]), c.Socket)
	var files []string
	for _, pattern := range []string{"*", "*/*", "../microvm/*", "../wasm/*"} {
		found, _ := filepath.Glob(filepath.Join(c.Runtimes, pattern))
		files = append(files, found...)
	}
	for _, program := range []string{"qemu-system-x86_64", "qemu-system-aarch64", "containerd-shim-kata-v2"} {
		if path, err := exec.LookPath(program); err == nil {
			files = append(files, path)
		}
	}
	for _, t := range slices.Sorted(maps.Keys(c.Handlers)) {
		fmt.Fprintln(sum, t, c.Handlers[t])
		files = append(files, c.Handlers[t].Shim, c.Handlers[t].Config)
	}
	for _, f := range append(files, c.Guest, "/dev/kvm") {
		if st, err := os.Stat(f); err == nil && !st.IsDir() {
			when := st.ModTime().UnixNano()
			if st.Mode()&os.ModeDevice != 0 {
				when = 0
			}
			fmt.Fprintln(sum, f, st.Size(), when)
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// proveDir is where a proof has everything that it makes.
func (c Config) proveDir() string { return filepath.Join(c.Dir, "prove") }

// prove makes one sandbox of each tier. What an earlier proof left is removed first.
func (h *host) prove(ctx context.Context, tiers []driver.Tier) map[driver.Tier]error {
	out := map[driver.Tier]error{}
	all := func(err error) map[driver.Tier]error {
		for _, t := range tiers {
			out[t] = errors.Join(out[t], err)
		}
		return out
	}
	dir := h.cfg.proveDir()
	if err := errors.Join(os.MkdirAll(dir, 0o711), os.Chmod(dir, 0o711)); err != nil {
		return all(err)
	}
	d, caps, err := openDrivers(ctx, h.cfg, h.cfg.proving(h.log, tiers...), nil)
	if err != nil {
		return all(err)
	}
	store, err := disk.Open(ctx, disk.Config{Dir: filepath.Join(dir, "disks"), Log: h.log})
	if err != nil {
		return all(errors.Join(err, d.Close()))
	}
	p := &prover{h: h, drv: d, caps: caps, disks: store}
	if err := p.clear(ctx); err != nil {
		return all(errors.Join(err, store.Close(), d.Close()))
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, t := range tiers {
		wg.Go(func() {
			err := p.prove(ctx, t)
			mu.Lock()
			defer mu.Unlock()
			out[t] = err
		})
	}
	wg.Wait()
	if err := errors.Join(p.clear(context.WithoutCancel(ctx)), store.Close(), d.Close()); err != nil {
		h.log.Warn("what was made to prove tiers is not all gone", "error", err)
		return out
	}
	if err := os.RemoveAll(dir); err != nil {
		h.log.Warn("what was made to prove tiers is not all gone", "error", err)
	}
	return out
}

// prover has what a proof uses up.
type prover struct {
	h     *host
	drv   driver.Driver
	caps  map[driver.Tier]driver.Capabilities
	disks *disk.Store
}

// clear removes everything that a proof made.
func (p *prover) clear(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopWait)
	defer cancel()
	found, err := p.drv.List(ctx)
	for _, f := range found {
		err = errors.Join(err, p.drv.Stop(ctx, f.ID))
	}
	_, serr := p.disks.Sweep(ctx, func(disk.Disk) disk.Verdict { return disk.Remove })
	return errors.Join(err, serr)
}

// prove makes a sandbox and waits for its guest's answer.
func (p *prover) prove(ctx context.Context, t driver.Tier) (err error) {
	c := p.caps[t]
	if c.Absent != "" {
		return errors.New(c.Absent)
	}
	one := ids.Epoch{Incarnation: 1, Index: 1}
	key := disk.Key{Session: ids.DeriveSessionKey([]byte("proof"), "berth", "proof", string(t), "proof"), Generation: ids.Generation(one)}
	spec := driver.Spec{
		Session: key.Session, Generation: key.Generation, Epoch: one, Tier: t, Guest: p.h.cfg.Guest, Hostname: "berth",
		Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 256 << 20, PIDs: 400},
	}
	if c.RawDisk {
		err = p.raw(ctx, &spec)
	} else {
		err = p.mounted(ctx, key, &spec)
	}
	if err != nil {
		return err
	}
	spec.RunDir = filepath.Join(p.h.cfg.proveDir(), "run", string(spec.ID()))
	if err := os.MkdirAll(spec.RunDir, 0o755); err != nil {
		return err
	}
	sb, err := p.drv.Create(ctx, spec)
	if err != nil {
		return fmt.Errorf("no sandbox can be made: %w", err)
	}
	hello := p.h.cfg.Hello
	if !slices.Contains(quickTiers, t) {
		hello = max(hello, slowHello)
	}
	guest, err := p.h.greetWithin(ctx, sb.Channel, hello)
	if err != nil {
		return fmt.Errorf("the guest of a sandbox does not answer: %w", err)
	}
	if c.OwnKernel {
		err = ownKernel(ctx, guest)
	}
	return errors.Join(err, guest.Close(), p.drv.Stop(ctx, sb.ID))
}

// mounted gives the sandbox a disk of the store, and an image.
func (p *prover) mounted(ctx context.Context, key disk.Key, spec *driver.Spec) error {
	at, err := p.disks.Attach(ctx, disk.Want{Key: key, Epoch: spec.Epoch, Fresh: true, Size: disk.MinSize, Image: "proof"})
	if err != nil {
		return fmt.Errorf("its disk: %w", err)
	}
	spec.Disk = at.Root
	if spec.Image, err = p.image(ctx); err != nil {
		return fmt.Errorf("its image: %w", err)
	}
	return nil
}

// rawBytes is the size of a proof's disk image.
const rawBytes = 64 << 20

// raw gives the sandbox image files, which only its own kernel opens. The guest needs nothing of the
// image but places to mount on.
func (p *prover) raw(ctx context.Context, spec *driver.Spec) error {
	dir := filepath.Join(p.h.cfg.proveDir(), string(spec.Tier))
	for _, d := range []string{"disk/upper", "disk/work", "image/dev", "image/proc", "image/sys", "image/run", "image/tmp", "image/etc"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	spec.DiskImage, spec.Image = filepath.Join(dir, "disk.img"), driver.Image{
		Digest: "sha256:none", Lower: filepath.Join(dir, "image"), Block: filepath.Join(dir, "rootfs.erofs")}
	if err := errors.Join(os.WriteFile(spec.DiskImage, nil, 0o600), os.Truncate(spec.DiskImage, rawBytes)); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-d", filepath.Join(dir, "disk"), spec.DiskImage},
		{"mkfs.erofs", "-zlz4", spec.Image.Block, spec.Image.Lower},
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("its disks: %s: %w: %.200s", args[0], err, out)
		}
	}
	return nil
}

// bootID is different for every kernel that was ever started.
const bootID = "/proc/sys/kernel/random/boot_id"

// ownKernel refuses a machine that is none: whatever calls itself one, processes beside the host's see
// the host's kernel.
func ownKernel(ctx context.Context, guest *hostend.Conn) error {
	host, err := os.ReadFile(bootID)
	if err != nil {
		return err
	}
	r, err := guest.ReadFile(ctx, hostend.Path{Name: bootID}, 0, 0)
	if err != nil {
		return fmt.Errorf("ask the guest for its kernel: %w", err)
	}
	inside, err := io.ReadAll(io.LimitReader(r, 64))
	if err = errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("ask the guest for its kernel: %w", err)
	}
	if len(inside) == 0 || strings.TrimSpace(string(inside)) == strings.TrimSpace(string(host)) {
		return errors.New("its sandbox runs on the host's own kernel: it is no machine")
	}
	return nil
}

// image is one that is unpacked here, or an empty one: the guest needs nothing of it.
func (p *prover) image(context.Context) (driver.Image, error) {
	for _, known := range p.h.images.Known() {
		if strings.HasPrefix(known, "sha256:") {
			if img, err := p.h.images.Get(known); err == nil {
				return img, nil
			}
		}
	}
	lower := filepath.Join(p.h.cfg.proveDir(), "empty")
	return driver.Image{Digest: "sha256:none", Lower: lower}, os.MkdirAll(lower, 0o755)
}
