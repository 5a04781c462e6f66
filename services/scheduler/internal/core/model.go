// Package core is the scheduler's truth: a deterministic state machine that
// holds every session, host, request outcome and unpublished event. It
// guarantees that applying the same entries in the same order gives the same
// state on every replica: it reads no clock, draws no random number and does
// no I/O; time arrives as an argument inside the entry. A session changes its
// state only by a transition declared in transitions.go.
package core

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Time is wall-clock time in nanoseconds since 1970, told by the leader.
type Time int64

// At converts a time.Time; the zero time becomes 0.
func At(t time.Time) Time {
	if t.IsZero() {
		return 0
	}
	return Time(t.UnixNano())
}

// Std converts to UTC; 0 becomes the zero time.
func (t Time) Std() time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(t)).UTC()
}

// Add moves t by d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Limits of one sandbox, or the capacity of one host.
type Limits struct {
	CPUMillis   uint32 `json:"cpu,omitempty"`
	MemoryBytes uint64 `json:"mem,omitempty"`
	PIDs        uint32 `json:"pids,omitempty"`
	DiskBytes   uint64 `json:"disk,omitempty"`
	// Of the disk's reads and writes together, each second, and open files of one process; 0: no bound of
	// its own. They are not counted against hosts.
	DiskBytesPerSecond uint64 `json:"disk_bps,omitempty"`
	DiskOpsPerSecond   uint64 `json:"disk_ops,omitempty"`
	OpenFiles          uint64 `json:"files,omitempty"`
}

// Snapshots says how often the disk of an awake session is saved, and how long
// its snapshots are kept.
type Snapshots struct {
	Every      time.Duration `json:"every,omitempty"`
	KeepAll    time.Duration `json:"keep_all,omitempty"`
	KeepHourly time.Duration `json:"keep_hourly,omitempty"`
	KeepDaily  time.Duration `json:"keep_daily,omitempty"`
}

// Terms are what a session may use, fixed by the wake that made it active.
type Terms struct {
	Plan       string        `json:"plan,omitempty"`
	Template   string        `json:"template,omitempty"`
	Tier       corev1.Tier   `json:"tier,omitempty"`
	Limits     Limits        `json:"limits,omitzero"`
	Ephemeral  bool          `json:"ephemeral,omitempty"`
	Idle       time.Duration `json:"idle,omitempty"`
	Retention  time.Duration `json:"retention,omitempty"`
	Image      string        `json:"image,omitempty"`
	TierReason string        `json:"tier_reason,omitempty"`
	Snapshots  Snapshots     `json:"snapshots,omitzero"`
	// Priority, 0 to 100: higher is sooner where there is not room for all.
	Priority uint32 `json:"priority,omitempty"`
	// Zones in which it may run; none: any.
	Zones []string `json:"zones,omitempty"`
	// MaxAwake bounds how many sessions of a tenant are awake on this plan; 0: no bound.
	MaxAwake uint32 `json:"max_awake,omitempty"`
}

// Actor is the principal for whom a session exists.
type Actor struct {
	Tenant   ids.Tenant `json:"tenant"`
	Issuer   string     `json:"issuer,omitempty"`
	Subject  string     `json:"subject,omitempty"`
	Frontend string     `json:"frontend,omitempty"`
	// Acting is who acts for the subject, from the token (RFC 8693); empty: nobody.
	Acting string `json:"acting,omitempty"`
}

// Failure is a kind for programs and a sentence for people.
type Failure struct {
	Kind   errkind.Kind `json:"kind"`
	Reason string       `json:"reason"`
}

// Step is one timed part of a wake or a sleep.
type Step struct {
	Name  string        `json:"n"`
	Start time.Duration `json:"s,omitempty"`
	Took  time.Duration `json:"t,omitempty"`
}

// Timing is the time of every step of one operation.
type Timing struct {
	Total time.Duration `json:"total,omitempty"`
	Steps []Step        `json:"steps,omitempty"`
}

// Verb names a request that is idempotent within one session.
type Verb string

// The verbs of requests.
const (
	VerbOpen   Verb = "open"
	VerbClose  Verb = "close"
	VerbDelete Verb = "delete"
)

// Pending is a request that waits for the session.
type Pending struct {
	Verb Verb          `json:"verb"`
	ID   ids.RequestID `json:"id"`
}

