package core

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

var epoch0 = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC) // a Monday

const (
	gvisor    = corev1.Tier_TIER_GVISOR
	container = corev1.Tier_TIER_CONTAINER
)

// world is a fleet, a store and leaders that know only what reaches them.
type world struct {
	now     time.Time
	spec    Spec
	tpl     Template
	hosts   []*fakeHost
	caps    Caps
	rev     int
	term    int
	leaders []*leader
	names   int
	// most may exist: the ceiling, or an earlier one for as long as it takes to come down to this one.
	most int
	// fails is how many of a hundred preparations fail.
	fails int
}

// fakeHost does what hosts promise: names, terms, deadlines and caps are checked when a preparation begins.
type fakeHost struct {
	id, zone string
	term     int
	boot     int
	lost     bool
	drain    bool
	skew     time.Duration
	there    map[ids.SandboxID]*Sandbox
	used     map[ids.SandboxID]bool
	queue    []func()
	claimed  uint64
	active   int
	silent   bool
	unwell   string
	tiers    []corev1.Tier
	images   []string
	free     uint64
	fail     string
}

type leader struct {
	*Pool
	term, rev int
	known     map[string]Host
	pending   map[ids.SandboxID]time.Time
}

func newWorld(spec Spec, hosts int) *world {
	w := &world{now: epoch0, spec: spec, tpl: Template{Digest: "d1"}, caps: Caps{}, most: spec.Ceiling}
	for i := range hosts {
		w.hosts = append(w.hosts, &fakeHost{id: fmt.Sprint("h", i+1), zone: fmt.Sprint("z", i%2+1),
			tiers: []corev1.Tier{gvisor}, there: map[ids.SandboxID]*Sandbox{}, used: map[ids.SandboxID]bool{}})
	}
	w.elect()
	return w
}

// elect makes a new leader; an older one goes on until it is told, by the store.
func (w *world) elect() *leader {
	w.term++
	w.rev++
	l := &leader{Pool: New(w.spec, w.tpl, w.caps, nil, w.now), term: w.term, rev: w.rev, known: map[string]Host{}, pending: map[ids.SandboxID]time.Time{}}
	w.leaders = append(w.leaders, l)
	return l
}

// list is the host's answer to a leader; false: it refuses, or is not reached.
func (w *world) list(l *leader, h *fakeHost) (Host, bool) {
	if h.lost || h.silent || l.term < h.term {
		return Host{}, false
	}
	h.term = l.term
	out := Host{ID: h.id, Zone: h.zone, Presence: Alive, Draining: h.drain, Unwell: h.unwell, Tiers: h.tiers,
		Images: h.images, FreeMemory: h.free, Boot: fmt.Sprint(h.boot), Asked: w.now,
		Uses: []Use{{Template: "py", Tier: gvisor, Active: h.active, Claimed: h.claimed}}}
	for _, id := range slices.Sorted(maps.Keys(h.there)) {
		out.Warm = append(out.Warm, *h.there[id])
	}
	return out, true
}

// tell gives a leader a list that may have been under way for a while.
func (w *world) tell(l *leader, h Host) {
	h.Heard = w.now
	if h.Asked.After(l.known[h.ID].Asked) {
		l.known[h.ID] = h
	}
}

func (w *world) observe(l *leader) {
	var all []Host
	for _, h := range w.hosts {
		k, ok := l.known[h.id]
		if !ok {
			k = Host{ID: h.id, Zone: h.zone, Tiers: h.tiers}
		}
		k.Presence, k.Draining = Alive, h.drain
		if h.lost {
			k.Presence = Lost
		}
		all = append(all, k)
	}
	l.Observe(all, w.now)
}

// plan stores the caps and begins some of the steps. False: the leader finds that it is none any more.
func (w *world) plan(l *leader, some func(Step) bool) bool {
	pl := l.Plan(w.now)
	if pl.CapsChanged {
		if l.rev != w.rev {
			w.leaders = slices.DeleteFunc(w.leaders, func(x *leader) bool { return x == l })
			return false
		}
		w.rev++
		l.rev, w.caps = w.rev, pl.Caps
		l.Stored(pl.Caps)
	}
	for _, s := range pl.Steps {
		if !some(s) {
			continue
		}
		switch s.Kind {
		case PrepareOne:
			w.names++
			if id := ids.SandboxID(fmt.Sprintf("w%05d", w.names)); l.Begin(s, id, w.now) {
				w.send(l, s, id)
			}
		case RetireOne:
			h := w.host(s.Host)
			h.queue = append(h.queue, func() { w.retire(l, h, s.Sandbox) })
		}
	}
	return true
}

