package core

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Bounds of the state.
const (
	// MaxOutbox is how many events may wait; above it opens are refused.
	MaxOutbox = 65536
	// MaxPending is how many requests may wait for one session.
	MaxPending = 128
	// RecordTTL is how much leader time a settled request is remembered.
	RecordTTL = 15 * time.Minute
	// TombstoneTTL is how much leader time a deleted session is remembered.
	TombstoneTTL = 2 * time.Hour
	// MaxHolders is how many hosts may have had the disk of one session.
	MaxHolders = 32
	// MaxTick bounds what one tick adds to leader time.
	MaxTick = 10 * time.Minute
)

type recordKey struct {
	session ids.SessionKey
	verb    Verb
	id      ids.RequestID
}

// slot holds the newest version of one record.
type slot struct {
	key recordKey
	r   *Record
}

// State is the whole replicated state. It is not safe for concurrent use; the
// records it hands out are never changed afterwards.
type State struct {
	Incarnation uint32
	Index       uint64 // of the last entry applied
	LeaderTime  time.Duration
	OutSeq      uint64 // of the last event emitted
	// Format is the newest format of an entry that was applied; 0: none was.
	Format int

	sessions map[ids.SessionKey]*Session
	aliases  map[ids.SessionKey]ids.SessionKey // other keys of sessions
	tombs    map[ids.SessionKey]*Tombstone
	hosts    map[ids.Host]*hostRec
	order    []*hostRec // hosts that joined, in order of their id
	gone     map[ids.Host]*GoneHost
	records  map[recordKey]*slot
	recordQ  []*slot // in order of their leader time
	outbox   []*Event

	expireHour  time.Duration // start of the hour that expireCount counts
	expireCount int

	groups     map[group]*groupUse // derived
	in         *interner
	violations []string // of the declared transitions; always empty
}

// NewState is the state of a new cell.
func NewState() *State {
	return &State{
		Incarnation: 1,
		sessions:    map[ids.SessionKey]*Session{},
		aliases:     map[ids.SessionKey]ids.SessionKey{},
		tombs:       map[ids.SessionKey]*Tombstone{},
		hosts:       map[ids.Host]*hostRec{},
		gone:        map[ids.Host]*GoneHost{},
		records:     map[recordKey]*slot{},
		groups:      map[group]*groupUse{},
		in:          newInterner(),
	}
}

// Clone is a copy that later entries do not change.
func (s *State) Clone() *State {
	c := *s
	c.sessions = maps.Clone(s.sessions)
	c.aliases = maps.Clone(s.aliases)
	c.tombs = maps.Clone(s.tombs)
	c.gone = maps.Clone(s.gone)
	c.cloneHosts(s)
	c.records, c.recordQ = make(map[recordKey]*slot, len(s.records)), make([]*slot, 0, len(s.recordQ))
	for _, sl := range s.recordQ {
		n := *sl
		c.records[n.key] = &n
		c.recordQ = append(c.recordQ, &n)
	}
	c.outbox = slices.Clone(s.outbox)
	c.in = newInterner()
	c.violations = slices.Clone(s.violations)
	return &c
}

func (s *State) cloneHosts(from *State) {
	s.hosts, s.order, s.groups = map[ids.Host]*hostRec{}, make([]*hostRec, 0, len(from.order)), map[group]*groupUse{}
	for id, r := range from.hosts {
		n := *r
		s.hosts[id] = &n
	}
	for _, r := range from.order {
		s.order = append(s.order, s.hosts[r.id])
	}
	for k, g := range from.groups {
		n := &groupUse{awake: g.awake, on: make(map[*hostRec]int, len(g.on))}
		for r, c := range g.on {
			n.on[s.hosts[r.id]] = c
		}
		s.groups[k] = n
	}
}

// Session returns the session that any of the keys names, nil if none does.
func (s *State) Session(keys ...ids.SessionKey) *Session {
	for _, k := range keys {
		if v := s.sessions[k]; v != nil {
			return v
		}
		if c, ok := s.aliases[k]; ok {
			return s.sessions[c]
		}
	}
	return nil
}

