package sim

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// truth is what really happened, as nobody in the simulated system can see it.
type truth struct {
	files     map[ids.Generation]*files
	handed    map[placed]*content // what a host gave the wake of an epoch
	activated map[placed]bool     // that scheduler committed as active
	owner     map[placed]ids.Host
	ended     map[placed]time.Duration // when another epoch followed, or the end
	drained   *machine                 // for good, at the end
	tidied    bool
	applied   uint64 // entries that the oracle applied, and more than 0
	acting    []acts // of check, which uses it again and again
}

// placed is one placement of one session; one entry may place several sessions.
type placed struct {
	key   ids.SessionKey
	epoch ids.Epoch
}

// files of one generation.
type files struct {
	saved *content // the head's: what may never be lost
	local *content // newest write that a host acknowledged and that nobody was told is lost
	awake int      // epochs that were active
	vm    bool     // one of them was in a virtual machine
}

func newTruth() truth {
	return truth{files: map[ids.Generation]*files{}, handed: map[placed]*content{}, activated: map[placed]bool{},
		owner: map[placed]ids.Host{}, ended: map[placed]time.Duration{}}
}

func (t *truth) of(g ids.Generation) *files {
	f := t.files[g]
	if f == nil {
		f = &files{}
		t.files[g] = f
	}
	return f
}

// grace is how long a machine that comes back from being suspended may run on before its watchdog looks.
const grace = 1200 * time.Millisecond

// wrote is told of every write that a host acknowledges.
func (w *World) wrote(m *machine, ref sched.Ref, c *content) {
	s := w.group.oracle.Session(ref.Session)
	if s == nil || s.Generation != ref.Generation || s.State == sched.Deleting {
		return // it is being deleted
	}
	ours := s.Epoch == ref.Epoch && s.Host == m.id && w.activated[placed{ref.Session, ref.Epoch}] && (s.State == sched.Active || s.State == sched.Sleeping)
	switch {
	case ours:
		w.of(ref.Generation).local = c
	case w.now-m.awoke < grace:
		w.cov.hit("write in the moment after a suspension")
	default:
		w.breaks("owner-writes", "host %s acknowledged a write of session %s in epoch %s, which is %s in epoch %s on %s", m.id, short(ref.Session), ref.Epoch, s.State, s.Epoch, s.Host)
	}
}

// saved is told of every checkpoint that a host acknowledges.
func (w *World) saved(ref sched.Ref, c *content) {
	if s := w.group.oracle.Session(ref.Session); s != nil && s.Generation == ref.Generation && !w.of(ref.Generation).saved.holds(c) {
		w.breaks("checkpoint-saved", "a checkpoint of session %s acknowledged %v, the head has %v", short(ref.Session), c, w.of(ref.Generation).saved)
	}
}

// checkKey is told of every data key that is handed out.
func (w *World) checkKey(to ids.Host, ref sched.Ref, began time.Duration) {
	end, over := w.ended[placed{ref.Session, ref.Epoch}]
	if w.owner[placed{ref.Session, ref.Epoch}] != to || over && end < began {
		w.breaks("key-for-owner", "host %s got the key of session %s epoch %s, whose owner is %q (over at %s, asked at %s)", to, short(ref.Session), ref.Epoch, w.owner[placed{ref.Session, ref.Epoch}], end, began)
	}
}

// refOfEntry is the session that an entry of a host's word names.
func refOfEntry(e sched.Entry) (r sched.Ref) {
	switch {
	case e.Woke != nil:
		r = e.Woke.Ref
	case e.Slept != nil:
		r = e.Slept.Ref
	case e.Manifest != nil:
		r = e.Manifest.Ref
	}
	return r
}

// committed applies an entry to the oracle and checks what it did.
func (w *World) committed(index int, raw []byte) {
	e, err := sched.DecodeEntry(raw)
	if err != nil {
		w.breaks("entry-decodes", "%v", err)
		return
	}
	st := w.group.oracle
	w.group.entries[index-1] = e
	before := map[ids.SessionKey]*sched.Session{}
	if e.Tick == nil && e.Trim == nil {
		for _, s := range st.Sessions() {
			before[s.Key] = s
		}
	}
	out := st.Apply(uint64(index), e)
	w.applied++
	w.say("%d %s%s", index, e.Name(), describe(out))
	if v := st.Violations(); len(v) > 0 {
		w.breaks("declared-transitions", "%v", v)
	}
	if e.Tick == nil && e.Trim == nil {
		w.memory()
	}
	for _, k := range out.Touched {
		w.touched(e, before[k], st.Session(k))
	}
	w.entryHits(e, out)
}

