package core

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// EntryVersion is the newest format of entries that this code reads. An entry
// is applied by the rules of its own format, so that a log that an older
// version wrote comes to the state that it had then. A change of a rule needs a
// new format: replicas of the version before apply the same entries.
const EntryVersion = 7

// OldestWritten is the oldest format in which this code writes entries: that of
// the version before, which may run in the same group.
const OldestWritten = EntryVersion - 1

// movesSince is the format since which a saved session may wake on another
// host, and erased is told once all of them confirmed.
const movesSince = 2

// handoffSince is the format since which what was awake on a lost host wakes
// elsewhere from its last manifest.
const handoffSince = 3

// vmSince is the format since which a session whose disk a virtual machine
// wrote wakes only in tiers with a kernel of their own.
const vmSince = 4

// poolSince is the format since which a placement carries what the pool said
// of it: a reservation, or that the session is to start cold. Since then also, a
// repeated close is recognised under every key of its session, and the actor
// names who acts for the user.
const poolSince = 5

// eraserSince is the format since which a deleted session that no host has is
// erased from the store by any host.
const eraserSince = 6

// waitsSince is the format since which the erasure of a deleted session waits
// for a host to join if the cell has none.
const waitsSince = 7

// Entry is one entry of the replicated log: exactly one of its parts is set.
// Now is the leader's wall clock when it proposed the entry.
type Entry struct {
	V   int  `json:"v"`
	Now Time `json:"now"`

	Open         *Open         `json:"open,omitempty"`
	Place        *Place        `json:"place,omitempty"`
	Woke         *Woke         `json:"woke,omitempty"`
	WakeFailed   *WakeFailed   `json:"wake_failed,omitempty"`
	Sleep        *SleepCmd     `json:"sleep,omitempty"`
	Slept        *Slept        `json:"slept,omitempty"`
	SleepRefused *SleepRefused `json:"sleep_refused,omitempty"`
	Delete       *Delete       `json:"delete,omitempty"`
	Removed      *Removed      `json:"removed,omitempty"`
	Stopped      *Ref          `json:"stopped,omitempty"`
	Exited       *Exited       `json:"exited,omitempty"`
	Delayed      *Delayed      `json:"delayed,omitempty"`
	Manifest     *ManifestCmd  `json:"manifest,omitempty"`
	Restore      *Restore      `json:"restore,omitempty"`
	Join         *Host         `json:"join,omitempty"`
	HostLost     *HostLost     `json:"host_lost,omitempty"`
	Drain        *Drain        `json:"drain,omitempty"`
	Move         *Move         `json:"move,omitempty"`
	Save         *Save         `json:"save,omitempty"`
	Dropped      *Dropped      `json:"dropped,omitempty"`
	Cleared      *Cleared      `json:"cleared,omitempty"`
	RemoveHost   *RemoveHost   `json:"remove_host,omitempty"`
	Trim         *Trim         `json:"trim,omitempty"`
	Tick         *Tick         `json:"tick,omitempty"`
	Incarnate    *Incarnate    `json:"incarnate,omitempty"`
	Raise        *Raise        `json:"raise,omitempty"`
}

// Name is the entry's event, as transitions name it.
func (e Entry) Name() string {
	for _, part := range []struct {
		set  bool
		name string
	}{
		{e.Open != nil, "open"}, {e.Place != nil, "place"}, {e.Woke != nil, "woke"}, {e.WakeFailed != nil, "wake_failed"},
		{e.Sleep != nil, "sleep"}, {e.Slept != nil, "slept"}, {e.SleepRefused != nil, "sleep_refused"}, {e.Delete != nil, "delete"},
		{e.Removed != nil, "removed"}, {e.Stopped != nil, "stopped"}, {e.Exited != nil, "exited"}, {e.Manifest != nil, "manifest"},
		{e.Restore != nil, "restore"}, {e.Delayed != nil, "sleep_delayed"},
		{e.Join != nil, "join"}, {e.HostLost != nil, "host_lost"}, {e.Drain != nil, "drain"}, {e.Move != nil, "move"},
		{e.Save != nil, "save"}, {e.Dropped != nil, "dropped"}, {e.Cleared != nil, "cleared"}, {e.RemoveHost != nil, "remove_host"},
		{e.Trim != nil, "trim"},
		{e.Tick != nil, "tick"}, {e.Incarnate != nil, "incarnate"}, {e.Raise != nil, "raise"},
	} {
		if part.set {
			return part.name
		}
	}
	return "none"
}

// Encode writes an entry in format V, or in the newest one if V is 0.
func (e Entry) Encode() ([]byte, error) {
	e.V = cmp.Or(e.V, EntryVersion)
	return json.Marshal(e)
}

// DecodeEntry reads an entry; it refuses one of a newer format.
func DecodeEntry(b []byte) (Entry, error) {
	var e Entry
	if err := json.Unmarshal(b, &e); err != nil {
		return e, fmt.Errorf("decode log entry: %w", err)
	}
	if e.V < 1 || e.V > EntryVersion {
		return e, NewerFormat{"log entry", e.V, EntryVersion}
	}
	return e, nil
}

