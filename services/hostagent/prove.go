package hostagent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/containerd"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// A host offers only tiers that it has proved: a sandbox of each was made, with a disk of its own, its
// guest answered, and it was taken away again. It belongs to a driver of its own, whose cgroup no
// lease freezes, and holds nothing of anybody. What was proved is remembered until a runtime, the guest
// or the kernel changes; what failed is tried again at the next start.

// proveTime bounds the proof of all tiers.
const proveTime = 2 * time.Minute

// proofs is the content of proved.json.
type proofs struct {
	// Of names kernel, runtimes and guest that were proved.
	Of    string        `json:"of"`
	Tiers []driver.Tier `json:"tiers"`
}

// proveTiers keeps of h.tiers what this host can really run, and notes why it cannot run the others.
func (h *host) proveTiers(ctx context.Context) error {
	prove := drivers[h.cfg.Driver].prove
	if prove == nil {
		return nil
	}
	path := filepath.Join(h.cfg.Dir, "proved.json")
	known := readProofs(path)
	if of := provable(h.cfg); known.Of != of {
		known = proofs{Of: of}
	}
	var todo []driver.Tier
	for _, t := range h.tiers {
		if !slices.Contains(known.Tiers, t) {
			todo = append(todo, t)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, proveTime)
	defer cancel()
	failed := prove(ctx, h, todo)
	for _, t := range todo {
		if err := failed[t]; err != nil {
			h.log.Warn("this host does not offer a tier", "tier", t, "reason", err)
			c := h.caps[t]
			c.Absent = err.Error()
			h.caps[t] = c
			continue
		}
		known.Tiers = append(known.Tiers, t)
	}
	h.log.Info("proved what this host runs", "tiers", known.Tiers, "took", time.Since(began))
	var err error
	if h.tiers, err = offered(h.cfg.Tiers, h.caps); err != nil {
		return err
	}
	if err := writeProofs(path, known); err != nil {
		h.log.Warn("cannot note which tiers were proved", "error", err)
	}
	return nil
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

// provable names what a proof depends on.
func provable(c Config) string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	sum := sha256.New()
	fmt.Fprintln(sum, unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Version[:]), c.Socket)
	files, _ := filepath.Glob(filepath.Join(c.Runtimes, "*"))
	for _, f := range append(files, c.Guest) {
		if st, err := os.Stat(f); err == nil {
			fmt.Fprintln(sum, f, st.Size(), st.ModTime().UnixNano())
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// proveDir is where a proof has everything that it makes.
func (c Config) proveDir() string { return filepath.Join(c.Dir, "prove") }

// proverConfig is that of the driver that proves, apart from the host's own.
func proverConfig(c Config) containerd.Config {
	d := containerd.NewConfig(c.proveDir(), c.Runtimes)
	d.Socket = c.Socket
	return d
}

// proveContainerd makes one sandbox of each tier. What an earlier proof left is removed first.
func proveContainerd(ctx context.Context, h *host, tiers []driver.Tier) map[driver.Tier]error {
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
	cfg := proverConfig(h.cfg)
	cfg.Tiers = tiers
	d, err := containerd.Open(ctx, cfg)
	if err != nil {
		return all(err)
	}
	store, err := disk.Open(ctx, disk.Config{Dir: filepath.Join(dir, "disks"), Log: h.log})
	if err != nil {
		return all(errors.Join(err, d.Close()))
	}
	p := &prover{h: h, drv: d, disks: store}
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
	one := ids.Epoch{Incarnation: 1, Index: 1}
	key := disk.Key{Session: ids.DeriveSessionKey([]byte("proof"), "berth", "proof", string(t), "proof"), Generation: ids.Generation(one)}
	at, err := p.disks.Attach(ctx, disk.Want{Key: key, Epoch: one, Fresh: true, Size: disk.MinSize, Image: "proof"})
	if err != nil {
		return fmt.Errorf("its disk: %w", err)
	}
	spec := driver.Spec{
		Session: key.Session, Generation: key.Generation, Epoch: one, Tier: t, Disk: at.Root, Guest: p.h.cfg.Guest, Hostname: "berth",
		Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 256 << 20, PIDs: 400},
	}
	if spec.Image, err = p.image(ctx); err != nil {
		return fmt.Errorf("its image: %w", err)
	}
	spec.RunDir = filepath.Join(p.h.cfg.proveDir(), "run", string(spec.ID()))
	if err := os.MkdirAll(spec.RunDir, 0o755); err != nil {
		return err
	}
	sb, err := p.drv.Create(ctx, spec)
	if err != nil {
		return fmt.Errorf("no sandbox can be made: %w", err)
	}
	guest, err := p.h.greet(ctx, sb.Channel)
	if err != nil {
		return fmt.Errorf("the guest of a sandbox does not answer: %w", err)
	}
	return errors.Join(guest.Close(), p.drv.Stop(ctx, sb.ID))
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
