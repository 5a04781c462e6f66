package core

import (
	"bytes"
	"slices"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// known answers a request that was seen before: its stored outcome for the
// same body, a refusal for another one; nil when it is new.
func (x *tx) known(key ids.SessionKey, verb Verb, id ids.RequestID, hash []byte) *Outcome {
	if id == "" {
		return nil
	}
	r := x.s.Record(key, verb, id)
	if r == nil {
		return nil
	}
	if !bytes.Equal(r.Hash, hash) {
		out := refuse(errkind.ReplayMismatch, "request %s was used before for this session with another body", id)
		return &out
	}
	return &Outcome{Record: r, Session: x.s.Session(key)}
}

// remember stores a request, settled or not.
func (x *tx) remember(r Record) *Record {
	if r.ID == "" {
		return nil
	}
	r.LeaderTime = x.s.LeaderTime
	x.s.keep(&r)
	return &r
}

// wait adds a request to those that wait for the session.
func (x *tx) wait(s *Session, verb Verb, id ids.RequestID, hash []byte) (*Record, *Outcome) {
	if id == "" {
		return nil, nil
	}
	if len(s.Pending) >= MaxPending && verb != VerbDelete {
		out := refuse(errkind.Exhausted, "%d requests already wait for this session", len(s.Pending))
		return nil, &out
	}
	s.Pending = append(slices.Clone(s.Pending), Pending{verb, id})
	return x.remember(Record{Session: s.Key, Verb: verb, ID: id, Hash: hash, Generation: s.Generation}), nil
}

// waits reports whether a request of a verb waits for the session.
func (s *Session) waits(v Verb) bool {
	return slices.ContainsFunc(s.Pending, func(p Pending) bool { return p.Verb == v })
}

// settle gives every waiting request of a verb its outcome; an empty verb means all.
func (x *tx) settle(s *Session, verb Verb, fill func(*Record)) {
	var rest []Pending
	for _, p := range s.Pending {
		if verb != "" && p.Verb != verb {
			rest = append(rest, p)
			continue
		}
		old := x.s.Record(s.Key, p.Verb, p.ID)
		if old == nil {
			continue
		}
		r := *old
		r.Done = true
		r.Generation, r.Epoch, r.Host, r.State = s.Generation, s.Epoch, s.Host, s.State
		fill(&r)
		x.s.records[recordKey{s.Key, p.Verb, p.ID}].r = &r
	}
	s.Pending = rest
}

func failWith(kind errkind.Kind, reason string) func(*Record) {
	return func(r *Record) { r.Failure = &Failure{Kind: kind, Reason: reason} }
}

func asIs(*Record) {}

// tick advances leader time and forgets what is old enough.
func (x *tx) tick(t *Tick) Outcome {
	x.s.LeaderTime += min(max(t.Elapsed, 0), MaxTick)
	x.forgetRecords()
	x.forgetTombstones()
	return Outcome{}
}

func (x *tx) forgetRecords() {
	q := x.s.recordQ
	n := 0
	var again []*slot
	for ; n < len(q) && x.s.LeaderTime-q[n].r.LeaderTime > RecordTTL; n++ {
		if q[n].r.Done {
			delete(x.s.records, q[n].key)
			continue
		}
		kept := *q[n].r
		kept.LeaderTime = x.s.LeaderTime
		q[n].r = &kept
		again = append(again, q[n])
	}
	clear(q[:n]) // the array behind the queue stays for a while
	if x.s.recordQ = append(q[n:], again...); len(x.s.recordQ) == 0 {
		x.s.recordQ = nil
	}
}

// keep adds a record as the newest.
func (s *State) keep(r *Record) {
	sl := &slot{recordKey{r.Session, r.Verb, r.ID}, r}
	s.records[sl.key] = sl
	s.recordQ = append(s.recordQ, sl)
}

func (x *tx) forgetTombstones() {
	var old []*Tombstone
	for _, t := range x.s.tombs {
		if len(t.Erase) == 0 && x.s.LeaderTime-t.LeaderTime > TombstoneTTL {
			old = append(old, t)
		}
	}
	for _, t := range old {
		for _, k := range append([]ids.SessionKey{t.Key}, t.Aliases...) {
			if x.s.tombs[k] == t {
				delete(x.s.tombs, k)
			}
		}
	}
}
