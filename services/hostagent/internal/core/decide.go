package core

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Refusal says why an event changes nothing.
type Refusal struct {
	Kind   errkind.Kind
	Reason string
	// Since is the last activity, for a refusal as busy.
	Since time.Time
}

func (r *Refusal) Error() string { return r.Reason }

// RefusalOf returns the refusal in err, or nil.
func RefusalOf(err error) *Refusal {
	var r *Refusal
	errors.As(err, &r)
	return r
}

func refuse(kind errkind.Kind, format string, args ...any) error {
	return &Refusal{Kind: kind, Reason: fmt.Sprintf(format, args...)}
}

// Decide returns the state after ev and what to do about it. On an error (always a *Refusal) the
// state is unchanged and there is nothing to do.
func Decide(s State, ev Event) (State, []Command, error) {
	if s.Phase == "" {
		s.Phase = Absent
	}
	switch ev := ev.(type) {
	case Wake:
		return wake(s, ev)
	case Sleep:
		return sleep(s, ev)
	case Delete:
		return remove(s, ev)
	case Admit:
		return admit(s, ev)
	case Release:
		return release(s, ev), nil, nil
	case Lost:
		return lost(s, ev)
	case Adopt:
		return adopt(s, ev)
	case Disown:
		return disown(s, ev)
	case Stop:
		return stop(s)
	case Recall:
		return recall(s)
	case Ended:
		return ended(s, ev)
	}
	return s, nil, refuse(errkind.Internal, "unknown event %T", ev)
}

// order compares an incarnation with the one that is here.
func order(s State, g ids.Generation, e ids.Epoch) int {
	return cmp.Or(g.Compare(s.Generation), e.Compare(s.Epoch))
}

func stale(s State, what string, g ids.Generation, e ids.Epoch) error {
	return refuse(errkind.StaleEpoch, "%s names generation %s and epoch %s, this host is at %s and %s",
		what, g, e, s.Generation, s.Epoch)
}

func wake(s State, ev Wake) (State, []Command, error) {
	if ev.Generation.IsZero() || ev.Epoch.IsZero() {
		return s, nil, refuse(errkind.Invalid, "a wake must name its generation and epoch")
	}
	switch o := order(s, ev.Generation, ev.Epoch); {
	case o < 0:
		return s, nil, stale(s, "the wake", ev.Generation, ev.Epoch)
	case o == 0:
		return wakeSame(s)
	}
	switch s.Phase {
	case Absent:
		if s.Running {
			return s, []Command{Retry{}}, nil
		}
		if ev.Generation == s.Generation && s.Epoch.IsZero() && s.Spent {
			return s, nil, refuse(errkind.Superseded, "generation %s was deleted before this host heard of it", ev.Generation)
		}
		next := State{Phase: Waking, Generation: ev.Generation, Epoch: ev.Epoch, Running: true}
		return next, []Command{Start{OpWake}}, nil
	case Waking:
		if s.Running {
			return s, []Command{Cancel{}, Retry{}}, nil
		}
	case Awake:
		return drop(s, "a newer epoch was placed", Retry{})
	case Sleeping:
		if s.Running { // the newer epoch means that nobody waits for this sleep; its disk stays whole
			return s, []Command{Cancel{}, Retry{}}, nil
		}
	}
	if s.Running {
		return s, []Command{Retry{}}, nil
	}
	if s.Phase == Deleting {
		// The removal failed half-way: finish it before another generation begins.
		s.Running = true
		return s, []Command{Start{OpDelete}, Retry{}}, nil
	}
	// A wake, sleep or drop stopped half-way: remove what is left, the disk stays.
	return drop(s, "a newer epoch was placed", Retry{})
}

func wakeSame(s State) (State, []Command, error) {
	switch {
	case s.Phase == Awake:
		return s, []Command{Settled{}}, nil
	case s.Phase == Sleeping && s.Running && !s.Stopping:
		s.Recalled = true
		return s, []Command{Retry{}}, nil
	case s.Spent:
		return s, nil, refuse(errkind.StaleEpoch, "epoch %s was awake here and is over", s.Epoch)
	case s.Phase == Waking && s.Running:
		return s, []Command{Join{}}, nil
	case s.Phase == Waking, s.Phase == Absent && !s.Running:
		s.Phase, s.Running = Waking, true
		return s, []Command{Start{OpWake}}, nil
	case s.Phase == Deleting:
		return s, nil, refuse(errkind.Superseded, "the session is being deleted")
	}
	return s, []Command{Retry{}}, nil
}