// Wake is an open that is not settled yet.
type Wake struct {
	Cause    corev1.Cause  `json:"cause,omitempty"`
	Request  ids.RequestID `json:"request"`
	Deadline Time          `json:"deadline"`
	Attempt  int           `json:"attempt,omitempty"`
	// Why it could not be placed, when it could not; Told is the sort of reason
	// that was told last.
	Unplaced string `json:"unplaced,omitempty"`
	Told     string `json:"told,omitempty"`
	// Reservation is that of a warm sandbox on the host that it is placed on; Cold: it is to start cold
	// there. They are the pool's word as of the placement.
	Reservation string `json:"reservation,omitempty"`
	Cold        bool   `json:"cold,omitempty"`
	// Terms that apply once it is placed; never nil, never changed.
	Terms *Terms `json:"terms"`
}

// Sleep is a sleep under way.
type Sleep struct {
	Reason    string `json:"reason,omitempty"`
	IdleSince Time   `json:"idle_since,omitempty"`
	Pause     bool   `json:"pause,omitempty"`
	// Force: the host is not asked whether it is in use.
	Force bool `json:"force,omitempty"`
	// Handoff: once asleep it wakes on another host.
	Handoff bool `json:"handoff,omitempty"`
	// Save: there is no compute; the host saves what was left unsaved on the disk.
	Save bool `json:"save,omitempty"`
}

// Deletion is a delete under way.
type Deletion struct {
	Request  ids.RequestID `json:"request,omitempty"`
	Reason   string        `json:"reason,omitempty"`
	StoredAt Time          `json:"stored_at,omitempty"`
}

// Rewind is an earlier snapshot that the next wake brings back.
type Rewind struct {
	Snapshot string `json:"snapshot"`
	AsOf     Time   `json:"as_of,omitempty"`
}

// Session is the record of one session. A *Session read from State is never
// changed afterwards: a change makes a new one.
type Session struct {
	Tenant  ids.Tenant       `json:"tenant"`
	Key     ids.SessionKey   `json:"key"`
	Aliases []ids.SessionKey `json:"aliases,omitempty"`
	Name    string           `json:"name,omitempty"`
	State   corev1.State     `json:"state"`
	// Dirty: it was active and what it wrote after Manifest is on the disk of Newest only.
	Dirty bool `json:"dirty,omitempty"`
	// Behind: what was written after Manifest is lost, and no wake has said so yet.
	Behind     bool           `json:"behind,omitempty"`
	NeedsStop  bool           `json:"needs_stop,omitempty"`
	Origin     corev1.Origin  `json:"origin,omitempty"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch,omitzero"`
	Revision   uint64         `json:"revision"`
	// Host owns the current epoch: it has the compute, if there is any. Empty
	// once the session was moved off a host, until it is placed.
	Host ids.Host `json:"host,omitempty"`
	// Newest is the host whose disk has what is not in the store: set while Dirty.
	Newest ids.Host `json:"newest,omitempty"`
	// From is the host that it is handed over from, while a wake for it is on; it may be removed by now.
	From ids.Host `json:"from,omitempty"`
	// Holders may have an image of this generation, Host among them; see holders.
	Holders []ids.Host `json:"holders,omitempty"`
	// Left is compute of earlier epochs that may still run.
	Left        []Left    `json:"left,omitempty"`
	Boot        string    `json:"boot,omitempty"`
	Manifest    string    `json:"manifest,omitempty"`
	ImageDigest string    `json:"image,omitempty"`
	LastActive  ids.Epoch `json:"last_active,omitzero"`
	// Restore is what the next wake brings back instead of Manifest. It is set
	// only while nothing is unsaved.
	Restore *Rewind `json:"restore,omitempty"`
	// Rewound: Manifest brought a snapshot of then back, and no wake has said so yet.
	Rewound Time `json:"rewound,omitempty"`
	// SavedAt is as of when the files of Manifest are.
	SavedAt Time `json:"saved,omitempty"`
	// VM is the tier of the virtual machine that wrote the disk of this generation; unspecified: none did.
	// It is never unset: no host mounts such a disk, and no weaker wall is between it and the session.
	VM           corev1.Tier `json:"vm,omitempty"`
	Actor        Actor       `json:"actor"`
	Terms        *Terms      `json:"terms"` // never nil, never changed
	Wake         *Wake       `json:"wake,omitempty"`
	Sleep        *Sleep      `json:"sleep,omitempty"`
	Deletion     *Deletion   `json:"deletion,omitempty"`
	Pending      []Pending   `json:"pending,omitempty"`
	RestoredAsOf Time        `json:"restored,omitempty"`
	LastWake     *Timing     `json:"last_wake,omitempty"` // its steps until it sleeps
	Failure      *Failure    `json:"failure,omitempty"`
	CreatedAt    Time        `json:"created"`
	ChangedAt    Time        `json:"changed"`
	RenewedAt    Time        `json:"renewed,omitempty"`
	// Last activity, as the host said when it refused a sleep.
	BusySince Time `json:"busy,omitempty"`
	// Leader time at which the end of retention was warned of, plus one; 0: never.
	Warned time.Duration `json:"warned,omitempty"`
}

