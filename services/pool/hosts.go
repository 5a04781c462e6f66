package pool

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/pool/internal/core"
)

// fleet is what the leader knows of hosts: scheduler says which there are, and each says what waits on
// it. It may be asked from any goroutine.
type fleet struct {
	l     *leader
	mu    sync.Mutex
	hosts map[string]*host
	first chan struct{} // closed when every host that was there at first has answered
	wait  int           // of those, how many have not
	known bool          // scheduler has answered
}

// host is one host as it was heard of last.
type host struct {
	id     ids.Host
	rec    *schedulerv1.HostRecord
	poke   signal
	slots  chan struct{} // steps that are under way on it
	cancel context.CancelFunc
	said   bool // it has answered, or failed to

	boot         string
	asked, heard time.Time
	warm         []core.Sandbox
	uses         []core.Use
	refused      string // why it does not take this term's word
}

func newFleet(l *leader) *fleet {
	return &fleet{l: l, hosts: map[string]*host{}, first: make(chan struct{})}
}

// run asks scheduler again and again until ctx ends.
func (f *fleet) run(ctx context.Context) {
	for ctx.Err() == nil {
		one, cancel := context.WithTimeout(ctx, f.l.cfg.WarmTimeout)
		reply, err := bus.Invoke[*schedulerv1.HostsReply](one, f.l.conn, "scheduler", "hosts", &schedulerv1.HostsRequest{})
		cancel()
		switch {
		case err == nil:
			f.learn(ctx, reply.GetHosts())
		case ctx.Err() == nil:
			f.l.log.Debug("asking scheduler for its hosts", "error", err)
		}
		if !sleep(ctx, f.l.cfg.HostsEvery) {
			return
		}
	}
}

// learn takes in scheduler's list, which is complete.
func (f *fleet) learn(ctx context.Context, all []*schedulerv1.HostRecord) {
	f.mu.Lock()
	defer f.mu.Unlock()
	there := map[string]bool{}
	for _, rec := range all {
		id, err := ids.ParseHost(rec.GetHost())
		if err != nil {
			f.l.log.Warn("scheduler names a host that is none", "host", rec.GetHost(), "error", err)
			continue
		}
		there[rec.GetHost()] = true
		h := f.hosts[rec.GetHost()]
		if h == nil {
			hctx, cancel := context.WithCancel(ctx)
			h = &host{id: id, poke: newSignal(), slots: make(chan struct{}, f.l.cfg.Steps), cancel: cancel, rec: rec}
			f.hosts[rec.GetHost()] = h
			if h.said = f.known || !rec.GetAlive(); !h.said {
				f.wait++
			}
			f.l.work.Go(func() { f.follow(hctx, h) })
		}
		h.rec = rec
	}
	for name, h := range f.hosts {
		if !there[name] {
			h.cancel()
			delete(f.hosts, name)
		}
	}
	if !f.known {
		f.known = true
		if f.wait == 0 {
			close(f.first)
		}
	}
}

// follow asks one host again and again what waits on it.
func (f *fleet) follow(ctx context.Context, h *host) {
	for ctx.Err() == nil {
		f.mu.Lock()
		alive := h.rec.GetAlive()
		f.mu.Unlock()
		if alive {
			f.ask(ctx, h)
		}
		select {
		case <-ctx.Done():
		case <-h.poke:
			sleep(ctx, askPause)
		case <-time.After(f.l.cfg.WarmEvery):
		}
	}
}

// askPause lets what changes together on a host be seen together.
const askPause = 20 * time.Millisecond

// ask gets what waits on a host, and has pools look again when that changed.
func (f *fleet) ask(ctx context.Context, h *host) {
	asked := time.Now()
	one, cancel := context.WithTimeout(ctx, f.l.cfg.WarmTimeout)
	reply, err := callHost[*hostv1.WarmReply](one, f.l, h.id, "warm", &hostv1.WarmRequest{Term: f.l.t.term})
	cancel()
	if ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	if !h.said {
		h.said = true
		if f.wait--; f.wait == 0 {
			close(f.first)
		}
	}
	h.refused = ""
	if err != nil {
		if stale(err) {
			h.refused = "it has heard of a later leader"
		}
		f.mu.Unlock()
		f.l.log.Debug("a host does not say what waits on it", "host", h.id, "error", err)
		return
	}
	warm, uses := sandboxes(reply.GetWarm()), usesOf(reply.GetUses())
	changed := h.heard.IsZero() || h.boot != reply.GetBoot() || !slices.Equal(warm, h.warm) || !slices.Equal(uses, h.uses)
	h.boot, h.asked, h.heard, h.warm, h.uses = reply.GetBoot(), asked, time.Now(), warm, uses
	f.mu.Unlock()
	if changed {
		f.l.pokeAll()
	}
	f.l.retireStrays(ctx, h, warm)
}

func sandboxes(all []*hostv1.WarmSandbox) []core.Sandbox {
	out := make([]core.Sandbox, 0, len(all))
	for _, w := range all {
		out = append(out, sandbox(w))
	}
	return out
}

func sandbox(w *hostv1.WarmSandbox) core.Sandbox {
	state := core.Preparing
	switch w.GetState() {
	case hostv1.WarmState_WARM_STATE_READY:
		state = core.Ready
	case hostv1.WarmState_WARM_STATE_RETIRING:
		state = core.Retiring
	}
	return core.Sandbox{ID: ids.SandboxID(w.GetWarm()), Template: w.GetTemplate(), Tier: w.GetTier(), State: state,
		Digest: w.GetTemplateDigest(), Stale: w.GetStale(), MadeAt: w.GetMadeAt().AsTime(), Memory: w.GetMemoryBytes()}
}

func usesOf(all []*hostv1.PoolUse) []core.Use {
	out := make([]core.Use, 0, len(all))
	for _, u := range all {
		out = append(out, core.Use{Template: u.GetTemplate(), Tier: u.GetTier(), Active: int(u.GetActive()), Claimed: u.GetClaimed(), Missed: u.GetMissed()})
	}
	return out
}

// now is every host as it is known, in order of their names; known is false until scheduler has said
// which there are.
func (f *fleet) now() (all []core.Host, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]core.Host, 0, len(f.hosts))
	for _, name := range slices.Sorted(maps.Keys(f.hosts)) {
		out = append(out, f.hosts[name].view())
	}
	return out, f.known
}

// view is the host as the core takes it; its slices are not changed any more.
func (h *host) view() core.Host {
	out := core.Host{ID: h.id.String(), Zone: h.rec.GetZone(), Draining: h.rec.GetDraining(), Unwell: h.rec.GetUnhealthy(),
		Tiers: slices.Clone(h.rec.GetTiers()), Boot: h.boot, Asked: h.asked, Heard: h.heard, Warm: h.warm, Uses: h.uses,
		FreeMemory: free(h.rec.GetCapacity(), h.rec.GetUsed(), h.warm)}
	switch {
	case h.rec.GetLost():
		out.Presence = core.Lost
	case h.rec.GetAlive():
		out.Presence = core.Alive
	}
	if h.refused != "" {
		out.Unwell = h.refused
	}
	return out
}

// free is the memory that neither awake sessions have promised to them nor what waits uses.
func free(capacity, used *corev1.Limits, warm []core.Sandbox) uint64 {
	left := capacity.GetMemoryBytes()
	if left == 0 {
		return 0 // not known
	}
	left -= min(left, used.GetMemoryBytes())
	for _, w := range warm {
		left -= min(left, w.Memory)
	}
	return max(left, 1)
}

// of returns a host that is there, or nil.
func (f *fleet) of(name string) *host {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hosts[name]
}