// drop removes the compute and leaves the disk as it is.
func drop(s State, why string, then ...Command) (State, []Command, error) {
	var cmds []Command
	if s.Phase == Awake {
		cmds = append(cmds, Unserve{why})
	}
	s.Spent = s.Spent || s.Phase == Awake
	s.Phase, s.Running, s.Work = Dropping, true, 0
	return s, append(append(cmds, Start{OpDrop}), then...), nil
}

func sleep(s State, ev Sleep) (State, []Command, error) {
	switch o := order(s, ev.Generation, ev.Epoch); {
	case o > 0 && ev.AtRest && s.Phase == Absent && !s.Running:
		// Placed elsewhere meanwhile, or forgotten here: what this host has is the newest all the same.
		next := State{Phase: Sleeping, Generation: ev.Generation, Epoch: ev.Epoch, Running: true, Spent: true, Stopping: true, LastActivity: s.LastActivity}
		return next, []Command{Start{OpSleep}}, nil
	case o >= 0 && ev.Missing && s.Phase == Absent && !s.Running && !(o == 0 && s.Slept):
		return s, nil, refuse(errkind.NotFound, "this host has no disk of the session")
	case o != 0:
		return s, nil, stale(s, "the sleep", ev.Generation, ev.Epoch)
	}
	switch s.Phase {
	case Awake:
		if err := busy(s, ev); err != nil {
			return s, nil, err
		}
		s.Phase, s.Running, s.Spent, s.Work = Sleeping, true, true, 0
		return s, []Command{Unserve{cmp.Or(ev.Why, "the session goes to sleep")}, Start{OpSleep}}, nil
	case Sleeping:
		if s.Running {
			return s, []Command{Join{}}, nil
		}
		s.Running, s.Stopping = true, true
		return s, []Command{Start{OpSleep}}, nil
	case Waking:
		switch {
		case !ev.Force:
			return s, nil, &Refusal{Kind: errkind.Busy, Reason: "the session is waking", Since: s.LastActivity}
		case s.Running: // nobody waits for this wake any more: it was placed again elsewhere
			return s, []Command{Cancel{}, Retry{}}, nil
		}
		return drop(s, "its wake was given up", Retry{})
	case Deleting:
		return s, nil, refuse(errkind.Superseded, "the session is being deleted")
	}
	switch {
	case s.Phase == Absent && (s.Slept || !s.Spent && !ev.AtRest):
		return s, []Command{Settled{}}, nil // asleep already, or it never was awake
	case s.Running:
		return s, []Command{Retry{}}, nil
	}
	// The compute was lost; its disk is here and its state can still be committed.
	s.Phase, s.Running, s.Spent, s.Stopping = Sleeping, true, true, true
	return s, []Command{Start{OpSleep}}, nil
}

// stop is the point of no return of a sleep.
func stop(s State) (State, []Command, error) {
	if s.Phase != Sleeping || !s.Running {
		return s, nil, refuse(errkind.Internal, "no sleep is running")
	}
	if s.Recalled {
		return s, nil, refuse(errkind.Busy, "the session was opened before it slept")
	}
	s.Stopping = true
	return s, nil, nil
}

// recall is legal up to the point of no return.
func recall(s State) (State, []Command, error) {
	if s.Phase != Sleeping || !s.Running || s.Stopping {
		return s, nil, refuse(errkind.Internal, "no sleep is running that could be taken back")
	}
	s.Recalled = true
	return s, nil, nil
}

func busy(s State, ev Sleep) error {
	if ev.Force {
		return nil
	}
	if s.Work > 0 {
		return &Refusal{Kind: errkind.Busy, Reason: "work is running in the session", Since: s.LastActivity}
	}
	if !ev.IdleSince.IsZero() && s.LastActivity.After(ev.IdleSince) {
		return &Refusal{Kind: errkind.Busy, Reason: "the session was used since then", Since: s.LastActivity}
	}
	return nil
}

func remove(s State, ev Delete) (State, []Command, error) {
	if ev.Generation.IsZero() {
		return s, nil, refuse(errkind.Invalid, "a delete must name its generation")
	}
	if c := ev.Generation.Compare(s.Generation); c < 0 {
		return s, nil, refuse(errkind.StaleEpoch, "generation %s is older than %s, which is on this host",
			ev.Generation, s.Generation)
	} else if c > 0 {
		// Never heard of: note it, so that a late wake of this generation is refused.
		if s.Phase != Absent || s.Running {
			return supersede(s)
		}
		s = State{Phase: Absent, Generation: ev.Generation}
	}
	if s.Phase == Deleting && s.Running {
		return s, []Command{Join{}}, nil
	}
	if s.Running {
		return s, giveWay(s), nil
	}
	var cmds []Command
	if s.Phase == Awake {
		cmds = append(cmds, Unserve{"the session is deleted"})
	}
	s.Phase, s.Running, s.Spent, s.Slept, s.Work = Deleting, true, true, false, 0
	return s, append(cmds, Start{OpDelete}), nil
}