// Fresh reports whether no epoch of this generation was ever active, so that
// a blank disk is right.
func (s *Session) Fresh() bool { return s.LastActive.IsZero() && s.Manifest == "" }

// bound reports whether only s.Host could wake s by the rules of older
// formats: its newest files are nowhere else.
func (s *Session) bound() bool { return !s.Fresh() && (s.Dirty || s.Manifest == "") }

// unsaved notes whether what the session wrote is only on its host's disk.
func (s *Session) unsaved(yes bool) {
	s.Dirty, s.Newest = yes, ""
	if yes {
		s.Newest = s.Host
	}
}

// dead reports whether nothing is left of what the session had written.
func (s *Session) dead() bool {
	return !s.Terms.Ephemeral && !s.Fresh() && s.Manifest == "" && s.Host == "" && s.Newest == ""
}

// holders are the hosts that may have an image of this generation, in order.
func (s *Session) holders() []ids.Host {
	if s.Host == "" || slices.Contains(s.Holders, s.Host) {
		return s.Holders
	}
	return append(slices.Clone(s.Holders), s.Host) // placed by a version that kept no list
}

// holds reports whether s counts against its host's memory.
func (s *Session) holds() bool {
	switch s.State {
	case Waking, Active:
		return true
	case Sleeping:
		return s.Sleep == nil || !s.Sleep.Save
	case Deleting, Failed:
		return s.NeedsStop
	}
	return false
}