// NewerFormat is the error of an entry or a snapshot that a newer version wrote.
type NewerFormat struct {
	What          string
	Format, Reads int
}

func (e NewerFormat) Error() string {
	return fmt.Sprintf("%s has format %d, this version reads up to %d; start the version that wrote it", e.What, e.Format, e.Reads)
}

// Ref names one incarnation of a session exactly.
type Ref struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch,omitzero"`
}

// Open asks for a session to be active.
type Open struct {
	Actor    Actor            `json:"actor"`
	Terms    Terms            `json:"terms"`
	Request  ids.RequestID    `json:"request"`
	Hash     []byte           `json:"hash,omitempty"`
	StoredAt Time             `json:"stored_at"`
	Deadline Time             `json:"deadline"`
	Cause    corev1.Cause     `json:"cause,omitempty"`
	Name     string           `json:"name,omitempty"`
	Keys     []ids.SessionKey `json:"keys"`
	// Decision says why these terms name that tier; nil: nobody said.
	Decision *Decision `json:"decision,omitempty"`
	// Candidates are what Rank gave; Alive is what older formats had instead.
	Candidates []Candidate `json:"candidates,omitempty"`
	Alive      []ids.Host  `json:"alive,omitempty"`
}

// Place retries the placement of a session whose open waits, or gives it up.
type Place struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Candidates []Candidate    `json:"candidates,omitempty"`
	Alive      []ids.Host     `json:"alive,omitempty"`
	// Why it does not get on, told to the requests when they are given up.
	Why string `json:"why,omitempty"`
}

// Woke tells that the guest answered in this epoch.
type Woke struct {
	Ref
	Origin       corev1.Origin `json:"origin,omitempty"`
	RestoredAsOf Time          `json:"restored,omitempty"`
	ImageDigest  string        `json:"image,omitempty"`
	Timing       Timing        `json:"timing,omitzero"`
}

// WakeFailed tells that the host could not; Retry asks for another placement.
type WakeFailed struct {
	Ref
	Failure Failure `json:"failure"`
	Retry   bool    `json:"retry,omitempty"`
	// VMWritten: the host has the disk, and a virtual machine wrote it.
	VMWritten  bool        `json:"vm_written,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`
	Alive      []ids.Host  `json:"alive,omitempty"`
}

// SleepCmd asks for a session to sleep. Generation and epoch, when set, must match.
type SleepCmd struct {
	Tenant     ids.Tenant       `json:"tenant,omitempty"`
	Keys       []ids.SessionKey `json:"keys"`
	Generation ids.Generation   `json:"generation,omitzero"`
	Epoch      ids.Epoch        `json:"epoch,omitzero"`
	IdleSince  Time             `json:"idle_since,omitempty"`
	Reason     string           `json:"reason,omitempty"`
	Request    ids.RequestID    `json:"request,omitempty"`
	Hash       []byte           `json:"hash,omitempty"`
	// Force: also when it is in use. Only of a drain at its deadline.
	Force bool `json:"force,omitempty"`
}

// ManifestInfo describes a committed disk.
type ManifestInfo struct {
	ID          string `json:"id,omitempty"`
	Parent      string `json:"parent,omitempty"`
	ImageDigest string `json:"image,omitempty"`
	// Snapshot whose content it brings back; empty: none.
	RestoredFrom string `json:"restored_from,omitempty"`
	// TakenAt is as of when the files are; 0: not known.
	TakenAt Time `json:"taken,omitempty"`
	// VMWritten: a virtual machine wrote the disk.
	VMWritten bool `json:"vm_written,omitempty"`
}

// Restore has the next wake bring back an earlier snapshot; the head itself
// takes that back.
type Restore struct {
	Tenant     ids.Tenant     `json:"tenant"`
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Head       string         `json:"head"` // as the caller saw it
	Snapshot   string         `json:"snapshot"`
	AsOf       Time           `json:"as_of,omitempty"`
}

// Slept tells that no compute is left and the manifest is safe.
type Slept struct {
	Ref
	Manifest ManifestInfo `json:"manifest,omitzero"`
	Timing   Timing       `json:"timing,omitzero"`
	// Gone: of a save, the host has no disk of it any more.
	Gone bool `json:"gone,omitempty"`
	// Until is how long a handoff that follows is tried.
	Until      Time        `json:"until,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`
	Alive      []ids.Host  `json:"alive,omitempty"`
}

// SleepRefused tells that the session is in use (or was taken back in time).
type SleepRefused struct {
	Ref
	BusySince Time `json:"busy_since,omitempty"`
}

