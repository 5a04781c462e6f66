// Package simcore names the pure parts of hostagent for the simulation in test/sim: what it decides
// for one session, and the rules of the records of its disks. It adds nothing to them.
package simcore

import (
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// What the core knows, is told and answers.
type (
	State   = core.State
	Phase   = core.Phase
	Op      = core.Op
	Event   = core.Event
	Command = core.Command
	Refusal = core.Refusal
)

// Phases of a session's compute.
const (
	Absent   = core.Absent
	Waking   = core.Waking
	Awake    = core.Awake
	Sleeping = core.Sleeping
	Dropping = core.Dropping
	Deleting = core.Deleting
)

// Operations.
const (
	OpWake   = core.OpWake
	OpSleep  = core.OpSleep
	OpDrop   = core.OpDrop
	OpDelete = core.OpDelete
)

// Events.
type (
	Wake    = core.Wake
	Sleep   = core.Sleep
	Delete  = core.Delete
	Admit   = core.Admit
	Release = core.Release
	Lost    = core.Lost
	Adopt   = core.Adopt
	Disown  = core.Disown
	Stop    = core.Stop
	Recall  = core.Recall
	Ended   = core.Ended
)

// Commands.
type (
	Start   = core.Start
	Cancel  = core.Cancel
	Join    = core.Join
	Retry   = core.Retry
	Settled = core.Settled
	Serve   = core.Serve
	Unserve = core.Unserve
	Report  = core.Report
)

// Decide is the core.
func Decide(s State, ev Event) (State, []Command, error) { return core.Decide(s, ev) }

// RefusalOf returns the refusal in err, or nil.
func RefusalOf(err error) *Refusal { return core.RefusalOf(err) }

// What a host knows of the image of a disk.
type (
	Key     = disk.Key
	Record  = disk.Record
	Pending = disk.Pending
	Want    = disk.Want
)

// States of an image.
const (
	Blank = disk.Blank
	Dirty = disk.Dirty
	Clean = disk.Clean
)
