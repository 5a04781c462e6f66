package sim

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// content is what a disk holds: all writes up to this one.
type content struct {
	n      int
	parent *content
	epoch  ids.Epoch
}

// holds reports whether c has every write that old has.
func (c *content) holds(old *content) bool {
	if old == nil {
		return true
	}
	for x := c; x != nil && x.n >= old.n; x = x.parent {
		if x == old {
			return true
		}
	}
	return false
}

func (c *content) String() string {
	if c == nil {
		return "nothing"
	}
	return fmt.Sprintf("write %d of epoch %s", c.n, c.epoch)
}

// image is one disk on one host: durable but for the mount.
type image struct {
	rec      host.Record
	data     *content
	synced   *content // what a power cut leaves
	attached bool
	save     *ctx   // of the save under way that may be ended
	busy     *task  // who has the turn on the disk
	free     signal // the turn was given back
}

// box is a sandbox. It runs without hostagent.
type box struct {
	id    string
	key   host.Key
	epoch ids.Epoch
	img   *image
	mem   uint64
	wrote bool // user processes run in it

	active bool   // scheduler committed its epoch as active
	fine   uint64 // that it runs agreed with what was committed up to this entry; 0: never
}

// machine is one host: its clock, its disks, what runs on it, and its watchdog.
type machine struct {
	w         *World
	id        ids.Host
	agent     *proc
	dog       *proc
	up        bool
	dead      bool // for good
	removed   bool
	suspended bool
	awoke     time.Duration // when it last came back from being suspended
	rate      float64
	jump      time.Duration
	boots     int
	cap       sched.Limits
	full      bool // the disk pool takes nothing

	fence  time.Duration // word of hostagent: until then sandboxes may run, on the lease's clock
	stop   time.Duration
	frozen bool
	boxes  map[string]*box
	inv    map[ids.SessionKey]inventory
	disks  map[host.Key]*image
	notes  map[host.Key]bool // generations of which the store is to be cleaned
	a      *agent
	calm   time.Duration // no other fault here until then
}

// inventory is what hostagent keeps of a session on its disk.
type inventory struct {
	st     host.State
	box    string
	terms  *sched.Terms
	tenant ids.Tenant
	reply  any
	at     time.Duration
}

func newMachine(w *World, n int) *machine {
	id := ids.Host(fmt.Sprintf("h%d", n))
	m := &machine{w: w, id: id, rate: 0.95 + 0.15*w.rng.Float64(), cap: sched.Limits{CPUMillis: 4000, MemoryBytes: uint64(1+w.rng.IntN(3)) << 30, PIDs: 1000, DiskBytes: 100 << 30},
		boxes: map[string]*box{}, inv: map[ids.SessionKey]inventory{}, disks: map[host.Key]*image{}, notes: map[host.Key]bool{}}
	m.agent, m.dog = w.proc("agent-"+string(id), string(id)), w.proc("dog-"+string(id), string(id))
	m.agent.host, m.dog.host = id, id
	m.agent.rate, m.dog.rate = m.rate, m.rate
	m.agent.skew = w.between(-time.Second, time.Second)
	w.services["host."+string(id)] = []*proc{m.agent}
	m.agent.begin = func() { m.a = newAgent(m) }
	m.agent.ended = func() { m.a = nil }
	m.dog.begin = func() { w.spawn(m.dog, "watch", m.watch) }
	return m
}

// clock is CLOCK_BOOTTIME: it counts also while the machine is suspended.
func (m *machine) clock() time.Duration { return time.Duration(float64(m.w.now)*m.rate) + m.jump }

func (m *machine) boot() {
	if m.up || m.dead {
		return
	}
	m.up, m.frozen, m.fence = true, true, 0
	m.dog.start()
	m.agent.start()
}

// cut is a power cut.
func (m *machine) cut() {
	if !m.up {
		return
	}
	m.w.say("power cut %s", m.id)
	m.up, m.suspended = false, false
	m.agent.crash()
	m.dog.crash()
	clear(m.boxes)
	for _, k := range sortedDisks(m.disks) {
		img := m.disks[k]
		img.attached, img.data, img.save, img.busy = false, img.synced, nil, nil
	}
}

func (m *machine) suspend() {
	m.suspended = true
	m.agent.pause()
	m.dog.pause()
}

func (m *machine) awake() {
	if m.suspended {
		m.suspended, m.awoke = false, m.w.now
		m.agent.resume()
		m.dog.resume()
	}
}

