package sim

import (
	"bytes"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// group is the replicated log of the scheduler, as raft gives it: one leader per term, entries that
// a majority has stay, those in flight at a change of leader may stay or be lost.
type group struct {
	w       *World
	log     [][]byte      // committed; nil: the beginning of a term
	entries []sched.Entry // the log, decoded
	term    int
	leader  int // replica that leads the newest term; -1: none
	reps    []*replica
	flight  []*proposal
	idle    time.Duration // since when no leader has a majority
	patient time.Duration // how long that is borne
	oracle  *sched.State  // every committed entry, at once
}

type proposal struct {
	raw  []byte
	rep  *replica
	term int
	done signal
	out  sched.Outcome
	err  error
}

// replica is one member. Its state machine is memory: it comes from the last snapshot and the log.
type replica struct {
	g       *group
	id      int
	p       *proc
	st      *sched.State
	applied int
	snap    []byte // durable
	snapAt  int
	term    int // in which it believes that it leads; 0: none
	lead    *leader
}

func newGroup(w *World, n int) *group {
	g := &group{w: w, leader: -1, oracle: sched.NewState(), patient: 300 * time.Millisecond}
	for i := range n {
		name := "scheduler-" + string(rune('1'+i))
		r := &replica{g: g, id: i, p: w.proc(name, name)}
		r.p.rate = 0.97 + 0.06*w.rng.Float64()
		r.p.skew = w.between(-time.Second, time.Second)
		r.p.begin, r.p.ended = r.open, r.lost
		g.reps = append(g.reps, r)
		w.services["scheduler"] = append(w.services["scheduler"], r.p)
	}
	w.after(0, g.look)
	return g
}

// open reads the state that the replica has on its disk; the log after it is applied when it leads.
func (r *replica) open() {
	r.st, r.applied = sched.NewState(), 0
	if r.snap != nil {
		st, err := sched.ReadState(bytes.NewReader(r.snap))
		if err != nil {
			r.g.w.breaks("snapshot-restores", "%s cannot read its own snapshot: %v", r.p.name, err)
			return
		}
		r.st, r.applied = st, r.snapAt
		r.g.w.cov.hit("replica restored from a snapshot")
	}
}

func (r *replica) lost() {
	r.st, r.term, r.lead = nil, 0, nil
	if r.g.leader == r.id { // it comes back as one that follows
		r.g.leader = -1
	}
}

// catchUp applies what is committed.
func (r *replica) catchUp(upto int, tell func(sched.Outcome)) {
	for r.applied < upto {
		raw := r.g.log[r.applied]
		r.applied++
		if raw == nil {
			continue
		}
		out := r.st.Apply(uint64(r.applied), r.g.entries[r.applied-1])
		if tell != nil {
			tell(out)
		}
	}
}

// snapshot writes the state of a replica, and reads it back.
func (r *replica) snapshot() {
	r.catchUp(len(r.g.log), r.teller())
	var buf, again bytes.Buffer
	if _, err := r.st.WriteTo(&buf); err != nil {
		r.g.w.breaks("snapshot-writes", "%v", err)
		return
	}
	st, err := sched.ReadState(bytes.NewReader(buf.Bytes()))
	if err == nil {
		_, err = st.WriteTo(&again)
	}
	if err != nil || !bytes.Equal(buf.Bytes(), again.Bytes()) {
		r.g.w.breaks("snapshot-restores", "what %s wrote at entry %d reads back as another state: %v", r.p.name, r.applied, err)
		return
	}
	r.snap, r.snapAt = buf.Bytes(), r.applied
	r.g.w.say("snapshot %s at %d: %d bytes", r.p.name, r.applied, buf.Len())
}

func (r *replica) teller() func(sched.Outcome) {
	if r.lead == nil {
		return nil
	}
	return r.lead.applied
}

// majority reports whether a replica can talk to most of the group now, itself included.
func (g *group) majority(r *replica) bool {
	if !r.p.running() {
		return false
	}
	n := 0
	for _, o := range g.reps {
		if o == r || o.p.running() && g.w.connected(r.p, o.p) && g.w.connected(o.p, r.p) {
			n++
		}
	}
	return 2*n > len(g.reps)
}

// look elects a leader when there is none for long enough.
func (g *group) look() {
	w := g.w
	w.after(50*time.Millisecond, g.look)
	if g.leader >= 0 && g.majority(g.reps[g.leader]) {
		g.idle = 0
		g.settle()
		return
	}
	if g.idle == 0 {
		g.idle, g.patient = w.now, w.between(200*time.Millisecond, 900*time.Millisecond)
		return
	}
	if w.now-g.idle < g.patient {
		return
	}
	var able []*replica
	for _, r := range g.reps {
		if g.majority(r) {
			able = append(able, r)
		}
	}
	if len(able) > 0 {
		g.elect(pick(&w.kernel, able))
	}
}

// elect makes r the leader of a new term. Of what the old one had in flight a first part was
// replicated far enough to stay.
func (g *group) elect(r *replica) {
	w := g.w
	if g.leader >= 0 {
		w.cov.hit("leader changed")
		g.depose(g.reps[g.leader])
	}
	if old := r.lead; old != nil { // it was the leader before and is again
		r.term, r.lead = 0, nil
		old.end()
	}
	keep := w.rng.IntN(len(g.flight) + 1)
	for i, p := range g.flight {
		if i < keep {
			w.cov.hit("entry of a deposed leader committed")
			g.commit(p, false)
			continue
		}
		w.cov.hit("entry lost with its leader")
	}
	for _, p := range g.flight {
		old := p.rep
		if !old.p.up || old.term != p.term {
			p.finish(w, fail(errkind.NotLeader, "leadership lost"))
		}
	}
	orphans := g.flight
	g.flight = nil
	for _, p := range orphans {
		if !p.done.set {
			p.rep.lead.waiting = append(p.rep.lead.waiting, p)
		}
	}
	g.term++
	g.leader, g.idle = r.id, 0
	g.log, g.entries = append(g.log, nil), append(g.entries, sched.Entry{})
	r.term = g.term
	w.say("elect %s term %d at %d", r.p.name, g.term, len(g.log))
	r.catchUp(len(g.log), nil)
	r.lead = newLeader(r, g.term)
}

// depose has a replica find out, now or later, that it does not lead any more. Until then it believes.
func (g *group) depose(r *replica) {
	term, gen := r.term, r.p.gen
	if term == 0 || !r.p.up {
		return
	}
	d := g.w.between(0, 40*time.Millisecond)
	if !g.majority(r) {
		d = g.w.between(100*time.Millisecond, 500*time.Millisecond)
	}
	if g.w.opt.Mutation == NoVerify {
		d = 30 * time.Second
	}
	var down func()
	down = func() {
		switch {
		case !r.p.up || r.p.gen != gen || r.term != term:
		case r.p.paused:
			g.w.cov.hit("deposed leader that still believes, paused")
			r.p.backlog = append(r.p.backlog, func() { g.w.after(g.w.between(0, 200*time.Millisecond), down) })
		default:
			r.term = 0
			g.w.say("depose %s", r.p.name)
			l := r.lead
			r.lead = nil
			l.end()
		}
	}
	g.w.after(d, down)
}

// settle commits what is in flight while the leader has a majority.
func (g *group) settle() {
	if g.leader < 0 || len(g.flight) == 0 || !g.majority(g.reps[g.leader]) {
		return
	}
	all := g.flight
	g.flight = nil
	for _, p := range all {
		g.commit(p, true)
	}
}

// commit adds an entry to the log and applies it where it is waited for.
func (g *group) commit(p *proposal, answered bool) {
	g.log, g.entries = append(g.log, p.raw), append(g.entries, sched.Entry{})
	g.w.committed(len(g.log), p.raw)
	if !answered {
		return
	}
	p.rep.catchUp(len(g.log), func(out sched.Outcome) {
		p.out = out
		if l := p.rep.lead; l != nil {
			l.applied(out)
		}
	})
	p.finish(g.w, nil)
}

func (p *proposal) finish(w *World, err error) {
	if !p.done.set {
		p.err = err
		p.done.fire(w)
	}
}

// apply proposes an entry and waits until it is applied. An error is ambiguous.
func (l *leader) apply(t *task, c *ctx, e sched.Entry) (sched.Outcome, error) {
	g := l.r.g
	if err := c.err(); err != nil {
		return sched.Outcome{}, err
	}
	if l.over {
		return sched.Outcome{}, fail(errkind.NotLeader, "does not lead")
	}
	e.Now = sched.At(l.r.p.wall())
	raw, err := e.Encode()
	if err != nil {
		return sched.Outcome{}, fail(errkind.Internal, err.Error())
	}
	p := &proposal{raw: raw, rep: l.r, term: l.term}
	if g.term != l.term { // it reaches nobody any more
		g.w.cov.hit("proposal of a deposed leader")
		l.waiting = append(l.waiting, p)
	} else {
		g.flight = append(g.flight, p)
		g.w.after(g.w.between(300*time.Microsecond, 4*time.Millisecond), g.settle)
	}
	t.wait(nil, -1, &p.done)
	return p.out, p.err
}

// verify asks a majority whether this replica still leads.
func (l *leader) verify(t *task, c *ctx) error {
	if l.w.opt.Mutation == NoVerify {
		return nil
	}
	for {
		t.wait(c, l.w.between(300*time.Microsecond, 2*time.Millisecond))
		g := l.r.g
		switch {
		case l.over:
			return fail(errkind.NotLeader, "does not lead")
		case g.term == l.term && g.majority(l.r):
			return nil
		case c.over():
			return c.err()
		}
		t.wait(c, 20*time.Millisecond, &l.ended)
	}
}
