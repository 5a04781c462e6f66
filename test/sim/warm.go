package sim

import (
	"fmt"
	"math/rand/v2"

	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// advice is what a pool says when everything about it goes wrong: its word is
// lost, given to several placements, or about a warm sandbox that is gone, or on
// another host. It draws from numbers of its own, and never moves a session, so
// that a seed plays as it did without a pool.
type advice struct {
	rng     *rand.Rand
	made    []string // every warm sandbox there was
	claimed map[string]placed
}

func newAdvice(seed uint64) *advice {
	return &advice{rng: rand.New(rand.NewPCG(seed, 0x706f6f6c73)), claimed: map[string]placed{}}
}

// advise is a pool's answer for a placement.
func (w *World) advise(named []sched.Candidate) []sched.Candidate {
	hosts, a := sched.Reservable(named), w.advice
	switch draw := a.rng.Float64(); {
	case len(hosts) == 0 || draw < 0.3:
		return named
	case draw < 0.4:
		w.cov.hit("over share: starts cold")
		return sched.Cold(named)
	}
	w.machine(hosts[0]).prepare()
	recent := a.made[max(len(a.made)-6, 0):]
	if len(recent) == 0 {
		return named
	}
	return sched.Reserved(named, hosts[0], recent[a.rng.IntN(len(recent))])
}

func (w *World) machine(h ids.Host) *machine {
	for _, m := range w.machines {
		if m.id == h {
			return m
		}
	}
	panic("a host that is none: " + h.String())
}

// prepare makes a warm sandbox while a process of hostagent is there to.
func (m *machine) prepare() {
	if !m.up || m.a == nil || len(m.a.warm) >= 2 {
		return
	}
	a := m.w.advice
	name := fmt.Sprintf("w%d", len(a.made)+1)
	a.made = append(a.made, name)
	m.a.warm[name] = true
}

// claim takes the warm sandbox that a wake was told of, if it is there. A
// process knows those alone that it made itself.
func (a *agent) claim(key ids.SessionKey, r wakeReq) {
	told(a.w, key, r)
	switch {
	case r.cold || r.reservation == "":
		return
	case !a.warm[r.reservation]:
		a.w.cov.hit("reserved warm sandbox was gone")
		return
	}
	delete(a.warm, r.reservation)
	at := placed{key, r.ref.Epoch}
	if before, twice := a.w.advice.claimed[r.reservation]; twice {
		a.w.breaks("claimed-once", "%s was claimed by session %s in epoch %s, and before by %s in %s", r.reservation, short(key), at.epoch, short(before.key), before.epoch)
	}
	a.w.advice.claimed[r.reservation] = at
	a.w.cov.hit("warm sandbox claimed")
}

// told holds a wake to what was committed with the placement of its epoch.
func told(w *World, key ids.SessionKey, r wakeReq) {
	s := w.group.oracle.Session(key)
	if s == nil || s.Epoch != r.ref.Epoch || s.State != sched.Waking {
		return
	}
	if s.Wake.Reservation != r.reservation || s.Wake.Cold != r.cold {
		w.breaks("reservation-committed", "the wake of session %s in epoch %s was told %q (cold %v), its placement has %q (cold %v)",
			short(key), s.Epoch, r.reservation, r.cold, s.Wake.Reservation, s.Wake.Cold)
	}
}