// watch is the watchdog; see services/hostagent/internal/fence/watchdog.
func (m *machine) watch(t *task) {
	for {
		now := m.clock()
		switch {
		case m.w.opt.Mutation == HostIgnoresLease:
			m.frozen = false
		case now < m.fence:
			if m.frozen {
				m.frozen = false
				m.w.say("thaw %s", m.id)
			}
		default:
			if !m.frozen {
				if m.w.chance(0.2) { // a try takes up to a second
					t.sleep(nil, m.w.between(0, 900*time.Millisecond))
				}
				m.frozen = true
				m.w.cov.hit("sandboxes frozen")
				m.w.say("freeze %s", m.id)
			}
			if now >= m.stop && len(m.boxes) > 0 && m.w.opt.stops {
				for _, id := range sortedKeys(m.boxes) {
					m.w.cov.hit("sandbox stopped by the watchdog")
					m.kill(m.boxes[id], "its host's lease ran out")
				}
			}
		}
		t.sleep(nil, 100*time.Millisecond)
	}
}

// kill ends a sandbox that nobody asked to end.
func (m *machine) kill(b *box, why string) {
	delete(m.boxes, b.id)
	m.w.say("sandbox %s on %s is gone: %s", b.id, m.id, why)
	if a := m.a; a != nil && m.agent.up {
		m.w.spawn(m.agent, "lost", func(t *task) {
			t.sleep(nil, m.w.between(time.Millisecond, 50*time.Millisecond))
			if s := a.sessions[b.key.Session]; s != nil && s.box == b {
				a.lose(s, b, why)
			}
		})
	}
}

// mayAct: user processes run, and the host has not been told to hold still.
func (m *machine) mayAct(b *box) bool {
	return m.runs(b) && m.clock() < m.fence
}

func (m *machine) runs(b *box) bool {
	return m.up && !m.suspended && !m.frozen && b.active
}

// Disks: the shell of services/hostagent/internal/disk around its rules.

func (m *machine) attach(w host.Want) (*image, bool, error) {
	img := m.disks[w.Key]
	switch {
	case img == nil && w.Fresh:
		img = &image{rec: host.Record{Format: 1, Session: w.Session, Generation: w.Generation, State: host.Blank, Size: w.Size, Image: w.Image, Ephemeral: w.Ephemeral}}
	case img == nil:
		return nil, false, fail(errkind.NotFound, "this host has no disk of the session")
	case img.attached && img.rec.Attached != w.Epoch:
		return nil, false, fail(errkind.Busy, "the disk is attached for another epoch")
	case img.attached:
		return img, img.rec.State == host.Blank, nil
	case m.w.opt.Mutation == WakeTakesAnyDisk:
	case w.Fresh && img.rec.State != host.Blank:
		return nil, false, fail(errkind.Conflict, "asked for a fresh disk, but this generation was active here")
	case !w.Fresh && !img.rec.Usable(w.Head, w.LastActive):
		m.w.cov.hit("stale disk refused")
		return nil, false, fail(errkind.StaleEpoch, "the local disk is not the newest")
	}
	if m.full {
		m.w.cov.hit("wake on a full disk pool")
		return nil, false, fail(errkind.NoCapacity, "the disk pool is full")
	}
	created := img.rec.State == host.Blank && w.LastActive.IsZero()
	if img.rec.Pending.ID != "" && img.rec.Pending.ID == w.Head {
		m.w.cov.hit("proposal that had become the head")
		img.rec = img.rec.Committed(m.agent.wall())
	}
	img.rec = img.rec.AttachedFor(w)
	img.attached = true
	m.disks[w.Key] = img
	return img, created, nil
}

// restore makes the local image of a manifest.
func (m *machine) restore(k host.Key, lastActive ids.Epoch, man *manifest) error {
	old := m.disks[k]
	switch {
	case old != nil && old.attached:
		return fail(errkind.Busy, "the disk is attached")
	case old != nil && old.rec.Usable(man.id, lastActive):
		return fail(errkind.Conflict, "the local disk is the newest")
	case m.full:
		return fail(errkind.NoCapacity, "the disk pool is full")
	}
	m.disks[k] = &image{data: man.data, synced: man.data, rec: host.Record{Format: 1, Session: k.Session, Generation: k.Generation, State: host.Clean,
		Epoch: lastActive, Base: man.id, AsOf: man.at, Image: "sha256:image"}}
	return nil
}
