package hostagent

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

const (
	// healthEvery is how often the host looks whether it could take a session.
	healthEvery = 30 * time.Second
	// maxImages is how many references and digests a host tells.
	maxImages = 256
)

// health is what keeps a host from taking sessions, by part; a part that is well has no entry.
type health struct {
	mu  sync.Mutex
	ill map[string]string
}

// note says how a part is: err is nil if it is well.
func (p *health) note(part string, err error, why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.ill, part)
		return
	}
	if p.ill == nil {
		p.ill = map[string]string{}
	}
	p.ill[part] = why
}

// all lists what is ill, in a fixed order.
func (p *health) all() (out []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, why := range p.ill {
		out = append(out, why)
	}
	slices.Sort(out)
	return out
}

// unhealthy says in one sentence why this host should get no more sessions now; empty: it is well.
func (h *host) unhealthy() string {
	why := h.health.all()
	if h.fence != nil && h.fence.Problem() != "" {
		why = append(why, h.fence.Problem())
	}
	if len(why) == 0 {
		return ""
	}
	return "On this host " + strings.Join(why, ", and ") + "."
}

// hostLoad is what the host says of itself with each join and renewal. It asks nobody: a renewal must
// not wait.
func (h *host) hostLoad() *schedulerv1.HostLoad {
	l := &schedulerv1.HostLoad{Unhealthy: h.unhealthy(), Tiers: h.tierFacts(), Warm: h.keeper.load()}
	if h.images == nil {
		return l
	}
	known := h.images.Known()
	for name, ref := range h.cfg.Images { // templates use the name
		if slices.Contains(known, ref) {
			l.Images = append(l.Images, name)
		}
	}
	l.Images = append(l.Images, known...)
	slices.Sort(l.Images)
	l.Images = slices.Compact(l.Images)
	l.Images = l.Images[:min(len(l.Images), maxImages)]
	return l
}

// looksAtHealth looks at what a session needs here, until ctx ends. The runtime is looked at by watch.
func (h *host) looksAtHealth(ctx context.Context) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		h.lookAtHealth(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (h *host) lookAtHealth(ctx context.Context) {
	if err := h.storeReady(ctx); ctx.Err() == nil {
		h.health.note("store", err, "the store of disks refuses what is saved")
	}
	sp, err := h.disks.Space()
	if err == nil && sp.Room() == 0 {
		err = errNoRoom
	}
	h.health.note("pool", err, "the disk pool has no room")
}
