// Package core decides what happens to one session's compute on this host. Decide is a pure
// function: it takes the state, one event and the time that the event carries, and returns the new
// state and the commands that the shell has to run. It guarantees that
//
//   - nobody acts on a session without an exact match of generation and epoch: an older epoch is
//     refused as stale, a newer one supersedes what is here;
//   - an epoch that was once awake and ended is never awake again; a sleep has not ended anything
//     until it signals the first process, and can be taken back until then;
//   - work is admitted and sleep is granted by the same function on the same state, so that a
//     caller who holds one lock around Decide can never put a busy session to sleep;
//   - delete is legal in every phase, also while a wake or a sleep is running;
//   - every operation that is started ends in exactly one event (Ended), and every phase but
//     absent and awake has such an operation running or is retried by the next command.
package core

import (
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// Phase is what a session's compute on this host is doing.
type Phase string

// The phases. They are stored, so their names never change.
const (
	Absent   Phase = "absent"   // no compute; perhaps a disk
	Waking   Phase = "waking"   // being made; nothing of the user runs
	Awake    Phase = "awake"    // the guest answered in this epoch
	Sleeping Phase = "sleeping" // no new work; being stopped, its manifest being committed
	Dropping Phase = "dropping" // its compute is being removed, its disk stays as it is
	Deleting Phase = "deleting" // compute and disk are being removed
)

// State is what the host knows of one session. The zero State is a session never seen here.
type State struct {
	Phase      Phase
	Generation ids.Generation
	Epoch      ids.Epoch
	// Spent: the epoch was awake and is over, or is being ended.
	Spent bool
	// Slept: the epoch ended by a sleep whose manifest is committed.
	Slept bool
	// Running: an operation for the phase is under way.
	Running bool
	// Stopping: the sleep has come to its first signal; from there it cannot be taken back.
	Stopping bool
	// Recalled: the sleep was taken back; it ends without having touched anything.
	Recalled bool
	// Work counts what keeps the session awake: streams and running execs.
	Work         int
	LastActivity time.Time
}

// Op is a long operation that the shell runs for a session, at most one at a time.
type Op string

// The operations.
const (
	OpWake   Op = "wake"
	OpSleep  Op = "sleep"
	OpDrop   Op = "drop"
	OpDelete Op = "delete"
)

// Command is one thing that the shell does after it stored the new state.
type Command interface{ command() }

// Start begins an operation; its end comes back as Ended.
type Start struct{ Op Op }

// Cancel asks the running operation to give up; its end still comes back as Ended.
type Cancel struct{}

// Join answers the caller with the outcome of the operation that is running.
type Join struct{}

// Retry makes the caller wait until the running operation ended, then decide again.
type Retry struct{}

// Settled answers the caller with the stored outcome of the epoch.
type Settled struct{}

// Serve opens the data plane for the epoch.
type Serve struct{}

// Unserve closes the data plane: streams are told why and no opening is answered any more.
type Unserve struct{ Reason string }

// Report tells scheduler, and everybody, that compute ended without being asked.
type Report struct {
	What   string // exited or oom
	Reason string
}

func (Start) command()   {}
func (Cancel) command()  {}
func (Join) command()    {}
func (Retry) command()   {}
func (Settled) command() {}
func (Serve) command()   {}
func (Unserve) command() {}
func (Report) command()  {}

// Event is something that was asked or has happened.
type Event interface{ event() }

// Wake asks for the session to be awake in exactly this epoch.
type Wake struct {
	Generation ids.Generation
	Epoch      ids.Epoch
}

// Sleep asks for the session to sleep, if it is in exactly this epoch.
type Sleep struct {
	Generation ids.Generation
	Epoch      ids.Epoch
	// IdleSince, unless zero: refuse if there was activity after it.
	IdleSince time.Time
	// Force: do not ask whether it is busy.
	Force bool
	// AtRest: no compute needs to be left for there to be something to save. The disk of this generation
	// is here, in nobody's use, and holds what is not saved.
	AtRest bool
	// Missing: it is to be saved, no compute needs to be left, and there is no disk of this generation here.
	Missing bool
	// Why is what streams end with; empty: it goes to sleep.
	Why string
}

// Delete asks for everything of a generation to be removed.
type Delete struct{ Generation ids.Generation }

// Admit asks to begin work in exactly this epoch.
type Admit struct {
	Generation ids.Generation
	Epoch      ids.Epoch
	At         time.Time
}

// Release ends one piece of admitted work.
type Release struct{ At time.Time }

// Lost says that the sandbox of this epoch is gone though nobody stopped it.
type Lost struct {
	Epoch  ids.Epoch
	OOM    bool
	Reason string
	// Why is what streams end with; empty: the reason.
	Why string
}

// Adopt takes a live sandbox over that an earlier process of this host left awake.
type Adopt struct {
	Generation ids.Generation
	Epoch      ids.Epoch
	At         time.Time
}

// Disown says that a fresh and complete answer of scheduler does not name this host as the owner
// of the session's compute.
type Disown struct {
	// Why is what streams end with; empty: that it does not own the session any more.
	Why string
}

// Stop asks whether the sleep that is running may signal the processes now.
type Stop struct{}

// Recall takes the sleep that is running back, if it has not touched anything: its session cannot be
// saved now.
type Recall struct{}

// Ended is the end of the operation that was started last.
type Ended struct {
	Op Op
	At time.Time
	// Failed: it did not get to its end.
	Failed bool
}

func (Wake) event()    {}
func (Sleep) event()   {}
func (Delete) event()  {}
func (Admit) event()   {}
func (Release) event() {}
func (Lost) event()    {}
func (Adopt) event()   {}
func (Disown) event()  {}
func (Stop) event()    {}
func (Recall) event()  {}
func (Ended) event()   {}
