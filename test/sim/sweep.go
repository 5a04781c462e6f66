package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// part removes all compute that is not owned, frozen as it may be, and returns once it is gone; see
// services/hostagent/part.go.
func (a *agent) part(t *task, own ownership) error {
	if !a.credible(own) {
		a.w.cov.hit("answer that nothing is owned not believed")
		return fail(errkind.Unavailable, "it says that this host owns nothing")
	}
	c := a.w.within(nil, 2*time.Minute)
	for _, k := range sortedKeys(a.sessions) {
		if err := a.partWith(t, c, a.sessions[k], own); err != nil {
			return err
		}
	}
	for _, id := range sortedKeys(a.m.boxes) {
		b := a.m.boxes[id]
		if b == nil || a.isOurs(b) {
			continue
		}
		if o := own.owned[b.key.Session]; o != nil && (o.State == sched.Active || o.State == sched.Waking || o.State == sched.Sleeping) && boxID(o.Key, o.Generation, o.Epoch) == id {
			continue
		}
		a.w.cov.hit("stray sandbox removed")
		t.sleep(c, a.w.between(time.Millisecond, 60*time.Millisecond))
		delete(a.m.boxes, id)
	}
	return c.err()
}

func (a *agent) isOurs(b *box) bool {
	s := a.sessions[b.key.Session]
	return s != nil && s.inv.box == b.id && (s.st.Phase != host.Absent && s.st.Phase != "" || s.op != nil)
}

// partWith ends what is here of a session in an epoch that this host does not own.
func (a *agent) partWith(t *task, c *ctx, s *sess, own ownership) error {
	for range 4 {
		o, op := own.of(s), s.op
		switch {
		case op != nil && o != nil, op == nil && (s.st.Phase == host.Absent || s.st.Phase == "" || keeps(o, s.st.Phase)):
			return nil
		case op != nil && (op.op == host.OpWake || op.op == host.OpSleep):
			op.c.cancel(a.w, errkind.Canceled)
		case op == nil:
			cmds, err := a.decide(s, host.Disown{}, nil)
			if err != nil {
				return err
			}
			a.w.cov.hit("compute of another owner removed")
			op, _, _ = a.command(s, cmds, nil)
		}
		if op == nil {
			continue
		}
		t.wait(c, -1, &op.done)
		if c.over() {
			return c.err()
		}
	}
	return fail(errkind.Busy, "it does not come to rest")
}

// of returns what scheduler says of the very epoch that is here, nil if it is not this host's.
func (own ownership) of(s *sess) *sched.Session {
	o := own.owned[s.key]
	if o == nil || o.Generation != s.st.Generation || o.Epoch != s.st.Epoch {
		return nil
	}
	return o
}

func keeps(o *sched.Session, p host.Phase) bool {
	switch {
	case o == nil:
		return false
	case o.State == sched.Active, o.State == sched.Waking:
		return p == host.Awake
	case o.State == sched.Sleeping:
		return p == host.Awake || p == host.Sleeping
	}
	return false
}

// sweep brings the host to what it owns, modelled on services/hostagent/sweep.go.
func (a *agent) sweep(t *task, own ownership) {
	if !a.credible(own) {
		a.w.cov.hit("answer that nothing is owned not believed")
		return
	}
	for _, r := range own.erased {
		_, _ = a.remove(t, a.w.within(nil, time.Minute), r)
	}
	var drops []*operation
	for _, k := range sortedKeys(a.sessions) {
		if op := a.compare(a.sessions[k], own); op != nil {
			drops = append(drops, op)
		}
	}
	for _, op := range drops {
		t.wait(nil, -1, &op.done)
	}
	for _, id := range sortedKeys(a.m.boxes) {
		b := a.m.boxes[id]
		if !a.isOurs(b) {
			a.w.cov.hit("stray sandbox removed")
			a.w.say("%s removes stray sandbox %s", a.m.id, id)
			delete(a.m.boxes, id)
		}
	}
	for _, k := range sortedDisks(a.m.disks) {
		s := a.sessions[k.Session]
		if s == nil || s.op == nil && (s.st.Generation != k.Generation || s.st.Phase == host.Absent || s.st.Phase == "") {
			a.m.disks[k].attached = false
		}
	}
	a.dropStale(t, own)
}

// dropStale removes images that are older than what is saved elsewhere, and says so.
func (a *agent) dropStale(t *task, own ownership) {
	for _, ref := range own.stale {
		key := host.Key{Session: ref.Session, Generation: ref.Generation}
		s, img := a.sessions[ref.Session], a.m.disks[key]
		if s != nil && (s.op != nil || s.touched >= own.asked || s.st.Phase != host.Absent && s.st.Phase != "") {
			continue
		}
		if img != nil {
			if img.attached || img.busy != nil && !img.busy.dead || img.rec.Droppable(ref.Epoch) != nil {
				a.w.cov.hit("stale disk kept: it is newer than named")
				continue
			}
			a.w.cov.hit("stale disk dropped")
			a.w.say("%s drops stale disk of %s", a.m.id, short(ref.Session))
			delete(a.m.disks, key)
		}
		a.passed(a.session(ref.Session), ref)
		a.w.spawn(a.m.agent, "dropped", func(t *task) {
			_ = a.persist(t, a.w.within(nil, time.Minute), func(c *ctx) error {
				_, err := ask[struct{}](t, c, "scheduler", "report", reportReq{ref: ref, what: "dropped"})
				return err
			})
		})
	}
}

