// Package simcore opens the scheduler's core to the simulation and to the
// benches: the same types under exported names, and nothing of its own. No
// service may import it.
package simcore

import (
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// The state machine and what it holds.
type (
	State     = core.State
	Entry     = core.Entry
	Outcome   = core.Outcome
	Session   = core.Session
	Host      = core.Host
	Terms     = core.Terms
	Limits    = core.Limits
	Snapshots = core.Snapshots
	Actor     = core.Actor
	Failure   = core.Failure
	Timing    = core.Timing
	Step      = core.Step
	Time      = core.Time
	Wake      = core.Wake
	Sleep     = core.Sleep
	Deletion  = core.Deletion
	Rewind    = core.Rewind
	Left      = core.Left
	Pair      = core.Pair
	Usage     = core.Usage
	Tombstone = core.Tombstone
	Erasure   = core.Erasure
	Record    = core.Record
	Event     = core.Event
	Pending   = core.Pending
	Verb      = core.Verb
	EventKind = core.EventKind
)

// What a pool says of candidates.
var (
	Reservable = core.Reservable
	Reserved   = core.Reserved
	Cold       = core.Cold
)

// The entries.
type (
	Ref          = core.Ref
	Open         = core.Open
	Place        = core.Place
	Woke         = core.Woke
	WakeFailed   = core.WakeFailed
	SleepCmd     = core.SleepCmd
	ManifestInfo = core.ManifestInfo
	ManifestCmd  = core.ManifestCmd
	Restore      = core.Restore
	Slept        = core.Slept
	SleepRefused = core.SleepRefused
	Delete       = core.Delete
	Expire       = core.Expire
	Removed      = core.Removed
	Exited       = core.Exited
	Delayed      = core.Delayed
	HostLost     = core.HostLost
	Drain        = core.Drain
	Move         = core.Move
	Save         = core.Save
	Dropped      = core.Dropped
	Cleared      = core.Cleared
	RemoveHost   = core.RemoveHost
	Trim         = core.Trim
	Tick         = core.Tick
	Incarnate    = core.Incarnate
)

// Placement, commands and what follows from their answers.
type (
	HostFacts   = core.HostFacts
	Candidate   = core.Candidate
	Plan        = core.Plan
	PlanRow     = core.PlanRow
	Command     = core.Command
	CommandKind = core.CommandKind
	Answer      = core.Answer
)

// The states of a session.
const (
	Unknown  = core.Unknown
	New      = core.New
	Waking   = core.Waking
	Active   = core.Active
	Sleeping = core.Sleeping
	Asleep   = core.Asleep
	Paused   = core.Paused
	Failed   = core.Failed
	Deleting = core.Deleting
	Deleted  = core.Deleted
)

// The commands, verbs and reasons.
const (
	HostWake   = core.HostWake
	HostSleep  = core.HostSleep
	HostStop   = core.HostStop
	HostDelete = core.HostDelete
	HostClear  = core.HostClear
	Revoke     = core.Revoke
	Retry      = core.Retry

	VerbOpen   = core.VerbOpen
	VerbClose  = core.VerbClose
	VerbDelete = core.VerbDelete

	ReasonPause = core.ReasonPause
	ReasonDrain = core.ReasonDrain
)

// The facts.
const (
	Admitted     = core.Admitted
	Placed       = core.Placed
	Activated    = core.Activated
	Renewed      = core.Renewed
	FellAsleep   = core.FellAsleep
	Displaced    = core.Displaced
	HasFailed    = core.HasFailed
	WasPaused    = core.WasPaused
	Unplaceable  = core.Unplaceable
	WasDeleted   = core.WasDeleted
	WasErased    = core.WasErased
	WasRewound   = core.WasRewound
	HostJoined   = core.HostJoined
	HostIsLost   = core.HostIsLost
	HostDraining = core.HostDraining
	HostDrained  = core.HostDrained
	HostRemoved  = core.HostRemoved
)

// The functions of the core.
var (
	NewState  = core.NewState
	ReadState = core.ReadState
	At        = core.At
	Next      = core.Next
	After     = core.After
	Before    = core.Before
	Refused   = core.Refused

	DecodeEntry = core.DecodeEntry
	OwnKernel   = core.OwnKernel
)

// A cell for measurements.
var (
	Fill     = core.Fill
	FillHost = core.FillHost
	FillKey  = core.FillKey
	FillOpen = core.FillOpen
)