func describe(out sched.Outcome) string {
	text := ""
	if out.Refused != nil {
		return " refused " + out.Refused.Kind.String() + ": " + out.Refused.Reason
	}
	if s := out.Session; s != nil {
		text = fmt.Sprintf(" %s %s epoch %s on %q newest %q dirty %v head %q wake %v", short(s.Key), s.State, s.Epoch, s.Host, s.Newest, s.Dirty, s.Manifest, s.Wake != nil)
	}
	return text
}

func (w *World) touched(e sched.Entry, old, now *sched.Session) {
	if old != nil && (now == nil || now.Epoch != old.Epoch) && !old.Epoch.IsZero() {
		w.ended[placed{old.Key, old.Epoch}] = w.now
	}
	if now == nil {
		return
	}
	if !now.Epoch.IsZero() {
		if h, ok := w.owner[placed{now.Key, now.Epoch}]; ok && now.Host != "" && h != now.Host {
			w.breaks("one-owner", "epoch %s of session %s belongs to %s and to %s", now.Epoch, short(now.Key), h, now.Host)
		}
		if now.Host != "" {
			w.owner[placed{now.Key, now.Epoch}] = now.Host
		}
	}
	if old == nil || old.Generation != now.Generation {
		return
	}
	if now.Epoch.Compare(old.Epoch) < 0 || now.Revision < old.Revision {
		w.breaks("epochs-grow", "session %s went from epoch %s revision %d to %s %d", short(now.Key), old.Epoch, old.Revision, now.Epoch, now.Revision)
	}
	if now.Manifest != old.Manifest {
		w.headMoved(e, old, now)
	}
	if now.State == sched.Active && old.State == sched.Waking {
		w.woke(now)
		w.walls(now)
	}
	f := w.of(now.Generation)
	if e.Slept != nil && !now.Dirty && (old.State == sched.Sleeping || old.State == sched.Active) && !f.saved.holds(f.local) {
		w.breaks("sleep-saved", "session %s fell asleep as saved with %v, but %v was acknowledged", short(now.Key), f.saved, f.local)
	}
	if now.TellRestored() && e.RemoveHost != nil {
		f.local = f.saved // its loss is told by the next wake
	}
	if now.Dirty != (now.Newest != "") {
		w.breaks("newest-while-dirty", "session %s: dirty %v, newest %q", short(now.Key), now.Dirty, now.Newest)
	}
}

func (w *World) headMoved(e sched.Entry, old, now *sched.Session) {
	m := w.store.all[now.Manifest]
	ref := refOfEntry(e)
	f := w.of(now.Generation)
	switch {
	case m == nil:
		w.breaks("head-stored", "the head of session %s became %q, which the store does not have", short(now.Key), now.Manifest)
		return
	case m.parent != old.Manifest:
		w.breaks("manifests-chain", "the head of session %s went from %q to %s, whose parent is %q", short(now.Key), old.Manifest, m.id, m.parent)
	case ref.Epoch != old.Epoch || m.epoch != old.Epoch || m.host != w.owner[placed{old.Key, old.Epoch}]:
		w.breaks("head-by-owner", "the head of session %s at epoch %s (owner %s) was moved to %s of epoch %s by %s", short(now.Key), old.Epoch, w.owner[placed{old.Key, old.Epoch}], m.id, m.epoch, m.host)
	case !m.data.holds(f.saved):
		w.breaks("saved-stays", "manifest %s of session %s has %v and not %v, which was acknowledged as saved", m.id, short(now.Key), m.data, f.saved)
	}
	f.saved = m.data
}

