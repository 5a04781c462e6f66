package scheduler

import (
	"context"
	"fmt"
	"hash/fnv"
	"sync"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// leases are granted by the leader and live in its memory, with what each host
// said of itself last and how its wakes went.
type leases struct {
	term time.Duration
	mu   sync.Mutex
	held map[ids.Host]lease
	// Wakes that failed in a row, by host; it outlives a boot.
	wakes map[ids.Host]health
	// pools counts the hosts that tell of warm sandboxes, or of a pool, by WarmName.
	pools map[string]int
	// turns are locks of hosts, of some together. See turn.
	turns [64]sync.Mutex
}

type lease struct {
	boot  string
	until time.Time // monotonic
	load  load
	// held ends, by end, when this boot does not hold the lease any more.
	held context.Context
	end  context.CancelFunc
}

// load is what a host said of itself: advice.
type load struct {
	images    map[string]bool
	warm      map[string]uint32
	unhealthy string
	tiers     []*corev1.TierFact
}

// health of a host as its wakes show it.
type health struct {
	failed int            // in a row, of one session after another
	last   ids.SessionKey // that failed
	until  time.Time
}

// Bounds of what a host may say, and of how long it is set back.
const (
	maxLoad   = 256
	maxReason = 200
	// maxTiers bounds the tiers that a host may tell of, and the limits of one.
	maxTiers = 16
	// sickAfter wakes that failed in a row a host comes last in rank for a while.
	sickAfter = 3
	sickMin   = 30 * time.Second
	sickMax   = 10 * time.Minute
)

func newLeases(term time.Duration) *leases {
	return &leases{term: term, held: map[ids.Host]lease{}, wakes: map[ids.Host]health{}, pools: map[string]int{}}
}

// turn is held while a lease is given together with the entry that says so, and
// while a host is found to hold none together with the entry that says that. A
// loss that was decided before a join never follows it in the log: the host
// would hold a lease, and others its sessions.
func (l *leases) turn(h ids.Host) *sync.Mutex {
	f := fnv.New32a()
	_, _ = f.Write([]byte(h))
	return &l.turns[f.Sum32()%uint32(len(l.turns))]
}

// inherit counts the lease that an earlier leader may have granted, which may
// have been a longer one than this one grants.
func (l *leases) inherit(h ids.Host, boot string, longer time.Duration) {
	l.grant(h, boot)
	l.mu.Lock()
	defer l.mu.Unlock()
	cur := l.held[h]
	cur.until = cur.until.Add(longer)
	l.held[h] = cur
}

// grant reports whether the lease went to a boot that did not hold it. It never
// takes time from one that does.
func (l *leases) grant(h ids.Host, boot string) (fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	if fresh = !ok || cur.boot != boot; fresh {
		if ok {
			cur.end()
		}
		l.count(cur.load, -1)
		cur = lease{boot: boot}
		cur.held, cur.end = context.WithCancel(context.Background())
	}
	cur.until = later(cur.until, time.Now().Add(l.term))
	l.held[h] = cur
	return fresh
}

// renew extends the lease of a boot that has one.
func (l *leases) renew(h ids.Host, boot string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	if !ok || cur.boot != boot || time.Now().After(cur.until) {
		return false
	}
	cur.until = later(cur.until, time.Now().Add(l.term))
	l.held[h] = cur
	return true
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// say keeps what a host says of itself. It reports whether the host is well
// now and was not before, so that it may take what waits.
func (l *leases) say(h ids.Host, boot string, said *schedulerv1.HostLoad) (better bool) {
	if said == nil {
		return false
	}
	n := load{images: map[string]bool{}, warm: map[string]uint32{}, unhealthy: cut(said.GetUnhealthy(), maxReason)}
	for _, ref := range said.GetImages()[:min(len(said.GetImages()), maxLoad)] {
		if len(ref) <= maxID {
			n.images[ref] = true
		}
	}
	for name, count := range said.GetWarm() {
		if len(n.warm) < maxLoad && len(name) <= maxID {
			n.warm[name] = count
		}
	}
	for _, f := range said.GetTiers()[:min(len(said.GetTiers()), maxTiers)] {
		n.tiers = append(n.tiers, boundedFact(f))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	if !ok || cur.boot != boot {
		return false
	}
	better = cur.load.unhealthy != "" && n.unhealthy == ""
	l.count(cur.load, -1)
	l.count(n, 1)
	cur.load = n
	l.held[h] = cur
	return better
}

// boundedFact is a copy that is no longer than what a host may say.
func boundedFact(f *corev1.TierFact) *corev1.TierFact {
	out := &corev1.TierFact{Tier: f.GetTier(), Accel: cut(f.GetAccel(), maxID), Absent: cut(f.GetAbsent(), maxReason)}
	for _, l := range f.GetNotHeld()[:min(len(f.GetNotHeld()), maxTiers)] {
		out.NotHeld = append(out.NotHeld, cut(l, maxID))
	}
	return out
}

// facts are what placement may know of a host.
func (l *leases) facts(h ids.Host) core.HostFacts {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	return core.HostFacts{Alive: ok && time.Now().Before(cur.until), Unhealthy: cur.load.unhealthy,
		Images: func(ref string) bool { return cur.load.images[ref] },
		Warm:   func(name string) uint32 { return cur.load.warm[name] }}
}

// count adds what a host tells of to pools, or takes it out. mu is held.
func (l *leases) count(of load, by int) {
	for name := range of.warm {
		if l.pools[name] += by; l.pools[name] == 0 {
			delete(l.pools, name)
		}
	}
}

// pooled reports whether any host tells of a pool by that WarmName.
func (l *leases) pooled(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pools[name] > 0
}

// woke notes that a wake on a host went well.
func (l *leases) woke(h ids.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.wakes, h)
}

// wokeNot notes that a wake on a host failed. A session that fails there again
// and again counts once: it may be the session's own fault.
func (l *leases) wokeNot(h ids.Host, s ids.SessionKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.wakes[h]
	if w.last == s {
		return
	}
	w.last = s
	if w.failed++; w.failed >= sickAfter {
		w.until = time.Now().Add(min(sickMin<<min(w.failed-sickAfter, 8), sickMax))
	}
	l.wakes[h] = w
}

// sick says in words why a host comes last in rank now; empty: it does not.
func (l *leases) sick(h ids.Host) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.wakes[h]; time.Now().Before(w.until) {
		return fmt.Sprintf("last: wakes of %d sessions in a row failed there", w.failed)
	}
	return ""
}

func (l *leases) alive(h ids.Host) bool {
	_, ok := l.of(h)
	return ok
}

// of returns the lease that a host holds now.
func (l *leases) of(h ids.Host) (lease, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	cur, ok := l.held[h]
	return cur, ok && time.Now().Before(cur.until)
}

func (l *leases) expired() (out []ids.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h, cur := range l.held {
		if time.Now().After(cur.until) {
			out = append(out, h)
		}
	}
	return out
}

// extend adds time in which nobody could renew, since this process stood still.
func (l *leases) extend(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h, cur := range l.held {
		cur.until = cur.until.Add(d)
		l.held[h] = cur
	}
}

func (l *leases) drop(h ids.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if cur, ok := l.held[h]; ok && time.Now().After(cur.until) {
		cur.end()
		l.count(cur.load, -1)
		delete(l.held, h)
	}
}

// forget ends the lease of a host that was removed.
func (l *leases) forget(h ids.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if cur, ok := l.held[h]; ok {
		cur.end()
		l.count(cur.load, -1)
	}
	delete(l.held, h)
	delete(l.wakes, h)
}