// Tombstone returns the newest memory of a deleted session under any of the keys.
func (s *State) Tombstone(keys ...ids.SessionKey) *Tombstone {
	var newest *Tombstone
	for _, k := range keys {
		if t := s.tombs[k]; t != nil && (newest == nil || t.Index > newest.Index) {
			newest = t
		}
	}
	return newest
}

// Record returns the stored outcome of a request.
func (s *State) Record(key ids.SessionKey, verb Verb, id ids.RequestID) *Record {
	if sl := s.records[recordKey{key, verb, id}]; sl != nil {
		return sl.r
	}
	return nil
}

// Host returns a host, nil if it never joined.
func (s *State) Host(id ids.Host) *Host {
	if r := s.hosts[id]; r != nil {
		return r.h
	}
	return nil
}

// Usage returns what sessions hold of a host.
func (s *State) Usage(id ids.Host) Usage {
	if r := s.hosts[id]; r != nil {
		return r.u
	}
	return Usage{}
}

// Hosts returns all hosts in order of their id.
func (s *State) Hosts() []*Host {
	out := make([]*Host, len(s.order))
	for i, r := range s.order {
		out[i] = r.h
	}
	return out
}

// Sessions returns all sessions, in no order.
func (s *State) Sessions() []*Session { return slices.Collect(maps.Values(s.sessions)) }

// Tombstones returns all remembered deleted sessions, in no order.
func (s *State) Tombstones() []*Tombstone {
	out := make([]*Tombstone, 0, len(s.tombs))
	for k, t := range s.tombs {
		if k == t.Key {
			out = append(out, t)
		}
	}
	return out
}

// OutboxLen is how many events wait.
func (s *State) OutboxLen() int { return len(s.outbox) }

// EventsAfter returns up to n events whose sequence number is above seq.
func (s *State) EventsAfter(seq uint64, n int) []*Event {
	if len(s.outbox) == 0 {
		return nil
	}
	skip := 0
	if first := s.outbox[0].Seq; seq >= first {
		skip = int(seq - first + 1)
	}
	if skip >= len(s.outbox) {
		return nil
	}
	return slices.Clone(s.outbox[skip:min(len(s.outbox), skip+n)])
}

// Violations lists transitions that were not declared; a defect if not empty.
func (s *State) Violations() []string { return slices.Clone(s.violations) }

// Apply applies the entry at a raft index. Indexes grow.
func (s *State) Apply(index uint64, e Entry) Outcome {
	s.Index = index
	x := &tx{s: s, index: index, now: e.Now, v: cmp.Or(e.V, EntryVersion)}
	s.Format = max(s.Format, x.v)
	out := x.apply(e)
	x.tellDrained()
	out.Events = x.n
	out.Touched = x.touched
	return out
}

func (x *tx) apply(e Entry) Outcome {
	switch {
	case e.Open != nil:
		return x.open(e.Open)
	case e.Place != nil:
		return x.replace(e.Place)
	case e.Woke != nil:
		return x.woke(e.Woke)
	case e.WakeFailed != nil:
		return x.wakeFailed(e.WakeFailed)
	case e.Sleep != nil:
		return x.sleep(e.Sleep)
	case e.Slept != nil:
		return x.slept(e.Slept)
	case e.SleepRefused != nil:
		return x.sleepRefused(e.SleepRefused)
	case e.Delete != nil:
		return x.delete(e.Delete)
	case e.Removed != nil:
		return x.removed(e.Removed)
	case e.Stopped != nil:
		return x.stopped(e.Stopped)
	case e.Exited != nil:
		return x.exited(e.Exited)
	case e.Delayed != nil:
		return x.delayed(e.Delayed)
	case e.Manifest != nil:
		return x.manifest(e.Manifest)
	case e.Restore != nil:
		return x.restore(e.Restore)
	case e.Join != nil:
		return x.join(e.Join)
	case e.HostLost != nil:
		return x.hostLost(e.HostLost)
	case e.Drain != nil:
		return x.drain(e.Drain)
	case e.Move != nil:
		return x.moveOff(e.Move)
	case e.Save != nil:
		return x.save(e.Save)
	case e.Dropped != nil:
		return x.dropped(e.Dropped)
	case e.Cleared != nil:
		return x.cleared(e.Cleared)
	case e.RemoveHost != nil:
		return x.removeHost(e.RemoveHost)
	case e.Trim != nil:
		return x.trim(e.Trim)
	case e.Tick != nil:
		return x.tick(e.Tick)
	case e.Incarnate != nil:
		return x.incarnate(e.Incarnate)
	case e.Raise != nil:
		return Outcome{}
	}
	return refuse(errkind.Invalid, "the log entry at %d says nothing that this version knows", x.index)
}

