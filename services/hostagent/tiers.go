package hostagent

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// tiers are what this host knows of its isolation tiers: what proofs said so far. The zero value offers
// nothing.
type tiers struct {
	mu sync.Mutex
	// proved tiers had a real sandbox; failed ones say why theirs did not come up; waiting are not
	// proved yet.
	proved  []driver.Tier
	failed  map[driver.Tier]string
	waiting []driver.Tier
}

// notProved is why a tier is not offered before its proof.
const notProved = "its proof by a real sandbox is not done yet"

// notConfigured is why a tier of the contract is not offered.
const notConfigured = "it is not among the tiers that this host is to offer"

// offer sets what is offered, what is to be proved, and forgets what failed.
func (t *tiers) offer(now, later []driver.Tier) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.proved, t.waiting, t.failed = nil, slices.Clone(later), map[driver.Tier]string{}
	for _, one := range now {
		if !slices.Contains(later, one) {
			t.proved = append(t.proved, one)
		}
	}
}

// settle takes what a proof said.
func (t *tiers) settle(tier driver.Tier, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting = slices.DeleteFunc(t.waiting, func(w driver.Tier) bool { return w == tier })
	if err != nil {
		t.failed[tier] = err.Error()
		return
	}
	t.proved = append(t.proved, tier)
	slices.SortFunc(t.proved, func(a, b driver.Tier) int { return int(tierOf(string(a)) - tierOf(string(b))) })
}

// offered are the tiers that sessions can have here, weakest first.
func (t *tiers) offered() []driver.Tier {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.proved)
}

// toProve are those that wait for their proof.
func (t *tiers) toProve() []driver.Tier {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.waiting)
}

// why says why a tier that a driver has is not offered; empty: it is.
func (t *tiers) why(tier driver.Tier) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.Contains(t.waiting, tier) {
		return notProved
	}
	return t.failed[tier]
}

// offers reports whether sessions can have the tier here.
func (h *host) offers(t corev1.Tier) bool {
	return slices.ContainsFunc(h.tiers.offered(), func(have driver.Tier) bool { return tierOf(string(have)) == t })
}

// abilities are those of every tier that is configured, with the reason where it is not offered now.
func (h *host) abilities() map[driver.Tier]driver.Capabilities {
	out := maps.Clone(h.caps)
	if h.drv != nil {
		maps.Copy(out, h.drv.Capabilities()) // some things are known only once a sandbox ran
	}
	for t, c := range out {
		if c.Absent == "" {
			c.Absent = cmp.Or(h.net.bars(c), h.tiers.why(t))
			out[t] = c
		}
	}
	return out
}

// contract lists the tiers that hosts tell of, weakest first.
var contract = []driver.Tier{driver.Container, driver.GVisor, driver.Kata, driver.MicroVM, driver.WASM}

// tierFacts tell of every tier what it is on this host, or why it is not there.
func (h *host) tierFacts() (out []*corev1.TierFact) {
	caps, known := h.abilities(), contract
	if h.cfg.bare() {
		known = []driver.Tier{driver.Null}
	}
	for _, t := range known {
		c, ok := caps[t]
		if !ok {
			c.Absent = notConfigured
		}
		f := &corev1.TierFact{Tier: tierOf(string(t)), Absent: strings.TrimPrefix(c.Absent, "check this host: ")}
		if f.Absent == "" {
			f.Accel, f.NotHeld = c.Accel, notHeld(c)
		}
		out = append(out, f)
	}
	return out
}

// notHeld names the limits that are not enforced.
func notHeld(c driver.Capabilities) (out []string) {
	for _, l := range []struct {
		name string
		held bool
	}{{"cpu", c.CPU}, {"memory", c.Memory}, {"pids", c.PIDs}, {"disk_io", c.DiskIO}, {"open_files", c.OpenFiles}} {
		if !l.held {
			out = append(out, l.name)
		}
	}
	return out
}
