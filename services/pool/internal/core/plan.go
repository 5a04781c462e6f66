package core

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// draft is a plan that is being made.
type draft struct {
	p     *Pool
	now   time.Time
	plan  Plan
	hosts []*place
	going map[ids.SandboxID]bool
	zones map[string]int
	room  int
	// full: the ceiling leaves no room for so many.
	full int
	// good are current or on their way, where they count; claimable can be claimed now.
	good, claimable int
}

// place is one host in a draft.
type place struct {
	*member
	// cannot says why nothing is prepared there.
	cannot string
	counts bool
	cap    int
	// good, old and useless sandboxes; the first two can be claimed.
	good, old, useless []*Sandbox
	// standing are good ones, also those on their way; planned come by this plan.
	standing, planned int
	// spare of those that can be claimed are reserved for nobody.
	spare int
	// fresh: its list is of now; total of all that is there or may come, under way of it.
	fresh        bool
	total, under int
}

// Plan says what is to be done now. It changes nothing.
func (p *Pool) Plan(now time.Time) Plan {
	d := &draft{p: p, now: now, room: p.spec.Ceiling, going: map[ids.SandboxID]bool{}, zones: map[string]int{}, plan: Plan{Goal: p.goal(now)}}
	for _, m := range p.ordered() {
		d.hosts = append(d.hosts, d.look(m))
	}
	d.shrink()
	d.retireUseless()
	d.fill()
	d.retireOld()
	d.retireForRoom()
	d.retireSurplus()
	d.settleCaps()
	return d.plan
}

// look sorts what a host has.
func (d *draft) look(m *member) *place {
	h := &place{member: m, cannot: d.p.cannot(m, d.now), cap: d.p.counted(m, d.now), standing: m.coming(),
		fresh: m.answers(d.now), total: m.all(), under: m.underWay()}
	d.room -= h.cap
	h.counts = h.fresh && d.p.fits(m) == ""
	if !h.fresh {
		return h
	}
	for _, s := range m.sandboxes() {
		old := d.p.old(m, s, d.now)
		switch {
		case s.State == Retiring:
		case s.State == Preparing && d.p.useless(m, s) == "":
			h.standing++
		case s.State == Preparing:
		case d.p.useless(m, s) != "":
			h.useless = append(h.useless, s)
		case old != "":
			h.old = append(h.old, s)
		default:
			h.good = append(h.good, s)
			h.standing++
		}
	}
	h.spare = max(0, len(h.good)+len(h.old)-d.p.desk.reserved[m.ID])
	if h.counts {
		d.zones[h.Zone] += h.standing
		d.good += h.standing
		d.claimable += len(h.good) + len(h.old)
	}
	return h
}

// fits says why what waits on the host serves nobody, or nothing.
func (p *Pool) fits(m *member) string {
	switch {
	case m.Draining:
		return "it is draining"
	case m.Unwell != "":
		return "it is unwell: " + m.Unwell
	}
	return p.offers(m)
}

func (p *Pool) offers(m *member) string {
	if !slices.Contains(m.Tiers, p.spec.Tier) {
		return "it does not offer " + TierWord(p.spec.Tier)
	}
	return ""
}

// misplaced says why the host should have none, though what is there serves as well as others.
func (p *Pool) misplaced(m *member) string {
	if len(p.spec.Zones) > 0 && !slices.Contains(p.spec.Zones, m.Zone) {
		return fmt.Sprintf("its zone %q is none of the pool's", m.Zone)
	}
	return ""
}

// TierWord is a tier as people write it, for example "gvisor".
func TierWord(t corev1.Tier) string { return strings.ToLower(strings.TrimPrefix(t.String(), "TIER_")) }

// cannot says why nothing is prepared on the host now, or nothing.
func (p *Pool) cannot(m *member, now time.Time) string {
	switch {
	case m.Presence == Lost:
		return "it is lost"
	case !m.answers(now):
		return "it does not answer"
	}
	if why := cmp.Or(p.fits(m), p.misplaced(m)); why != "" {
		return why
	}
	if need := p.tpl.Memory * uint64(m.underWay()+1); m.FreeMemory > 0 && m.FreeMemory < need {
		return fmt.Sprintf("%d bytes of memory are free there, %d are needed", m.FreeMemory, need)
	}
	return m.back.why(m.underWay(), now)
}

// useless says why a sandbox serves nobody, or nothing.
func (p *Pool) useless(m *member, s *Sandbox) string {
	switch {
	case p.removed:
		return "the pool was removed"
	case s.Stale != "":
		return "stale: " + s.Stale
	case s.Tier != p.spec.Tier:
		return "the pool is of another tier now"
	case m.Draining:
		return "the host is draining"
	}
	return ""
}