// passed notes that the session lives on elsewhere in this epoch: a late command of an earlier one must
// not make a disk here that scheduler does not know of.
func (a *agent) passed(s *sess, ref sched.Ref) {
	if c := ref.Generation.Compare(s.st.Generation); c < 0 || c == 0 && ref.Epoch.Compare(s.st.Epoch) <= 0 {
		return
	}
	s.st = host.State{Phase: host.Absent, Generation: ref.Generation, Epoch: ref.Epoch, Spent: true, LastActivity: s.st.LastActivity}
	s.inv.st, s.inv.box, s.inv.reply = s.st, "", nil
	s.touched = a.w.now
	a.m.inv[s.key] = s.inv
}

// credible refuses an answer that says nothing is owned while sandboxes run here, until it was given
// several times in a row.
func (a *agent) credible(own ownership) bool {
	erased := map[ids.SessionKey]bool{}
	for _, r := range own.erased {
		erased[r.ref.Session] = true
	}
	live := 0
	for _, b := range a.m.boxes {
		if !erased[b.key.Session] {
			live++
		}
	}
	if len(own.owned) > 0 || live == 0 {
		a.empties = 0
		return true
	}
	a.empties++
	return a.empties >= 3
}

// compare brings one session to what scheduler says of it. What changed here after scheduler was asked
// is left to the next sweep.
func (a *agent) compare(s *sess, own ownership) *operation {
	if s.op != nil || s.touched >= own.asked {
		return nil
	}
	o := own.of(s)
	if o != nil && o.State == sched.Active && (s.st.Phase == host.Absent || s.st.Phase == "") && !s.st.Slept {
		a.report(s.inv, s.key, "the host has no sandbox of it")
		return nil
	}
	if keeps(o, s.st.Phase) {
		return nil
	}
	cmds, err := a.decide(s, host.Disown{}, nil)
	if err != nil {
		return nil
	}
	op, _, _ := a.command(s, cmds, nil)
	if op != nil {
		a.w.cov.hit("compute of another owner removed")
	}
	return op
}

// recover adopts every live sandbox that is owned, and reports those that are gone.
func (a *agent) recover(t *task, own ownership) {
	for _, k := range sortedKeys(own.owned) {
		o := own.owned[k]
		switch o.State {
		case sched.Active, sched.Waking, sched.Sleeping:
		default:
			continue
		}
		s := a.session(k)
		a.learn(s, o)
		b := a.m.boxes[boxID(k, o.Generation, o.Epoch)]
		usable := b != nil && (s.st.Phase == host.Awake || s.st.Phase == host.Absent && !s.st.Spent && o.State != sched.Waking)
		t.sleep(nil, a.w.between(time.Millisecond, 20*time.Millisecond))
		if usable && a.m.boxes[b.id] == b {
			if _, err := a.decide(s, host.Adopt{Generation: s.st.Generation, Epoch: s.st.Epoch, At: t.p.wall()}, nil); err == nil {
				s.box = b
				a.w.cov.hit("sandbox adopted")
				continue
			}
		}
		a.miss(s, o)
	}
}

// learn fills the record of a session whose own one is missing or of another epoch.
func (a *agent) learn(s *sess, o *sched.Session) {
	s.inv.tenant = o.Tenant
	if s.st.Generation == o.Generation && s.st.Epoch == o.Epoch || s.st.Phase != "" && s.st.Phase != host.Absent {
		return
	}
	s.st = host.State{Phase: host.Absent, Generation: o.Generation, Epoch: o.Epoch}
	s.inv.st, s.inv.terms, s.inv.reply = s.st, o.Terms, nil
	s.inv.box = boxID(s.key, o.Generation, o.Epoch)
}

// miss notes that an owned session has no compute here.
func (a *agent) miss(s *sess, o *sched.Session) {
	if s.st.Phase == host.Awake {
		if cmds, err := a.decide(s, host.Lost{Epoch: s.st.Epoch, Reason: "the sandbox is gone"}, nil); err == nil {
			a.command(s, cmds, nil)
		}
		return
	}
	if o.State == sched.Active && (s.st.Phase == host.Absent || s.st.Phase == "") && !s.st.Slept {
		s.touched = a.w.now
		a.report(s.inv, s.key, "the sandbox is gone")
	}
}