// Host is one machine that runs sandboxes. Its lease is the leader's memory.
type Host struct {
	ID       ids.Host          `json:"id"`
	Boot     string            `json:"boot"`
	Key      string            `json:"key,omitempty"`
	Tiers    []corev1.Tier     `json:"tiers,omitempty"`
	Capacity Limits            `json:"capacity"`
	Zone     string            `json:"zone,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
	Draining bool              `json:"draining,omitempty"`
	Lost     bool              `json:"lost,omitempty"`
	// Lease is the longest term that this boot may have been given since it was
	// lost last; 0: not known. A leader that gives shorter ones waits for it.
	Lease time.Duration `json:"lease,omitempty"`
	// CPU may be promised this many percent; memory never more than there is.
	CPUPercent uint32 `json:"cpu_percent,omitempty"`
	// Likewise processes and disk space; 0: they are not counted.
	PIDsPercent uint32 `json:"pids_percent,omitempty"`
	DiskPercent uint32 `json:"disk_percent,omitempty"`
	// DrainDeadline is when awake sessions are put to sleep though they are busy.
	DrainDeadline Time `json:"drain_deadline,omitempty"`
	// Drained: draining, and it was told that nothing is left there.
	Drained bool `json:"drained,omitempty"`
}

// GoneHost remembers a host that was taken out for good.
type GoneHost struct {
	ID ids.Host `json:"id"`
	At Time     `json:"at"`
}

// Left is compute of an earlier epoch that may still run on a host: it counts
// as used until the host says that it does not, or is lost.
type Left struct {
	Host   ids.Host  `json:"h"`
	Epoch  ids.Epoch `json:"e"`
	Limits Limits    `json:"l"`
}

// Pair is a session and one thing that it left.
type Pair struct {
	Session *Session
	Left    Left
}

// Usage is what sessions hold of a host.
type Usage struct {
	MemoryBytes uint64
	CPUMillis   uint64
	PIDs        uint64
	DiskBytes   uint64
	Sessions    int // whose owner it is
	Held        int // with compute, or that may have left some
	Unsaved     int // whose newest files are there alone
}

// Tombstone remembers a deleted session.
type Tombstone struct {
	Tenant     ids.Tenant       `json:"tenant"`
	Key        ids.SessionKey   `json:"key"`
	Aliases    []ids.SessionKey `json:"aliases,omitempty"`
	Name       string           `json:"name,omitempty"`
	Actor      Actor            `json:"actor"`
	Generation ids.Generation   `json:"generation"`
	Epoch      ids.Epoch        `json:"epoch,omitzero"`
	Revision   uint64           `json:"revision"`
	Index      uint64           `json:"index"` // raft index of the delete
	StoredAt   Time             `json:"stored_at"`
	At         Time             `json:"at"`
	LeaderTime time.Duration    `json:"lt"`
	// Generations of which a host still may have a disk, one part for each of their hosts.
	Erase []Erasure `json:"erase,omitempty"`
}

// Erasure is a deleted generation that one host removes from its disks and from
// the store.
type Erasure struct {
	Generation ids.Generation `json:"g"`
	Epoch      ids.Epoch      `json:"e,omitzero"`
	// Host is empty while the cell has no host: the next one that joins erases.
	Host ids.Host `json:"h"`
	// Session is the key that the generation had; empty: that of the tombstone.
	Session ids.SessionKey `json:"s,omitempty"`
	// Revision is kept free for the event that tells of the generation's end on
	// all hosts; 0: none will.
	Revision uint64 `json:"r,omitempty"`
	// Done: the host confirmed, or was removed. It stays listed until all have.
	Done bool `json:"d,omitempty"`
}

// Ref names the generation to be erased.
func (e Erasure) Ref(t *Tombstone) Ref {
	r := Ref{Session: e.Session, Generation: e.Generation, Epoch: e.Epoch}
	if r.Session == "" {
		r.Session = t.Key
	}
	return r
}

// Record is the stored outcome of one request. It never holds a grant.
type Record struct {
	Session    ids.SessionKey `json:"s"`
	Verb       Verb           `json:"v"`
	ID         ids.RequestID  `json:"r"`
	Hash       []byte         `json:"h,omitempty"`
	Done       bool           `json:"d,omitempty"`
	LeaderTime time.Duration  `json:"lt"`
	// The outcome.
	Generation   ids.Generation `json:"g,omitzero"`
	Epoch        ids.Epoch      `json:"e,omitzero"`
	Host         ids.Host       `json:"hst,omitempty"`
	State        corev1.State   `json:"st,omitempty"`
	Origin       corev1.Origin  `json:"o,omitempty"`
	RestoredAsOf Time           `json:"ra,omitempty"`
	BusySince    Time           `json:"bs,omitempty"`
	Failure      *Failure       `json:"f,omitempty"`
}

// Event waits in the outbox until the bus has it.
type Event struct {
	Seq          uint64         `json:"seq"`
	ID           string         `json:"id"`
	Kind         EventKind      `json:"kind"`
	At           Time           `json:"at"`
	Tenant       ids.Tenant     `json:"tenant,omitempty"`
	Session      ids.SessionKey `json:"session,omitempty"` // empty for an event of a host
	Generation   ids.Generation `json:"generation,omitzero"`
	Epoch        ids.Epoch      `json:"epoch,omitzero"`
	Revision     uint64         `json:"revision,omitempty"`
	State        corev1.State   `json:"state,omitempty"`
	Host         ids.Host       `json:"host,omitempty"`
	Reason       string         `json:"reason,omitempty"`
	Manifest     string         `json:"manifest,omitempty"`
	Snapshot     string         `json:"snapshot,omitempty"`
	Hosts        []ids.Host     `json:"hosts,omitempty"`
	Request      ids.RequestID  `json:"request,omitempty"`
	Origin       corev1.Origin  `json:"origin,omitempty"`
	RestoredAsOf Time           `json:"restored,omitempty"`
	Timing       Timing         `json:"timing,omitzero"`
	Name         string         `json:"name,omitempty"`
	Cause        corev1.Cause   `json:"cause,omitempty"`
	Actor        *Actor         `json:"actor,omitempty"`
	Terms        *Terms         `json:"terms,omitempty"`
	Decision     *Decision      `json:"decision,omitempty"` // of admitted
	Failure      *Failure       `json:"failure,omitempty"`
	RetryUntil   Time           `json:"retry_until,omitempty"`
	Plan         *Plan          `json:"plan,omitempty"`    // of placed
	From         ids.Host       `json:"from,omitempty"`    // of active: handed over from
	Handoff      bool           `json:"handoff,omitempty"` // of displaced: it wakes without being asked
	Boot         string         `json:"boot,omitempty"`
	Tiers        []corev1.Tier  `json:"tiers,omitempty"`
	Capacity     Limits         `json:"capacity,omitzero"`
}
