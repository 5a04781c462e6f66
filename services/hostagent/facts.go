package hostagent

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// freeUnit is how coarse free disk space is told, so that not every byte is news.
const freeUnit = 256 << 20

// tellFacts publishes what this host is, if it changed or is asked to.
func (h *host) tellFacts(ctx context.Context, always bool) {
	f := h.gatherFacts()
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(f)
	if err != nil {
		return
	}
	key := string(raw)
	if !always && key == h.facts {
		return
	}
	f.At = timestamppb.Now()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	id := fmt.Sprintf("host-%s-%s-%d", h.id, h.boot, f.GetAt().AsTime().UnixNano())
	if _, err := h.conn.Publish(ctx, subjects.HostEvent(h.id, "facts"), f, bus.WithID(id)); err != nil {
		if ctx.Err() == nil {
			h.log.Warn("cannot publish the facts of this host", "error", err)
		}
		return
	}
	h.facts = key
}

func (h *host) gatherFacts() *hostv1.Facts {
	c := h.cfg.Capacity
	f := &hostv1.Facts{
		Host: string(h.id), Boot: h.boot, Kernel: kernel(), Missing: h.missing(), TierFacts: h.tierFacts(),
		Capacity: &corev1.Limits{CpuMillis: c.CPUMillis, MemoryBytes: c.MemoryBytes, Pids: c.PIDs, DiskBytes: c.DiskBytes},
	}
	if h.bucket != nil {
		f.Store = blobstore.Describe(h.cfg.Disk.Store)
	}
	for _, t := range h.tiers.offered() {
		f.Tiers = append(f.Tiers, tierOf(string(t)))
	}
	for _, s := range h.all() {
		s.mu.Lock()
		if s.st.Phase == core.Awake {
			f.Sandboxes++
		}
		s.mu.Unlock()
	}
	if inv, err := h.disks.List(); err == nil {
		f.Disks = uint32(len(inv.Disks))
	}
	if sp, err := h.disks.Space(); err == nil {
		f.DiskFreeBytes = sp.Free / freeUnit * freeUnit
	}
	return f
}

// missing is what was tried on this host and is not there.
func (h *host) missing() []string {
	out := lacking(h.abilities())
	if h.pool != nil && h.pool.Missing() != "" {
		out = append(out, "reflink: "+h.pool.Missing())
	}
	if why := h.net.missing(); why != "" {
		out = append(out, "network: "+why)
	}
	return out
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