func (w *world) host(id string) *fakeHost {
	return w.hosts[slices.IndexFunc(w.hosts, func(h *fakeHost) bool { return h.id == id })]
}

func (w *world) send(l *leader, s Step, id ids.SandboxID) {
	h, deadline := w.host(s.Host), w.now.Add(PrepareLimit)
	l.pending[id] = deadline
	h.queue = append(h.queue, func() {
		switch {
		case h.lost:
		case l.term < h.term || w.now.Add(h.skew).After(deadline) || len(h.there) >= s.Cap || h.used[id]:
			w.answer(l, id, Outcome{Failed: "refused"})
		default:
			h.term, h.used[id] = l.term, true
			h.there[id] = &Sandbox{ID: id, Template: "py", Tier: gvisor, State: Preparing, Digest: w.tpl.Digest, MadeAt: w.now.Add(h.skew), Memory: 1 << 20}
			h.queue = append(h.queue, func() { w.finish(l, h, id) })
		}
	})
}

func (w *world) finish(l *leader, h *fakeHost, id ids.SandboxID) {
	s := h.there[id]
	if s == nil || s.State != Preparing {
		return
	}
	if why := h.fail; why != "" || w.names*37%100 < w.fails {
		if why == "" {
			why = "no space left"
		}
		s.State = Retiring // what is left of it is not gone yet
		h.queue = append(h.queue, func() { delete(h.there, id) })
		w.answer(l, id, Outcome{Failed: why})
		return
	}
	s.State = Ready
	made := *s
	w.answer(l, id, Outcome{Made: &made})
}

func (w *world) answer(l *leader, id ids.SandboxID, o Outcome) {
	if _, ok := l.pending[id]; ok {
		delete(l.pending, id)
		l.End(id, o, w.now)
	}
}

// lose drops an answer: the leader gives up waiting.
func (w *world) lose(l *leader, id ids.SandboxID) {
	w.answer(l, id, Outcome{Failed: "no answer", Unanswered: true})
}

func (w *world) retire(l *leader, h *fakeHost, id ids.SandboxID) {
	if h.lost || l.term < h.term {
		return
	}
	if s := h.there[id]; s != nil && s.State != Preparing || s == nil && h.used[id] {
		delete(h.there, id)
		l.Retired(h.id, []ids.SandboxID{id}, w.now)
	}
}

func (w *world) total() (n int) {
	for _, h := range w.hosts {
		if !h.lost {
			n += len(h.there)
		}
	}
	return n
}

// told is what the stored caps add up to.
func (w *world) told() (n int) {
	for _, c := range w.caps {
		n += c
	}
	return n
}

func (w *world) ready() (n int) {
	for _, h := range w.hosts {
		for _, s := range h.there {
			if s.State == Ready {
				n++
			}
		}
	}
	return n
}

// quiet lets everything arrive, for so many seconds, under the newest leader.
func (w *world) quiet(seconds int) {
	l := w.leaders[len(w.leaders)-1]
	for range seconds {
		w.second(l)
	}
}

func (w *world) second(l *leader) {
	w.now = w.now.Add(time.Second)
	for id, at := range l.pending {
		if w.now.After(at) {
			w.lose(l, id)
		}
	}
	w.ask(l)
	w.plan(l, func(Step) bool { return true })
	for _, h := range w.hosts {
		for len(h.queue) > 0 && !h.silent {
			f := h.queue[0]
			h.queue = h.queue[1:]
			f()
		}
	}
}

// ask gets every list there is to the leader.
func (w *world) ask(l *leader) {
	for _, h := range w.hosts {
		if k, ok := w.list(l, h); ok {
			w.tell(l, k)
		}
	}
	w.now = w.now.Add(time.Millisecond)
	w.observe(l)
}

func drawSpec(t *rapid.T) Spec {
	s := Spec{Template: "py", Tier: gvisor, Ceiling: rapid.SampledFrom([]int{0, 1, 2, 3, 4, 6, 10}).Draw(t, "ceiling"), InFlight: rapid.IntRange(1, 3).Draw(t, "in flight"),
		MaxAge: time.Duration(rapid.IntRange(1, 60).Draw(t, "age")) * time.Minute, Share: 0.5}
	s.Minimum = max(0, s.Ceiling-rapid.SampledFrom([]int{0, 0, 0, 1, 3, 8}).Draw(t, "to spare"))
	return s
}