// giveWay ends the operation that is running for a delete. It cancels a wake or a sleep, and waits for a
// drop or a delete: if two callers cancelled each other's drop, no drop would ever end.
func giveWay(s State) []Command {
	if s.Phase == Waking || s.Phase == Sleeping {
		return []Command{Cancel{}, Retry{}}
	}
	return []Command{Retry{}}
}

// supersede removes an older generation's compute for a command of a newer generation.
func supersede(s State) (State, []Command, error) {
	if s.Running {
		return s, giveWay(s), nil
	}
	if s.Phase == Deleting { // the removal failed half-way: finish it before another generation begins
		s.Running = true
		return s, []Command{Start{OpDelete}, Retry{}}, nil
	}
	return drop(s, "a newer generation exists", Retry{})
}

func admit(s State, ev Admit) (State, []Command, error) {
	if order(s, ev.Generation, ev.Epoch) != 0 {
		return s, nil, stale(s, "the opening", ev.Generation, ev.Epoch)
	}
	switch {
	case s.Phase == Awake:
		s.Work++
		s.LastActivity = later(s.LastActivity, ev.At)
		return s, nil, nil
	case s.Phase == Waking:
		return s, nil, refuse(errkind.Unavailable, "the session is not awake yet")
	}
	return s, nil, refuse(errkind.StaleEpoch, "the session is not awake in epoch %s any more; open it again", s.Epoch)
}

func release(s State, ev Release) State {
	if s.Phase == Awake && s.Work > 0 {
		s.Work--
		s.LastActivity = later(s.LastActivity, ev.At)
	}
	return s
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func lost(s State, ev Lost) (State, []Command, error) {
	if s.Phase != Awake || s.Epoch != ev.Epoch {
		return s, nil, nil // an operation is at it, or this is old news
	}
	what := "exited"
	if ev.OOM {
		what = "oom"
	}
	next, cmds, err := drop(s, cmp.Or(ev.Why, "the sandbox ended: "+ev.Reason))
	return next, append(cmds, Report{What: what, Reason: ev.Reason}), err
}

func adopt(s State, ev Adopt) (State, []Command, error) {
	if s.Running || s.Phase != Awake && s.Phase != Waking && s.Phase != Absent || order(s, ev.Generation, ev.Epoch) != 0 && s.Phase != Absent {
		return s, nil, stale(s, "the adoption", ev.Generation, ev.Epoch)
	}
	s = State{Phase: Awake, Generation: ev.Generation, Epoch: ev.Epoch, LastActivity: later(s.LastActivity, ev.At)}
	return s, []Command{Serve{}}, nil
}

func disown(s State, ev Disown) (State, []Command, error) {
	if s.Running || s.Phase == Absent {
		return s, nil, nil
	}
	if s.Phase == Deleting {
		s.Running = true
		return s, []Command{Start{OpDelete}}, nil
	}
	return drop(s, cmp.Or(ev.Why, "this host does not own the session any more"))
}

func ended(s State, ev Ended) (State, []Command, error) {
	recalled := s.Recalled
	s.Running, s.Stopping, s.Recalled = false, false, false
	if recalled {
		s.Phase, s.Spent, s.LastActivity = Awake, false, later(s.LastActivity, ev.At)
		return s, []Command{Serve{}}, nil
	}
	if ev.Failed {
		return endedBadly(s, ev)
	}
	switch ev.Op {
	case OpWake:
		s.Phase, s.LastActivity = Awake, ev.At
		return s, []Command{Serve{}}, nil
	case OpSleep:
		s.Phase, s.Slept = Absent, true
	case OpDrop, OpDelete:
		s.Phase = Absent
	}
	return s, nil, nil
}

// endedBadly: a wake that failed has undone itself; the others stay where they are and are tried
// again by the next command, by the sweep, or by the next start.
func endedBadly(s State, ev Ended) (State, []Command, error) {
	if ev.Op == OpWake {
		s.Phase = Absent
	}
	return s, nil, nil
}