// Delete asks for the end of a session, or, with Expire, for the end of its retention.
type Delete struct {
	Tenant   ids.Tenant       `json:"tenant,omitempty"`
	Keys     []ids.SessionKey `json:"keys"`
	Request  ids.RequestID    `json:"request,omitempty"`
	Hash     []byte           `json:"hash,omitempty"`
	StoredAt Time             `json:"stored_at,omitempty"`
	Expire   *Expire          `json:"expire,omitempty"`
}

// Expire carries the conditions under which retention may delete.
type Expire struct {
	Generation ids.Generation `json:"generation"`
	Revision   uint64         `json:"revision"`
	WarnOnly   bool           `json:"warn,omitempty"`
	// Monotonic leader time that must lie between warning and end.
	Notice time.Duration `json:"notice"`
	// More ends than this within an hour of leader time stop and alarm.
	MaxPerHour int `json:"max"`
}

// Removed tells that grants are dead and the key is destroyed, and that Hosts
// have nothing left of it; Erased, that the store has nothing left either.
type Removed struct {
	Ref
	Erased bool `json:"erased,omitempty"`
	// None: the host that had the newest disk.
	Hosts []ids.Host `json:"hosts,omitempty"`
}

// confirms reports whether h has nothing left; last is the newest disk's host.
func (r *Removed) confirms(h, last ids.Host) bool {
	return r.Erased && (slices.Contains(r.Hosts, h) || len(r.Hosts) == 0 && h == last)
}

// Exited tells that the compute is gone though nobody stopped it.
type Exited struct {
	Ref
	Host       ids.Host    `json:"host"`
	Reason     string      `json:"reason,omitempty"`
	Candidates []Candidate `json:"candidates,omitempty"`
	Alive      []ids.Host  `json:"alive,omitempty"`
}

// Delayed tells that no compute is left but that the disk cannot be saved yet; the sleep goes on.
type Delayed struct {
	Ref
	Reason string `json:"reason,omitempty"`
}

// ManifestCmd moves the head by compare-and-swap.
type ManifestCmd struct {
	Ref
	Host     ids.Host     `json:"host"`
	Manifest ManifestInfo `json:"manifest"`
	// Sealed: it was taken of a disk at rest, so that nothing is unsaved after it.
	Sealed bool `json:"sealed,omitempty"`
}

// HostLost tells that a host's lease ran out.
type HostLost struct {
	Host   ids.Host `json:"host"`
	Boot   string   `json:"boot"`
	Reason string   `json:"reason,omitempty"`
	// Until is how long what was awake there is tried to be woken elsewhere.
	Until Time `json:"until,omitempty"`
}

// Drain stops or resumes placement on a host.
type Drain struct {
	Host ids.Host `json:"host"`
	On   bool     `json:"on"`
	// Deadline at which awake sessions are put to sleep though they are busy.
	Deadline Time `json:"deadline,omitempty"`
}

// Move takes a sleeping session, all of which is saved, off its host: it wakes anywhere.
type Move struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Host       ids.Host       `json:"host"` // that it is on
}

// Save has the host save what a session at rest left unsaved on its disk.
type Save struct {
	Ref
	Host ids.Host `json:"host"`
}

// Dropped tells that a host removed a disk of which it is not the newest holder.
type Dropped struct {
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Host       ids.Host       `json:"host"`
	// Epoch as of which it was stale; zero: not known.
	Epoch ids.Epoch `json:"epoch,omitzero"`
}

// Cleared tells that a host has nothing running of an earlier epoch; see Left.
type Cleared struct {
	Ref           // epoch: that of the Left
	Host ids.Host `json:"host"`
}

// RemoveHost takes a host out for good.
type RemoveHost struct {
	Host ids.Host `json:"host"`
	// LoseUnsaved gives up what is on this host alone.
	LoseUnsaved bool `json:"lose_unsaved,omitempty"`
}

// Trim removes events up to and including a sequence number from the outbox.
type Trim struct {
	Upto uint64 `json:"upto"`
}

// Tick advances leader time by what the leader's monotonic clock measured.
type Tick struct {
	Elapsed time.Duration `json:"elapsed"`
}

// Incarnate raises the cell's incarnation, after a restore from a backup.
type Incarnate struct {
	Above uint32 `json:"above"`
}

// Raise changes no session. The leader proposes it as the first entry of a newer
// format, once every replica has reported that it reads that format.
type Raise struct{}

// Outcome is what applying an entry came to. A refusal changed nothing, but
// that a refused end of retention notes the announcement.
type Outcome struct {
	Refused *Failure
	Session *Session // as it is now
	Record  *Record  // of the request, settled or not
	Deleted bool     // the session is gone
	// Wait: nothing was decided; ask again when the session has changed.
	Wait      bool
	BusySince Time
	Events    int // emitted
	// Sessions that changed.
	Touched []ids.SessionKey
	// Of a removed host: sessions that go back to their last snapshot, and those
	// that have none and failed.
	Rewound, Lost []Ref
}

func refuse(kind errkind.Kind, format string, args ...any) Outcome {
	return Outcome{Refused: &Failure{Kind: kind, Reason: fmt.Sprintf(format, args...)}}
}
