package chaos

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// version is one content that was written to a path.
type version struct {
	sum string
	// at is when the write was acknowledged; zero: whether it took place is not known.
	at time.Time
	// epoch in which it was written, or last seen.
	epoch ids.Epoch
	saves []save // that began after at
}

// save is a checkpoint, or a close, that was acknowledged.
type save struct {
	epoch ids.Epoch // of the handle
	// closed is when a close was acknowledged. It is the session's, not an epoch's: one that is
	// acknowledged after a restore is of what the restore brought back.
	closed time.Time
}

// restore is one return of a session to a snapshot: what was acknowledged before asOf is there.
type restore struct {
	asOf  time.Time
	epoch ids.Epoch // that began with it
	at    time.Time // when it began
}

// keeps reports whether a save keeps what it saved over a restore.
func (s save) keeps(r restore) bool {
	if s.closed.IsZero() {
		return s.epoch.Compare(r.epoch) < 0
	}
	return s.closed.Before(r.at)
}

// mayLose reports whether a restore may have lost what was acknowledged.
func (r restore) mayLose(v version) bool {
	keeps := func(s save) bool { return s.keeps(r) }
	return v.epoch.Compare(r.epoch) < 0 && !v.at.Before(r.asOf) && !slices.ContainsFunc(v.saves, keeps)
}

// ledger is what a worker knows of its session's files. Versions of a path are oldest first, and only
// the last one may be of unknown outcome: a path whose last write is not known is not written again.
type ledger struct{ files map[string][]version }

func newLedger() *ledger { return &ledger{map[string][]version{}} }

// begin notes a write that is under way.
func (l *ledger) begin(path, sum string, e ids.Epoch) {
	l.files[path] = append(l.files[path], version{sum: sum, epoch: e})
}

// done notes that the last write of a path was acknowledged.
func (l *ledger) done(path string, at time.Time) {
	all := l.files[path]
	all[len(all)-1].at = at
}

// saved notes that a checkpoint or a close which began at this time was acknowledged.
func (l *ledger) saved(began time.Time, s save) {
	for _, all := range l.files {
		for i, v := range all {
			if !v.at.IsZero() && !v.at.After(began) && !slices.Contains(v.saves, s) {
				all[i].saves = append(v.saves, s)
			}
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

// safe counts the files that were saved.
func (l *ledger) safe() (n int) {
	for _, all := range l.files {
		if slices.ContainsFunc(all, func(v version) bool { return len(v.saves) > 0 }) {
			n++
		}
	}
	return n
}

// seen is what was found in a session, path to hash.
type seen struct {
	files map[string]string
	at    time.Time
	epoch ids.Epoch
}

// check compares what is in the session with what must be there, given its restores, and takes
// what it found as what is there from now on.
func (l *ledger) check(found seen, restores []restore) (wrong []string) {
	for _, path := range slices.Sorted(maps.Keys(l.files)) {
		all := l.files[path]
		sum, there := found.files[path]
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
			wrong = append(wrong, fmt.Sprintf("%s is lost: version %d of %d (%.12s, acknowledged %s in epoch %s, saves %v) must be there, found is version %d (there: %v)",
				path, floor+1, len(all), all[floor].sum, all[floor].at.Format(clock), all[floor].epoch, all[floor].saves, at+1, there))
		default:
			l.settle(path, at, found)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(found.files)) {
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

// settle takes version at (-1: none) as the one that is there. Earlier ones stay possible, since a later
// restore may be to a snapshot that has them; so does a last write of unknown outcome, which may still
// take place.
func (l *ledger) settle(path string, at int, found seen) {
	all := l.files[path]
	keep := slices.Clone(all[:at+1])
	if at >= 0 {
		v := &keep[at]
		if v.at.IsZero() {
			v.at = found.at
		}
		v.epoch = found.epoch
	}
	if last := len(all) - 1; last != at && all[last].at.IsZero() {
		keep = append(keep, all[last])
	}
	if l.files[path] = keep; len(keep) == 0 {
		delete(l.files, path)
	}
}
