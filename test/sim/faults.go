package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// faults are how often what goes wrong, drawn for each seed: one seed has few kinds often, another all.
type faults struct {
	slowWake, failWake float64
	every              time.Duration
	kinds              []string
}

// fault kinds; a seed has a part of them.
var faultKinds = []string{"agent crash", "agent pause", "power cut", "host dead for good", "suspend", "clock jump", "partition", "isolate host",
	"pool full", "store away", "store slow", "store full", "leader crash", "leader pause", "replica restart", "leader moved", "replica snapshot", "split group", "leader without peers",
	"drain", "sandbox killed", "dog killed", "service crash", "stream away", "timers early", "remove host", "evict"}

func (w *World) chooseFaults() {
	w.faults.every = w.between(1500*time.Millisecond, 12*time.Second)
	for _, k := range faultKinds {
		if w.chance(0.55) {
			w.faults.kinds = append(w.faults.kinds, k)
		}
	}
	if w.chance(0.5) {
		w.faults.slowWake, w.faults.failWake = 0.1*w.rng.Float64(), 0.15*w.rng.Float64()
	}
	if w.chance(0.6) {
		w.net.drop, w.net.dup, w.net.late = 0.03*w.rng.Float64(), 0.05*w.rng.Float64(), 0.05*w.rng.Float64()
		if w.chance(0.3) {
			w.net.late = 0.2
		}
	}
}

// trouble has one fault after another happen until it is calm.
func (w *World) trouble() {
	if w.calm {
		return
	}
	if len(w.faults.kinds) > 0 {
		w.inject(pick(&w.kernel, w.faults.kinds))
	}
	w.after(w.between(w.faults.every/2, 2*w.faults.every), w.trouble)
}

// for a while, and then undone, also when it is calm before.
func (w *World) while(d time.Duration, undo func()) {
	done := false
	once := func() {
		if !done {
			done = true
			undo()
		}
	}
	w.undo = append(w.undo, once)
	w.after(d, once)
}

func (w *World) inject(kind string) {
	if w.machineFault(kind) || w.groupFault(kind) || w.otherFault(kind) {
		w.cov.hit("fault: " + kind)
		w.say("fault %s", kind)
	}
}

func (w *World) machineFault(kind string) bool {
	m := pick(&w.kernel, w.machines)
	if m.dead || w.now < m.calm {
		return false
	}
	switch kind {
	case "agent crash":
		m.agent.crash()
		w.while(w.between(100*time.Millisecond, 25*time.Second), func() {
			if m.up {
				m.agent.start()
			}
		})
	case "agent pause":
		m.agent.pause()
		w.while(w.between(time.Second, 25*time.Second), m.agent.resume)
	case "power cut":
		m.cut()
		w.while(w.between(time.Second, 40*time.Second), m.boot)
	case "host dead for good":
		if w.chance(0.7) || w.living() < 3 {
			return false
		}
		m.cut()
		m.dead = true
	case "suspend":
		m.suspend()
		w.while(w.between(time.Second, 30*time.Second), m.awake)
	case "clock jump":
		m.jump += w.between(100*time.Millisecond, 10*time.Second)
	case "isolate host":
		w.isolate(string(m.id), w.between(2*time.Second, 40*time.Second))
	case "pool full":
		m.full = true
		w.while(w.between(2*time.Second, 30*time.Second), func() { m.full = false })
	case "sandbox killed":
		if len(m.boxes) == 0 {
			return false
		}
		id := pick(&w.kernel, sortedKeys(m.boxes))
		m.kill(m.boxes[id], "out of memory")
	case "dog killed": // hostagent starts another one at its next renewal; both never die together
		if !m.agent.running() || m.a == nil || m.a.end()-m.clock() < 5*time.Second {
			return false
		}
		m.dog.crash()
		m.calm = w.now + 4*time.Second
		w.while(3*time.Second, func() {
			if m.up {
				m.dog.start()
			}
		})
	case "evict":
		return m.evict()
	default:
		return false
	}
	return true
}

// evict makes room: it removes a local image of which all is saved, also where scheduler takes something
// for unsaved though nothing was written.
func (m *machine) evict() bool {
	for _, k := range sortedDisks(m.disks) {
		img := m.disks[k]
		r := img.rec
		if !img.attached && img.busy == nil && r.State == "clean" && r.Base != "" && !r.Ephemeral && r.Pending.ID == "" {
			delete(m.disks, k)
			m.w.say("%s evicts the disk of %s", m.id, short(k.Session))
			return true
		}
	}
	return false
}

func (w *World) living() (n int) {
	for _, m := range w.machines {
		if !m.dead && !m.removed {
			n++
		}
	}
	return n
}

func (w *World) isolate(node string, d time.Duration) {
	for _, p := range w.procs {
		if p.node != node {
			w.cutLink(node, p.node, d)
			w.cutLink(p.node, node, d)
		}
	}
}

