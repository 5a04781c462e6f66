// Package core decides how many warm sandboxes a pool wants, on which hosts, and who may have one. It
// guarantees that a decision depends on its arguments alone (it has no clock, no randomness and no
// I/O), that what it lets be prepared never adds up to more than the pool's ceiling, whatever is lost,
// late or repeated, that a host whose preparations fail is not asked faster than its back-off allows,
// and that a reservation ends by itself.
package core

import (
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Times that the decisions are made with.
const (
	// PrepareLimit is how long a host may take over one preparation: the request's deadline. A host
	// begins none whose deadline is over.
	PrepareLimit = 2 * time.Minute
	// ClockMargin is by how much the clocks of two hosts may differ.
	ClockMargin = time.Minute
	// ReservedFor is how long a reservation holds that nobody settles.
	ReservedFor = 15 * time.Second
	// Grace is how long fewer must be wanted before those that are too many are retired.
	Grace = 5 * time.Minute
	// ShareTime is how long a claim counts towards its tenant's share.
	ShareTime = time.Minute
	// HeardFor is how long a host's list counts; after that the host is silent.
	HeardFor = 15 * time.Second
	// SeenTime is how long a tenant that asked counts as one that may come again.
	SeenTime = 15 * time.Minute
	// BackoffFirst doubles with every failure of a host up to BackoffMost.
	BackoffFirst = time.Second
	BackoffMost  = 5 * time.Minute
)

// MaxWaiting asks of one pool wait for a warm sandbox at once.
const MaxWaiting = 4096

// MaxWaitingOfOne asks of one tenant do at most: the others may wait too.
const MaxWaitingOfOne = MaxWaiting / 4

// Spec is one declared pool, read and checked.
type Spec struct {
	Template string
	Tier     corev1.Tier
	Minimum  int
	Ratio    float64
	Ceiling  int
	InFlight int
	MaxAge   time.Duration
	Wait     time.Duration
	Share    float64
	Zones    []string
	Schedule []Slot
}

// Slot is a minimum at certain times of the week.
type Slot struct {
	// Days, empty: every day. From and To are minutes since midnight; past midnight if To is not later.
	Days     []time.Weekday
	From, To int
	Zone     *time.Location
	Minimum  int
}

// Template is what the pool's template is now.
type Template struct {
	// Digest of all that a sandbox of it depends on; a warm one with another is replaced.
	Digest string
	// Image is the digest of its image; empty while nobody knows it.
	Image string
	// Memory of one sandbox in bytes; a host that has less free gets none.
	Memory uint64
}

// Presence is what is known of a host's being there.
type Presence int

// A host is Silent from the start: it may be there and have what it was told to have.
const (
	Silent Presence = iota
	Alive
	Lost
)

// Host is what is known of one host. Of one that was never asked in this term, Warm is unknown: Asked
// is zero.
type Host struct {
	ID, Zone string
	Presence Presence
	Draining bool
	// Unwell says why it should get no more now; empty: it is well.
	Unwell string
	Tiers  []corev1.Tier
	// Images that are there, by digest.
	Images []string
	// FreeMemory in bytes; 0: nobody knows.
	FreeMemory uint64
	Boot       string
	// Asked is when the list that follows was asked for, in this term; Heard when it came.
	Asked, Heard time.Time
	Warm         []Sandbox
	Uses         []Use
}

// State of a warm sandbox.
type State int

// States, as in berth.host.v1.WarmState.
const (
	Preparing State = iota + 1
	Ready
	Retiring
)

// Sandbox is one that nobody has claimed.
type Sandbox struct {
	ID       ids.SandboxID
	Template string
	Tier     corev1.Tier
	State    State
	Digest   string
	// Stale says why no session would get it; empty: one would.
	Stale  string
	MadeAt time.Time
	Memory uint64
}

// Use is what a host counts of one template in one tier, since its boot.
type Use struct {
	Template        string
	Tier            corev1.Tier
	Active          int
	Claimed, Missed uint64
}

// Caps say how many may exist on each host: no more are there, and none above it can come into being
// by anything that was sent. The record is stored before anything is sent that relies on it.
type Caps map[string]int

// Kind of a step.
type Kind int

// Kinds of step.
const (
	// PrepareOne: one more on the host.
	PrepareOne Kind = iota + 1
	// RetireOne: this one goes.
	RetireOne
)

// Step is one thing to do, in the order of the plan.
type Step struct {
	Kind Kind
	Host string
	// Sandbox of a retirement.
	Sandbox ids.SandboxID
	// Cap that goes with a preparation.
	Cap int
	Why string
}

// Plan is what is to be done now, all of it. Caps are stored first, and Pool.Stored is told; then each
// step is carried out, in any order or not at all: the next plan begins from what is seen.
type Plan struct {
	Goal Goal
	// Caps to store; CapsChanged: they are not what is stored.
	Caps        Caps
	CapsChanged bool
	Steps       []Step
	// Lacking is how many are wanted and not there; Unhealthy why they cannot be prepared now.
	Lacking   int
	Unhealthy string
	// Filled: as many as wanted are there and can be claimed.
	Filled bool
}

// Outcome of one preparation.
type Outcome struct {
	// Made is what waits now; nil: it failed.
	Made *Sandbox
	// Failed is the reason, in words.
	Failed string
	// Unanswered: nobody knows whether the host did it, or will.
	Unanswered bool
}

// Ask is for a warm sandbox, for one attempt of one wake.
type Ask struct {
	Tenant, Session, Attempt string
	// Hosts that may take the session, best first.
	Hosts []string
}

// Verdict of an ask.
type Verdict int

// Verdicts. Waiting: Pool.Granted tells later.
const (
	Waiting Verdict = iota
	Reserved
	Exhausted
	OverShare
)

// Answer to an ask. Reservation names it also while it waits.
type Answer struct {
	Verdict     Verdict
	Reservation string
	Host        string
	Waited      time.Duration
}

// Settled says what became of a reservation, or of a claim that had none.
type Settled struct {
	Reservation, Tenant, Host string
	// Warm is the sandbox that was claimed; empty: none was.
	Warm ids.SandboxID
}
