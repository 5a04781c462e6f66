package chaos

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// version is one content that was written to a path.
type version struct {
	sum string
	// at is when the write was acknowledged; zero: whether it took place is not known.
	at time.Time
	// safe: a checkpoint or a close was acknowledged that began after at, so that no restore may lose it.
	safe bool
}

// restore is one return of a session to a snapshot: what was acknowledged before asOf is there; what
// was acknowledged between asOf and active may be lost.
type restore struct{ asOf, active time.Time }

func (r restore) mayLose(v version) bool {
	return !v.safe && !v.at.Before(r.asOf) && v.at.Before(r.active)
}

// ledger is what a worker knows of its session's files. Versions of a path are oldest first, and only
// the last one may be of unknown outcome: a path whose last write is not known is not written again.
type ledger struct{ files map[string][]version }

func newLedger() *ledger { return &ledger{map[string][]version{}} }

// begin notes a write that is under way.
func (l *ledger) begin(path, sum string) {
	l.files[path] = append(l.files[path], version{sum: sum})
}

// done notes that the last write of a path was acknowledged.
func (l *ledger) done(path string, at time.Time) {
	all := l.files[path]
	all[len(all)-1].at = at
}

// saved notes that a checkpoint or a close which began at this time was acknowledged.
func (l *ledger) saved(began time.Time) {
	for _, all := range l.files {
		for i := range all {
			all[i].safe = all[i].safe || !all[i].at.IsZero() && !all[i].at.After(began)
		}
	}
}

// known are the paths whose last write is known to have taken place, in order.
func (l *ledger) known() (out []string) {
	for _, path := range slices.Sorted(maps.Keys(l.files)) {
		if all := l.files[path]; !all[len(all)-1].at.IsZero() {
			out = append(out, path)
		}
	}
	return out
}

// safe counts the files that no fault may take away.
func (l *ledger) safe() (n int) {
	for _, all := range l.files {
		if slices.ContainsFunc(all, func(v version) bool { return v.safe }) {
			n++
		}
	}
	return n
}

// check compares what is in the session, path to hash, with what must be there, given every restore of
// the session, and takes what it found as what is there at this time.
func (l *ledger) check(found map[string]string, restores []restore, now time.Time) (wrong []string) {
	for _, path := range slices.Sorted(maps.Keys(l.files)) {
		all := l.files[path]
		sum, there := found[path]
		at := -1
		for i, v := range all {
			if there && v.sum == sum {
				at = i
			}
		}
		floor := floorOf(all, restores)
		switch {
		case there && at < 0:
			wrong = append(wrong, fmt.Sprintf("%s has a content that was never written to it (%.12s)", path, sum))
		case at < floor:
			wrong = append(wrong, fmt.Sprintf("%s is lost: version %d of %d (%.12s, acknowledged %s, safe %v) must be there, found is version %d (there: %v)",
				path, floor+1, len(all), all[floor].sum, all[floor].at.Format(clock), all[floor].safe, at+1, there))
		default:
			l.settle(path, at, now)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(found)) {
		if _, ok := l.files[path]; !ok {
			wrong = append(wrong, fmt.Sprintf("%s is there, and was not written in this life of the session", path))
		}
	}
	return wrong
}

// floorOf is the newest version that must have stayed; -1: none.
func floorOf(all []version, restores []restore) int {
	for i, v := range slices.Backward(all) {
		lost := func(r restore) bool { return r.mayLose(v) }
		if !v.at.IsZero() && !slices.ContainsFunc(restores, lost) {
			return i
		}
	}
	return -1
}

// settle takes version at (-1: none) as the one that is there. A last write of unknown outcome may
// still take place: it stays possible.
func (l *ledger) settle(path string, at int, now time.Time) {
	all := l.files[path]
	var keep []version
	if at >= 0 {
		v := all[at]
		if v.at.IsZero() {
			v.at = now
		}
		keep = append(keep, v)
	}
	if last := len(all) - 1; last != at && all[last].at.IsZero() {
		keep = append(keep, all[last])
	}
	if l.files[path] = keep; len(keep) == 0 {
		delete(l.files, path)
	}
}