// woke checks what a session wakes with, and what is said of it.
func (w *World) woke(s *sched.Session) {
	f, c := w.of(s.Generation), w.handed[placed{s.Key, s.Epoch}]
	w.activated[placed{s.Key, s.Epoch}] = true
	for _, m := range w.machines {
		for _, b := range m.boxes {
			b.active = b.active || b.key.Session == s.Key && b.epoch == s.Epoch
		}
	}
	f.awake++
	name := short(s.Key)
	if !c.holds(f.saved) {
		w.breaks("saved-stays", "session %s wakes with %v and not %v, which was acknowledged as saved", name, c, f.saved)
	}
	if s.Terms.Ephemeral && f.awake > 1 {
		w.breaks("ephemeral-never-restored", "ephemeral session %s is awake a second time", name)
	}
	switch s.Origin {
	case corev1.Origin_ORIGIN_CREATED:
		w.cov.hit("wake: created")
		if c != nil || f.local != nil || f.saved != nil || f.awake > 1 {
			w.breaks("fresh-once", "session %s wakes as created with %v, though it was awake before or has %v", name, c, f.local)
		}
	case corev1.Origin_ORIGIN_RESUMED:
		w.cov.hit("wake: resumed")
		if !c.holds(f.local) {
			w.breaks("resumed-means-all", "session %s says resumed with %v, but %v was acknowledged", name, c, f.local)
		}
	case corev1.Origin_ORIGIN_RESTORED:
		w.cov.hit("wake: restored as of")
		if !w.asOf(s, c) {
			w.breaks("restored-as-of", "session %s says restored as of %s with %v, which no manifest of that time has (head %s: %+v)", name, s.RestoredAsOf.Std(), c, s.Manifest, w.store.all[s.Manifest])
		}
		if !c.holds(f.local) {
			w.cov.hit("wake: restored, and something unsaved was lost")
		}
		f.local = c
	default:
		w.breaks("says-what", "session %s wakes as %s", name, s.Origin)
	}
}

func (w *World) asOf(s *sched.Session, c *content) bool {
	for _, m := range w.store.all {
		if m.key.Generation == s.Generation && sched.At(m.at) == s.RestoredAsOf && m.data == c {
			return true
		}
	}
	return false
}

// memory is never promised twice.
func (w *World) memory() {
	used := map[ids.Host]uint64{}
	for _, s := range w.group.oracle.Sessions() {
		for _, l := range s.Left {
			used[l.Host] += l.Limits.MemoryBytes
		}
		switch {
		case s.State == sched.Waking, s.State == sched.Active, s.State == sched.Sleeping && (s.Sleep == nil || !s.Sleep.Save),
			s.NeedsStop && (s.State == sched.Failed || s.State == sched.Deleting):
			used[s.Host] += s.Terms.Limits.MemoryBytes
		}
	}
	for _, h := range w.group.oracle.Hosts() {
		if used[h.ID] > h.Capacity.MemoryBytes {
			w.breaks("memory-promised-once", "host %s has %d of memory, %d are promised", h.ID, h.Capacity.MemoryBytes, used[h.ID])
		}
		if books := w.group.oracle.Usage(h.ID).MemoryBytes; books < used[h.ID] {
			w.breaks("books-balance", "host %s: the books say that %d is used, sessions and what they left hold %d", h.ID, books, used[h.ID])
		}
	}
}

// check looks at what runs, after every event.
func (w *World) check() {
	if w.broken != nil {
		return
	}
	w.acting = w.acting[:0]
	for _, m := range w.machines {
		if m.frozen || m.suspended || !m.up {
			continue
		}
		for _, b := range m.boxes {
			if !m.runs(b) {
				continue
			}
			if m.mayAct(b) {
				for _, a := range w.acting {
					if a.key == b.key.Session {
						w.breaks("one-may-act", "session %s may act on %s and on %s", short(a.key), a.m.id, m.id)
					}
				}
				w.acting = append(w.acting, acts{b.key.Session, m})
			}
			if b.fine == 0 || b.fine != w.applied {
				w.fenced(m, b)
			}
		}
	}
}

// acts is a session whose processes may run on a machine now.
type acts struct {
	key ids.SessionKey
	m   *machine
}

// fenced: what runs is the present epoch of its session, unless its machine has just come back.
func (w *World) fenced(m *machine, b *box) {
	s := w.group.oracle.Session(b.key.Session)
	if s == nil || s.Generation != b.key.Generation || s.Epoch == b.epoch && (s.State == sched.Active || s.State == sched.Sleeping) ||
		s.State == sched.Deleting || s.State == sched.Failed {
		b.fine = w.applied // until an entry changes the session
		return
	}
	if m.mayAct(b) && b.epoch.Compare(s.Epoch) < 0 && s.State == sched.Active {
		w.breaks("no-older-epoch", "session %s is active in epoch %s, and %s may act in epoch %s", short(s.Key), s.Epoch, m.id, b.epoch)
	}
	if w.now-m.awoke >= grace {
		w.breaks("fenced-in-time", "session %s is %s in epoch %s, and its sandbox of epoch %s runs on %s", short(s.Key), s.State, s.Epoch, b.epoch, m.id)
	}
}