// old says why a sandbox that can still be claimed is to be replaced, or nothing.
func (p *Pool) old(m *member, s *Sandbox, now time.Time) string {
	switch {
	case p.misplaced(m) != "":
		return p.misplaced(m)
	case p.tpl.Digest != "" && s.Digest != p.tpl.Digest:
		return "the template has changed"
	case now.Sub(s.MadeAt) > p.spec.MaxAge:
		return fmt.Sprintf("it is older than %s", p.spec.MaxAge)
	}
	return ""
}

func (d *draft) retire(h *place, s *Sandbox, why string) {
	d.going[s.ID] = true
	d.plan.Steps = append(d.plan.Steps, Step{Kind: RetireOne, Host: h.ID, Sandbox: s.ID, Why: why})
}

// retireUseless needs no replacement first.
func (d *draft) retireUseless() {
	for _, h := range d.hosts {
		for _, s := range h.useless {
			d.retire(h, s, d.p.useless(h.member, s))
		}
		if why := d.p.offers(h.member); why != "" && h.fresh {
			for _, s := range slices.Concat(h.old, h.good) {
				d.retire(h, s, why)
			}
		}
	}
}

// maxPlaced are placed by one plan; the next goes on.
const maxPlaced = 1024

// fill prepares what lacks: on hosts in turn, as far as the ceiling and what each host does at once allow.
func (d *draft) fill() {
	lacking := d.plan.Goal.N - d.good
	d.plan.Lacking = max(0, lacking)
	d.plan.Filled = d.claimable >= d.plan.Goal.N
	placed := 0
	for ; placed < min(lacking, maxPlaced); placed++ {
		h := d.next()
		if h == nil {
			break
		}
		if !d.makeRoom(h) {
			d.full = lacking - placed
			break
		}
		h.planned++
		h.standing++
		d.zones[h.Zone]++
	}
	for _, h := range d.hosts {
		n := min(h.planned, d.atOnce(h))
		for range n {
			d.plan.Steps = append(d.plan.Steps, Step{Kind: PrepareOne, Host: h.ID, Cap: h.cap, Why: d.plan.Goal.Reason})
		}
	}
	d.unhealthy(placed)
}

// atOnce is how many more the host may begin now.
func (d *draft) atOnce(h *place) int {
	n := d.p.spec.InFlight
	if h.back.failures > 0 {
		n = 1
	}
	return max(0, n-h.under)
}

// next is the host that gets the next one: in the zone that has fewest, the host that has fewest; then
// one that has the image, then the one with the most memory.
func (d *draft) next() *place {
	var best *place
	for _, h := range d.hosts {
		if h.cannot != "" || !d.hasMemory(h) {
			continue
		}
		if best == nil || d.better(h, best) {
			best = h
		}
	}
	return best
}

// hasMemory also for what this plan puts there.
func (d *draft) hasMemory(h *place) bool {
	return h.FreeMemory == 0 || h.FreeMemory >= d.p.tpl.Memory*uint64(h.under+h.planned+1)
}

func (d *draft) better(a, b *place) bool {
	return cmp.Or(cmp.Compare(d.zones[a.Zone], d.zones[b.Zone]), cmp.Compare(a.standing, b.standing),
		cmp.Compare(d.lacksImage(a), d.lacksImage(b)), cmp.Compare(b.FreeMemory, a.FreeMemory), cmp.Compare(a.ID, b.ID)) < 0
}

func (d *draft) lacksImage(h *place) int {
	if d.p.tpl.Image == "" || slices.Contains(h.Images, d.p.tpl.Image) {
		return 0
	}
	return 1
}

// makeRoom raises the host's cap by one if one more needs it. Where the ceiling leaves none, another
// host whose list is of now gives up what it does not use.
func (d *draft) makeRoom(h *place) bool {
	if h.total+h.planned < h.cap {
		return true
	}
	if d.room <= 0 {
		var from *place
		for _, o := range d.hosts {
			if o != h && o.slack() > 0 && (from == nil || o.slack() > from.slack()) {
				from = o
			}
		}
		if from == nil || d.room < 0 {
			return false
		}
		from.cap--
		d.room++
	}
	h.cap++
	d.room--
	return true
}

// slack is by how much the host's cap may be lowered without a word to it: nothing is under way there
// that would rely on it.
func (h *place) slack() int {
	if !h.fresh {
		return 0
	}
	return h.cap - h.total - h.planned
}

