package hostagent

import (
	"cmp"
	"context"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// Ahead names a memory snapshot that the host makes before anybody needs it, in a tier whose sandboxes
// are cloned: a machine that was booted once, or modules that were compiled.
type Ahead struct {
	Tier string `yaml:"tier"`
	// Image as templates name it.
	Image       string `yaml:"image"`
	CPUMillis   uint32 `yaml:"cpu_millis"`
	MemoryBytes uint64 `yaml:"memory_bytes"`
	PIDs        uint32 `yaml:"pids"`
}

// makeAhead makes the snapshots of a tier that is offered. What fails is told, and made when a session
// needs it.
func (h *host) makeAhead(ctx context.Context, t driver.Tier) {
	maker, ok := h.drv.(driver.Snapshotter)
	if !ok || h.images == nil {
		return
	}
	for _, a := range h.cfg.Ahead {
		if driver.Tier(a.Tier) != t || ctx.Err() != nil {
			continue
		}
		began := time.Now()
		err := h.makeOne(ctx, maker, a)
		if err != nil && ctx.Err() == nil {
			h.log.Warn("a snapshot that sandboxes start from could not be made ahead", "tier", t, "image", a.Image, "error", err)
			continue
		}
		h.log.Info("made ahead what sandboxes start from", "tier", t, "image", a.Image, "took", time.Since(began))
	}
}

func (h *host) makeOne(ctx context.Context, maker driver.Snapshotter, a Ahead) error {
	img, err := h.images.Ensure(ctx, cmp.Or(h.cfg.Images[a.Image], a.Image))
	if err == nil && h.raw(a.Tier) {
		img, err = h.images.Block(ctx, img.Digest)
	}
	if err != nil {
		return err
	}
	return maker.Snapshot(ctx, driver.Tier(a.Tier), img, driver.Limits{CPUMillis: a.CPUMillis, MemoryBytes: a.MemoryBytes, PIDs: a.PIDs})
}