// sameReplicas: the same entries gave the same state everywhere.
func (w *World) sameReplicas() {
	var want bytes.Buffer
	if _, err := w.group.oracle.WriteTo(&want); err != nil {
		w.breaks("replicas-agree", "%v", err)
		return
	}
	for _, r := range w.group.reps[w.rng.IntN(3):][:1] {
		var got bytes.Buffer
		r.catchUp(len(w.group.log), nil)
		if _, err := r.st.WriteTo(&got); err != nil || !bytes.Equal(dropIndex(want.Bytes()), dropIndex(got.Bytes())) {
			w.breaks("replicas-agree", "%s came to another state than the log (%v)", r.p.name, err)
		}
	}
}

// dropIndex leaves out the header, which counts entries that change nothing.
func dropIndex(b []byte) []byte { return b[bytes.IndexByte(b, '\n')+1:] }

// restless says what is not at rest, once nothing fails any more; empty: everything is.
func (w *World) restless() string {
	if w.users.working > 0 || !w.tidied {
		return fmt.Sprintf("%d users are still at work, operators have tidied up: %v (drains %v)", w.users.working, w.tidied, sortedKeys(w.draining))
	}
	if w.now < w.linger {
		return "retention is awaited"
	}
	st := w.group.oracle
	for _, s := range sorted(st) {
		if len(sched.Next(s)) > 0 || s.State == sched.Active {
			return fmt.Sprintf("session %s is %s in epoch %s on %s (wake %v)", short(s.Key), s.State, s.Epoch, s.Host, s.Wake != nil)
		}
	}
	if l := st.Lefts(); len(l) > 0 {
		return fmt.Sprintf("compute of epoch %s may be left on %s", l[0].Left.Epoch, l[0].Left.Host)
	}
	for _, t := range st.Tombstones() {
		if len(t.Erase) > 0 {
			return fmt.Sprintf("session %s is deleted and not erased: %+v", short(t.Key), t.Erase)
		}
	}
	if len(w.stream.ids) != int(st.OutSeq) {
		return fmt.Sprintf("%d of %d events are published", len(w.stream.ids), st.OutSeq)
	}
	if m := w.drained; m != nil {
		if h := st.Host(m.id); h == nil || !h.Drained || len(st.OnHost(m.id)) > 0 {
			return fmt.Sprintf("host %s is not empty: %d sessions", m.id, len(st.OnHost(m.id)))
		}
	}
	return w.leaks()
}

func (w *World) leaks() string {
	live := map[host.Key]*sched.Session{}
	for _, s := range w.group.oracle.Sessions() {
		live[host.Key{Session: s.Key, Generation: s.Generation}] = s
	}
	for _, m := range w.machines {
		if !m.up {
			continue
		}
		if len(m.boxes) > 0 {
			return fmt.Sprintf("%d sandboxes are left on %s", len(m.boxes), m.id)
		}
		if len(m.notes) > 0 {
			return fmt.Sprintf("%s has not cleaned the store yet", m.id)
		}
		for _, k := range sortedDisks(m.disks) {
			s := live[k]
			if s == nil {
				return fmt.Sprintf("%s has a disk of %s, which is deleted", m.id, k)
			}
			if m.disks[k].attached {
				return fmt.Sprintf("%s has the disk of %s attached", m.id, k)
			}
		}
	}
	for id, m := range w.store.all {
		if live[m.key] == nil {
			return fmt.Sprintf("the store has manifest %s of %s, which is deleted (epoch %s, by %s)", id, m.key, m.epoch, m.host)
		}
	}
	for g := range w.credentials.keys {
		if live[host.Key{Session: g.Session, Generation: g.Generation}] == nil {
			return fmt.Sprintf("the key of %v is not destroyed", g)
		}
	}
	return ""
}

// walls: a session whose disk a virtual machine wrote is never awake in a tier whose kernel is the host's.
func (w *World) walls(now *sched.Session) {
	f := w.of(now.Generation)
	machine := sched.OwnKernel(now.Terms.Tier)
	switch {
	case f.vm && !machine:
		w.breaks("machine-disk", "session %s, whose disk a machine wrote, is awake in %s", short(now.Key), now.Terms.Tier)
	case f.vm && strings.Contains(now.Terms.TierReason, errkind.VMWritten):
		w.cov.hit("tier raised to that of the machine that wrote the disk")
	}
	f.vm = f.vm || machine
}
