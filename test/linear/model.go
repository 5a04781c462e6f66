// Package linear checks that ownership of sessions is linearizable: a history
// of what clients and hosts asked and were told must fit one order of moments,
// one for each answer and within it, in which a session's generation, epoch,
// host, revision and state only go forward, and its head changes by commits of
// its owner alone.
//
// What happens without being asked (a handoff, a retry of a wake, the end of
// an open that timed out) is not in the history, so a session may go forward
// by itself between two answers. It may never go back: not to an earlier
// generation or epoch, not from asleep to active in one epoch, not to another
// host in one epoch, not to an earlier head. A commit whose answer is unknown
// may have happened at any moment after its call, or never.
package linear

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/anishathalye/porcupine"
)

// Kind of an operation.
type Kind string

// The kinds.
const (
	Open   Kind = "open"
	Sleep  Kind = "sleep"
	Delete Kind = "delete"
	Show   Kind = "show"
	Commit Kind = "commit"
)

// Phase of a session within its epoch.
type Phase string

// The phases. Rest is asleep, paused, failed or new.
const (
	Waking   Phase = "waking"
	Active   Phase = "active"
	Sleeping Phase = "sleeping"
	Rest     Phase = "rest"
	Deleting Phase = "deleting"
	Deleted  Phase = "deleted"
)

// Stamp is a generation or an epoch.
type Stamp struct {
	Incarnation uint32
	Index       uint64
}

func (s Stamp) compare(o Stamp) int {
	return cmp.Or(cmp.Compare(s.Incarnation, o.Incarnation), cmp.Compare(s.Index, o.Index))
}

func (s Stamp) String() string { return fmt.Sprintf("%d.%d", s.Incarnation, s.Index) }

// Input is what was asked. The rest is set for a commit.
type Input struct {
	Kind    Kind
	Session string

	Generation, Epoch Stamp
	Host, Parent, ID  string
}

// Output is what was answered.
type Output struct {
	// Unknown: it may have happened between call and return, or not at all.
	Unknown bool
	// None: there never was such a session.
	None              bool
	Generation, Epoch Stamp
	Phase             Phase
	Host, Head        string
	Revision          uint64 // of a show
}

// state of one session.
type state struct {
	generation, epoch Stamp
	host              string // of the epoch; empty: nobody was told yet
	level             int    // how far the epoch, then the generation, has come
	head              string
	// What the last show said.
	revision  uint64
	seenEpoch Stamp
}

// Levels within an epoch, and after the last one of a generation.
const (
	levelWaking = iota
	levelActive
	levelRest
	levelDeleting
	levelDeleted
)

// Forever is the time of an answer that did not come.
const Forever = time.Duration(math.MaxInt64)

// Model is the sequential specification, one session a partition.
func Model() porcupine.Model {
	m := porcupine.NondeterministicModel{
		Partition: partition,
		Init:      func() []any { return []any{state{}} },
		Step: func(s, in, out any) (all []any) {
			was := s.(state)
			if next, ok := step(was, in.(Input), out.(Output)); ok {
				all = append(all, next)
			}
			if out.(Output).Unknown { // it did not happen, or what follows of it happens by itself
				all = append(all, was)
			}
			return all
		},
		DescribeOperation: func(in, out any) string { return describe(in.(Input), out.(Output)) },
		DescribeState: func(s any) string {
			v := s.(state)
			return fmt.Sprintf("g%s e%s@%s level %d head %s r%d", v.generation, v.epoch, v.host, v.level, v.head, v.revision)
		},
	}
	return m.ToModel()
}

func partition(all []porcupine.Operation) (out [][]porcupine.Operation) {
	at := map[string]int{}
	for _, o := range all {
		k := o.Input.(Input).Session
		if _, ok := at[k]; !ok {
			at[k] = len(out)
			out = append(out, nil)
		}
		out[at[k]] = append(out[at[k]], o)
	}
	return out
}

func step(s state, in Input, out Output) (state, bool) {
	switch {
	case in.Kind == Commit:
		return commit(s, in)
	case out.Unknown:
		return s, false
	case out.None:
		return s, s == state{}
	}
	next, ok := forward(s, out)
	if !ok || in.Kind != Show {
		return next, ok
	}
	if next.level < levelDeleting && out.Head != next.head {
		return s, false // commits are all known
	}
	return shown(s, next, out)
}

// shown holds revisions to the states that they number.
func shown(s, next state, out Output) (state, bool) {
	if s.generation == next.generation {
		if out.Revision < s.revision || out.Revision == s.revision && s.revision > 0 && next.epoch != s.seenEpoch {
			return s, false
		}
	}
	next.revision, next.seenEpoch = out.Revision, next.epoch
	return next, true
}

// forward moves a session to what was answered, if that is not behind it.
func forward(s state, out Output) (state, bool) {
	level := map[Phase]int{Waking: levelWaking, Active: levelActive, Sleeping: levelActive, Rest: levelRest,
		Deleting: levelDeleting, Deleted: levelDeleted}[out.Phase]
	switch g := out.Generation.compare(s.generation); {
	case g < 0:
		return s, false
	case g > 0:
		s = state{generation: out.Generation, epoch: out.Epoch, host: out.Host, level: level}
		return s, true
	}
	if level >= levelDeleting || s.level >= levelDeleting {
		ok := level >= s.level
		s.level = level
		return s, ok
	}
	switch e := out.Epoch.compare(s.epoch); {
	case e < 0:
		return s, false
	case e > 0:
		s.epoch, s.host, s.level = out.Epoch, out.Host, level
		return s, true
	}
	if out.Host != "" && s.host != "" && out.Host != s.host {
		return s, false // two owners of one epoch
	}
	s.host = cmp.Or(s.host, out.Host)
	if out.Phase == Sleeping {
		level = max(level, s.level) // a disk may be saved at rest
	}
	ok := level >= s.level
	s.level = level
	return s, ok
}

// commit is a compare-and-swap on the head, by the owner of the epoch.
func commit(s state, in Input) (state, bool) {
	next, ok := forward(s, Output{Generation: in.Generation, Epoch: in.Epoch, Host: in.Host, Phase: Active})
	ok = ok && next.head == in.Parent
	next.head = in.ID
	return next, ok
}

func describe(in Input, out Output) string {
	what := string(in.Kind)
	if in.Kind == Commit {
		what = fmt.Sprintf("commit %s>%s g%s e%s@%s", in.Parent, in.ID, in.Generation, in.Epoch, in.Host)
	}
	switch {
	case out.Unknown:
		return what + " ?"
	case out.None:
		return what + ": none"
	case in.Kind == Commit:
		return what
	}
	return fmt.Sprintf("%s: g%s e%s@%s %s head %s r%d", what, out.Generation, out.Epoch, out.Host, out.Phase, out.Head, out.Revision)
}
