package core

import (
	"slices"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// The states of a session.
const (
	Unknown  = corev1.State_STATE_UNSPECIFIED // no such session, or deleted and forgotten
	New      = corev1.State_STATE_NEW
	Waking   = corev1.State_STATE_WAKING
	Active   = corev1.State_STATE_ACTIVE
	Sleeping = corev1.State_STATE_SLEEPING
	Asleep   = corev1.State_STATE_ASLEEP
	Paused   = corev1.State_STATE_PAUSED
	Failed   = corev1.State_STATE_FAILED
	Deleting = corev1.State_STATE_DELETING
	Deleted  = corev1.State_STATE_DELETED
)

// EventKind names a fact that the scheduler publishes.
type EventKind string

// The facts.
const (
	Admitted     EventKind = "admitted"
	Placed       EventKind = "placed"
	Activated    EventKind = "active"
	Renewed      EventKind = "renewed"
	FellAsleep   EventKind = "asleep"
	Displaced    EventKind = "displaced"
	HasFailed    EventKind = "failed"
	WasPaused    EventKind = "paused"
	Unplaceable  EventKind = "unplaceable"
	WasDeleted   EventKind = "deleted"
	WasErased    EventKind = "erased"
	WasRewound   EventKind = "rewound"
	HostJoined   EventKind = "joined"
	HostIsLost   EventKind = "lost"
	HostDraining EventKind = "draining"
	HostDrained  EventKind = "drained" // nothing of it is left there
	HostRemoved  EventKind = "removed"
)

// CommandKind names work outside the state machine.
type CommandKind string

// The commands.
const (
	HostWake   CommandKind = "host.wake"
	HostSleep  CommandKind = "host.sleep"
	HostStop   CommandKind = "host.sleep (force)"
	HostDelete CommandKind = "host.delete"
	Revoke     CommandKind = "credentials.revoke"
	Retry      CommandKind = "place again"
	// HostClear removes compute of an earlier epoch; see Left.
	HostClear CommandKind = "host.sleep (force, earlier epoch)"
)

// Transition is one declared way for a session to change.
type Transition struct {
	Name     string
	From     []corev1.State
	Event    string // the entry that causes it
	When     string // the condition, in words
	To       corev1.State
	Emits    []EventKind
	Commands []CommandKind
}

type states = []corev1.State
type emits = []EventKind
type commands = []CommandKind

var (
	tCreate = declare(Transition{Name: "create", From: states{Unknown, Deleted}, Event: "open",
		When: "no session under any of the keys; stored after the last delete", To: New, Emits: emits{Admitted}})
	tRenew = declare(Transition{Name: "renew", From: states{Active}, Event: "open", To: Active, Emits: emits{Renewed}})
	tJoin  = declare(Transition{Name: "join", From: states{Waking}, Event: "open", When: "joins the wake under way", To: Waking})
	tAsk   = declare(Transition{Name: "ask", From: states{Asleep, Paused, Failed, New}, Event: "open",
		When: "the wake is noted and placed in the same entry", To: Unknown, Emits: emits{Admitted}})
	tRecall = declare(Transition{Name: "recall", From: states{Sleeping}, Event: "open",
		When: "the host takes the sleep back while processes still run, else it wakes once asleep", To: Sleeping,
		Emits: emits{Admitted}, Commands: commands{HostWake}})
	tReplace = declare(Transition{Name: "replace", From: states{Failed}, Event: "open",
		When: "ephemeral and was active: its disk must not come back; a new generation follows", To: Deleting,
		Commands: commands{Revoke, HostDelete}})
	tPlace = declare(Transition{Name: "place", From: states{New, Asleep, Paused, Failed}, Event: "open, place, slept, exited",
		When: "an open waits and a host has room", To: Waking, Emits: emits{Placed}, Commands: commands{HostWake}})
	tReplaceHost = declare(Transition{Name: "place again", From: states{Waking}, Event: "wake_failed",
		When: "worth another try before the deadline; on another host if this one has no room", To: Waking, Emits: emits{Placed}, Commands: commands{HostWake}})
	tUnplaceable = declare(Transition{Name: "unplaceable", From: states{New, Asleep, Paused, Failed}, Event: "open, place, slept, exited",
		When: "no host has room", To: Unknown, Emits: emits{Unplaceable}, Commands: commands{Retry}})
	tGiveUpNew = declare(Transition{Name: "give up", From: states{New}, Event: "place",
		When: "the deadline passed", To: Failed, Emits: emits{HasFailed}})
	tGiveUp = declare(Transition{Name: "give up", From: states{Asleep, Paused, Failed, Sleeping}, Event: "place",
		When: "the deadline passed; the requests are told, the session rests", To: Unknown})
	tBackToNew = declare(Transition{Name: "no room again", From: states{Waking}, Event: "wake_failed",
		When: "worth another try, but no host has room; never active so far", To: New, Emits: emits{Unplaceable}, Commands: commands{Retry}})
	tBackToAsleep = declare(Transition{Name: "no room again", From: states{Waking}, Event: "wake_failed",
		When: "worth another try, but no host has room; was active before", To: Asleep, Emits: emits{Unplaceable}, Commands: commands{Retry}})
	tActivate = declare(Transition{Name: "activate", From: states{Waking}, Event: "woke",
		When: "generation and epoch match; a snapshot that was asked for is back", To: Active, Emits: emits{Activated}})
	tWakeFailed = declare(Transition{Name: "fail", From: states{Waking}, Event: "wake_failed",
		When: "not worth another try", To: Failed, Emits: emits{HasFailed}, Commands: commands{HostStop}})
	tSleep = declare(Transition{Name: "sleep", From: states{Active}, Event: "sleep",
		When: "generation and epoch match where given; not renewed within the idle time", To: Sleeping, Commands: commands{HostSleep}})
	tSleepJoin = declare(Transition{Name: "join the sleep", From: states{Sleeping}, Event: "sleep", To: Sleeping})
	tDelayed   = declare(Transition{Name: "wait for the store", From: states{Sleeping}, Event: "sleep_delayed",
		When: "no compute is left, the disk cannot be saved yet: who waits for the close is told", To: Sleeping})
	tEndEphemeral = declare(Transition{Name: "end", From: states{Active, Asleep, Failed, New}, Event: "sleep",
		When: "ephemeral", To: Deleting, Commands: commands{Revoke, HostDelete}})
	tPause = declare(Transition{Name: "pause", From: states{Asleep, Failed}, Event: "sleep",
		When: "by plan", To: Paused, Emits: emits{WasPaused}})
	tAsleep = declare(Transition{Name: "fall asleep", From: states{Sleeping, Active}, Event: "slept",
		When: "the manifest is the head", To: Asleep, Emits: emits{FellAsleep}})
	tAsleepPaused = declare(Transition{Name: "fall asleep by plan", From: states{Sleeping, Active}, Event: "slept",
		When: "the manifest is the head; paused by plan", To: Paused, Emits: emits{FellAsleep, WasPaused}})
	tBusy = declare(Transition{Name: "stay awake", From: states{Sleeping}, Event: "sleep_refused",
		When: "the host is busy with it, or took the sleep back", To: Active, Emits: emits{Renewed}})
	tCommit = declare(Transition{Name: "commit", From: states{Active, Sleeping, Waking, Asleep, Paused, Failed}, Event: "manifest",
		When: "the parent is the head; waking: it brings back the snapshot that was asked for; at rest: something is unsaved; failed: compute is left"})
	tRestore = declare(Transition{Name: "restore", From: states{Asleep, Paused, Failed}, Event: "restore",
		When: "durable, nothing is unsaved, no open waits, no compute is left, and the head is the one that the caller saw", Emits: emits{WasRewound}})
	tDisplaced = declare(Transition{Name: "displace", From: states{Active, Sleeping}, Event: "exited, host_lost",
		When: "durable: the newest files are on the host's disk, also when a sleep could not save them and an open waits", To: Asleep, Emits: emits{Displaced, FellAsleep}})
	tLost = declare(Transition{Name: "lose", From: states{Active, Sleeping}, Event: "exited, host_lost, slept",
		When: "ephemeral: never restored", To: Failed, Emits: emits{Displaced, HasFailed}, Commands: commands{HostStop}})
	tReturn = declare(Transition{Name: "return", From: states{Waking}, Event: "join",
		When: "the host that has newer files than the store is back before another one is active, and has room", To: Waking, Emits: emits{Placed}, Commands: commands{HostWake}})
	tCleared = declare(Transition{Name: "clear", From: states{New, Waking, Active, Sleeping, Asleep, Paused, Failed, Deleting}, Event: "cleared",
		When: "a host that it was taken from runs nothing of the earlier epoch"})
	tMove = declare(Transition{Name: "move off", From: states{New, Asleep, Paused, Failed}, Event: "move",
		When: "all of it is saved and no compute is left: its next wake is placed anywhere"})
	tSave = declare(Transition{Name: "save", From: states{Asleep, Paused, Failed}, Event: "save",
		When: "something is unsaved and the host that has it holds a lease", To: Sleeping, Commands: commands{HostSleep}})
	tSaved = declare(Transition{Name: "saved", From: states{Sleeping}, Event: "slept",
		When: "it was at rest before, and the host saved what was unsaved, or has nothing of it", To: Asleep})
	tSavedPaused = declare(Transition{Name: "saved", From: states{Sleeping}, Event: "slept",
		When: "it was paused before, and the host saved what was unsaved, or has nothing of it", To: Paused})
	tNotSaved = declare(Transition{Name: "not saved", From: states{Sleeping}, Event: "exited, host_lost",
		When: "it was at rest before; its files stay where they are", To: Asleep})
	tNotSavedPaused = declare(Transition{Name: "not saved", From: states{Sleeping}, Event: "exited, host_lost",
		When: "it was paused before; its files stay where they are", To: Paused})
	tNoHandoff = declare(Transition{Name: "take a handoff back", From: states{New, Asleep, Paused, Failed}, Event: "sleep",
		When: "it waits to be handed over and no open waits"})
	tDropped = declare(Transition{Name: "forget a disk", From: states{New, Waking, Active, Sleeping, Asleep, Paused, Failed, Deleting}, Event: "dropped",
		When: "the host is not the owner and has nothing that is unsaved"})
	tForget = declare(Transition{Name: "forget a host", From: states{New, Waking, Active, Sleeping, Asleep, Paused, Failed, Deleting}, Event: "remove_host",
		When: "what was unsaved there is given up; the next wake says as of when it is restored"})
	tHostGone = declare(Transition{Name: "lose the host", From: states{Waking}, Event: "remove_host",
		When: "it was waking there, and was active before", To: Asleep, Commands: commands{Retry}})
	tHostGoneNew = declare(Transition{Name: "lose the host", From: states{Waking}, Event: "remove_host",
		When: "it was waking there, and never active so far", To: New, Commands: commands{Retry}})
	tNothingLeft = declare(Transition{Name: "lose all", From: states{Waking, Active, Sleeping, Asleep, Paused, Failed}, Event: "remove_host",
		When: "its files were there alone and never saved", To: Failed, Emits: emits{HasFailed}})
	tDelete = declare(Transition{Name: "delete", From: states{New, Waking, Active, Sleeping, Asleep, Paused, Failed}, Event: "delete",
		When: "always; for retention only under its conditions", To: Deleting, Commands: commands{Revoke, HostDelete}})
	tDeleteJoin = declare(Transition{Name: "join the delete", From: states{Deleting}, Event: "delete", To: Deleting})
	tDeleteNone = declare(Transition{Name: "delete nothing", From: states{Unknown, Deleted}, Event: "delete",
		When: "remembered, so that an older open is refused", To: Deleted})
	tGone = declare(Transition{Name: "gone", From: states{Deleting}, Event: "removed",
		When: "grants dead and key destroyed; the disk erased or its host away", To: Deleted, Emits: emits{WasDeleted}})
	tErased = declare(Transition{Name: "erased", From: states{Deleted}, Event: "removed",
		When: "every host that ever held the generation has nothing left of it, nor has the store", To: Deleted, Emits: emits{WasErased}})
	tStopped = declare(Transition{Name: "stopped", From: states{Failed}, Event: "stopped",
		When: "the host has no compute of it", To: Failed})
)

var declared []*Transition

func declare(t Transition) *Transition {
	declared = append(declared, &t)
	return &t
}

// Transitions returns every declared transition in order.
func Transitions() []*Transition { return slices.Clone(declared) }

// Stays reports whether the transition leaves the state as it is (To is Unknown).
func (t *Transition) Stays() bool { return t.To == Unknown }

// Next is the target state from a given one.
func (t *Transition) Next(from corev1.State) corev1.State {
	if t.Stays() {
		return from
	}
	return t.To
}

// Deadline is the bound of a state that is not at rest, with the next step.
type Deadline struct {
	State corev1.State
	Bound string
	Then  string
}

// Deadlines lists every state that is not at rest.
func Deadlines() []Deadline {
	return []Deadline{
		{New, "the open's deadline", "placed again with back-off until then; then failed"},
		{Waking, "the open's deadline, each try at most the wake time-out", "placed again under a new epoch up to three times, else failed"},
		{Asleep, "while an open or a handoff waits: its deadline", "placed again with back-off until then; then it rests"},
		{Sleeping, "the sleep time-out of each try", "tried again with back-off for ever; displaced when the host is lost, or when its disk cannot be saved and an open waits"},
		{Deleting, "the delete time-out of each try", "tried again with back-off for ever; an absent host erases when it is back"},
	}
}