// retireForRoom takes away what serves least when the ceiling leaves no room: on hosts that are unwell
// all that is needed, else one of the old, when nothing else is under way.
func (d *draft) retireForRoom() {
	n := d.full
	for _, h := range d.hosts {
		for _, s := range slices.Concat(h.old, h.good) {
			if h.Unwell != "" && !h.Draining && h.spare > 0 && n > 0 {
				d.retire(h, s, "the host is unwell, and there is room for no other")
				h.spare--
				n--
			}
		}
	}
	for _, h := range d.hosts {
		busy := h.under > 0 || slices.ContainsFunc(h.sandboxes(), func(s *Sandbox) bool { return s.State == Retiring })
		if h.fresh && busy {
			return
		}
	}
	if n > 0 && len(d.plan.Steps) == 0 {
		d.retireSome(1, func(h *place) []*Sandbox { return h.old }, func(h *place, s *Sandbox) string {
			return d.p.old(h.member, s, d.now) + ", and there is room for no other"
		})
	}
}

// retireOld takes away as many as can be claimed beyond the goal.
func (d *draft) retireOld() {
	d.retireSome(d.claimable-d.plan.Goal.N, func(h *place) []*Sandbox { return h.old }, func(h *place, s *Sandbox) string { return d.p.old(h.member, s, d.now) })
}

// retireSurplus takes away what has been too many for a while, or exceeds the ceiling.
func (d *draft) retireSurplus() {
	total := 0
	for _, h := range d.hosts {
		total += h.floor(d.p.caps[h.ID], false)
		for _, s := range h.seen {
			if s.State == Retiring {
				total--
			}
		}
	}
	total -= len(d.going)
	if over := total - d.p.spec.Ceiling; over > 0 {
		d.retireSome(over, func(h *place) []*Sandbox { return slices.Concat(h.old, h.good) },
			func(*place, *Sandbox) string { return fmt.Sprintf("the ceiling is %d", d.p.spec.Ceiling) })
		return
	}
	highest, known := d.p.recent.highest(d.plan.Goal.N, d.now)
	if known {
		d.thin(d.good-highest, fmt.Sprintf("no more than %d were wanted for %s", highest, Grace))
	}
}

// thin takes away where most are: from the zone and the host that have most, the oldest there.
func (d *draft) thin(n int, why string) {
	for ; n > 0; n-- {
		var from *place
		for _, h := range d.hosts {
			if h.counts && h.spare > 0 && len(h.good) > 0 && (from == nil || d.fuller(h, from)) {
				from = h
			}
		}
		if from == nil {
			return
		}
		d.retire(from, from.good[0], why)
		from.good = from.good[1:]
		from.spare--
		from.standing--
		d.zones[from.Zone]--
	}
}

func (d *draft) fuller(a, b *place) bool {
	return cmp.Or(-cmp.Compare(d.zones[a.Zone], d.zones[b.Zone]), -cmp.Compare(a.standing, b.standing), older(a.good[0], b.good[0])) < 0
}

// retireSome takes the oldest first, on hosts that count, of what is reserved for nobody.
func (d *draft) retireSome(n int, of func(*place) []*Sandbox, why func(*place, *Sandbox) string) {
	type at struct {
		h *place
		s *Sandbox
	}
	var all []at
	for _, h := range d.hosts {
		if !h.counts {
			continue
		}
		for _, s := range of(h) {
			if !d.going[s.ID] {
				all = append(all, at{h, s})
			}
		}
	}
	slices.SortFunc(all, func(a, b at) int { return older(a.s, b.s) })
	for _, a := range all {
		if n <= 0 {
			return
		}
		if a.h.spare > 0 {
			d.retire(a.h, a.s, why(a.h, a.s))
			a.h.spare--
			n--
		}
	}
}

// shrink gives up what a lower ceiling does not allow, before anything is placed by what was allowed.
func (d *draft) shrink() {
	for _, h := range d.hosts {
		for d.room < 0 && h.slack() > 0 {
			h.cap--
			d.room++
		}
	}
}

// settleCaps notes what each host may have; of what nobody may have any more nothing is left.
func (d *draft) settleCaps() {
	d.plan.Caps = Caps{}
	for _, h := range d.hosts {
		if h.cap > 0 {
			d.plan.Caps[h.ID] = h.cap
		}
	}
	d.plan.CapsChanged = !maps.Equal(d.plan.Caps, d.p.caps)
	for i := range d.plan.Steps {
		if s := &d.plan.Steps[i]; s.Kind == PrepareOne {
			s.Cap = d.plan.Caps[s.Host]
		}
	}
}