func (w *World) cutLink(a, b string, d time.Duration) {
	k := [2]string{a, b}
	if w.net.cut[k] {
		return
	}
	w.net.cut[k] = true
	w.while(d, func() { delete(w.net.cut, k) })
}

func (w *World) groupFault(kind string) bool {
	g := w.group
	r := pick(&w.kernel, g.reps)
	if kind == "leader crash" || kind == "leader pause" || kind == "leader moved" || kind == "split group" || kind == "leader without peers" {
		if g.leader < 0 {
			return false
		}
		r = g.reps[g.leader]
	}
	switch kind {
	case "leader crash", "replica restart":
		r.p.crash()
		w.while(w.between(200*time.Millisecond, 15*time.Second), r.p.start)
	case "leader pause":
		r.p.pause()
		w.while(w.between(300*time.Millisecond, 20*time.Second), r.p.resume)
	case "leader moved":
		to := pick(&w.kernel, g.reps)
		if to == r || !g.majority(to) {
			return false
		}
		g.elect(to)
	case "replica snapshot":
		if !r.p.running() {
			return false
		}
		r.snapshot()
	case "leader without peers":
		d := w.between(2*time.Second, 30*time.Second)
		for _, o := range g.reps {
			if o != r {
				w.cutLink(r.p.node, o.p.node, d)
				w.cutLink(o.p.node, r.p.node, d)
			}
		}
	case "split group":
		w.isolate(r.p.node, w.between(500*time.Millisecond, 20*time.Second))
	default:
		return false
	}
	return true
}

func (w *World) otherFault(kind string) bool {
	switch kind {
	case "partition":
		a, b := pick(&w.kernel, w.procs), pick(&w.kernel, w.procs)
		if a.node == b.node {
			return false
		}
		w.cutLink(a.node, b.node, w.between(time.Second, 20*time.Second))
		if w.chance(0.6) {
			w.cutLink(b.node, a.node, w.between(time.Second, 20*time.Second))
		}
	case "store away":
		w.store.away = true
		w.while(w.between(time.Second, 30*time.Second), func() { w.store.away = false })
	case "store slow":
		w.store.slow = true
		w.while(w.between(time.Second, 20*time.Second), func() { w.store.slow = false })
	case "store full":
		w.store.full = true
		w.while(w.between(time.Second, 20*time.Second), func() { w.store.full = false })
	case "service crash":
		p := pick(&w.kernel, []*proc{w.identity.p, w.lifecycle.p, w.credentials.p})
		p.crash()
		w.while(w.between(100*time.Millisecond, 8*time.Second), p.start)
	case "stream away":
		w.stream.p.crash()
		w.while(w.between(time.Second, 8*time.Second), w.stream.p.start)
	case "timers early":
		w.stream.early = true
		w.while(w.between(3*time.Second, 90*time.Second), func() { w.stream.early = false })
	case "drain":
		w.operate(false)
	case "remove host":
		w.operate(true)
	default:
		return false
	}
	return true
}

// operate drains a host, and then has it serve again or takes it out.
func (w *World) operate(out bool) {
	m := pick(&w.kernel, w.machines)
	if m.removed || w.draining[m.id] || w.living() < 3 && out || len(w.draining) > 0 {
		return
	}
	w.draining[m.id] = true
	w.spawn(w.users.p, "operator", func(t *task) {
		defer delete(w.draining, m.id)
		c := w.within(nil, 90*time.Second)
		grace := w.between(3*time.Second, 40*time.Second)
		_, err := ask[struct{}](t, c, "scheduler", "drain", drainReq{m.id, true, grace})
		if err == nil {
			w.cov.hit("drain asked for")
		}
		for err == nil && !c.over() {
			if h := w.group.oracle.Host(m.id); h == nil || h.Drained {
				break
			}
			t.sleep(c, time.Second)
		}
		h := w.group.oracle.Host(m.id)
		if out && (h != nil && h.Drained || m.dead) {
			w.takeOut(t, m, m.dead)
		}
		if !m.removed {
			w.resumeHost(t, m.id)
		}
	})
}

func (w *World) resumeHost(t *task, h ids.Host) {
	for range 50 {
		if _, err := ask[struct{}](t, w.within(nil, 20*time.Second), "scheduler", "drain", drainReq{h, false, 0}); err == nil || is(err, errkind.NotFound) {
			return
		}
		t.sleep(nil, time.Second)
	}
}

// takeOut removes a host for good; its machine is wiped.
func (w *World) takeOut(t *task, m *machine, lose bool) bool {
	_, err := ask[struct{}](t, w.within(nil, 20*time.Second), "scheduler", "remove_host", removeReq{m.id, lose})
	if err != nil && !w.group.oracle.Removed(m.id) {
		w.say("remove %s: %v", m.id, err)
		return false
	}
	w.cov.hit("host removed")
	m.removed = true
	if m.up && w.chance(0.5) { // some operators forget to switch it off
		w.after(w.between(time.Second, 20*time.Second), func() { m.cut(); m.dead = true })
	} else {
		m.cut()
		m.dead = true
	}
	return true
}