// tx is the application of one entry.
type tx struct {
	s     *State
	index uint64
	now   Time
	n     int         // events emitted
	t     *Transition // under way
	v     int         // format of the entry
	avoid ids.Host    // said that it has no room
	// nothing: the host that it is taken from has no compute of it, for certain.
	nothing bool

	touched  []ids.SessionKey
	draining []*hostRec // of which something changed
}

func (x *tx) generation() ids.Generation {
	return ids.Generation{Incarnation: x.s.Incarnation, Index: x.index}
}
func (x *tx) epoch() ids.Epoch { return ids.Epoch{Incarnation: x.s.Incarnation, Index: x.index} }

// edit returns a copy of the session that may be changed until it is put.
func (x *tx) edit(s *Session) *Session {
	c := *s
	return &c
}

// put stores a changed session and keeps what is derived.
func (x *tx) put(n *Session) {
	if n.Wake == nil {
		n.From = ""
	}
	x.account(x.s.sessions[n.Key], -1)
	x.account(n, +1)
	x.s.sessions[n.Key] = n
	for _, k := range n.Aliases {
		x.s.aliases[k] = n.Key
	}
	x.touched = append(x.touched, n.Key)
}

// move takes a declared transition.
func (x *tx) move(s *Session, t *Transition) {
	if !slices.Contains(t.From, s.State) {
		x.s.violations = append(x.s.violations, fmt.Sprintf("%s at %d: %s from %v", s.Key, x.index, t.Name, s.State))
	}
	x.t = t
	if next := t.Next(s.State); next != s.State {
		s.State = next
		s.ChangedAt = x.now
	}
}

// emit appends an event of the transition under way to the outbox.
func (x *tx) emit(s *Session, kind EventKind, fill func(*Event)) {
	if x.t == nil || !slices.Contains(x.t.Emits, kind) {
		x.s.violations = append(x.s.violations, fmt.Sprintf("%s at %d: %s is not declared", s.Key, x.index, kind))
	}
	s.Revision++
	e := &Event{Kind: kind, Tenant: s.Tenant, Session: s.Key, Generation: s.Generation, Epoch: s.Epoch,
		Revision: s.Revision, State: s.State, Host: s.Host}
	if fill != nil {
		fill(e)
	}
	x.push(e)
}

func (x *tx) push(e *Event) {
	x.s.OutSeq++
	e.Seq = x.s.OutSeq
	e.ID = fmt.Sprintf("own-%d-%d-%d", x.s.Incarnation, x.index, x.n)
	e.At = x.now
	x.n++
	x.s.outbox = append(x.s.outbox, e)
}

// exact returns the session if generation and epoch match.
func (x *tx) exact(r Ref) (*Session, *Outcome) {
	s := x.s.Session(r.Session)
	if s == nil {
		out := refuse(errkind.StaleEpoch, "session %s is not known or was deleted", r.Session)
		return nil, &out
	}
	if s.Generation != r.Generation || s.Epoch != r.Epoch {
		out := refuse(errkind.StaleEpoch, "session %s is at generation %s epoch %s, not %s and %s",
			r.Session, s.Generation, s.Epoch, r.Generation, r.Epoch)
		out.Session = s
		return nil, &out
	}
	return s, nil
}

func (x *tx) trim(t *Trim) Outcome {
	n := 0
	for n < len(x.s.outbox) && x.s.outbox[n].Seq <= t.Upto {
		x.s.outbox[n] = nil
		n++
	}
	if x.s.outbox = x.s.outbox[n:]; len(x.s.outbox) == 0 {
		x.s.outbox = nil
	}
	return Outcome{}
}

func (x *tx) incarnate(i *Incarnate) Outcome {
	x.s.Incarnation = max(x.s.Incarnation, i.Above) + 1
	return Outcome{}
}

func compare[T ~string](a, b T) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
