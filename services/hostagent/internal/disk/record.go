package disk

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Format is the version of the disk format that this package writes and reads.
const Format = 1

// Key names one disk: a session in one generation.
type Key struct {
	Session    ids.SessionKey
	Generation ids.Generation
}

func (k Key) String() string { return k.Session.String() + "." + k.Generation.String() }

// parseKey reads the name of a disk's folder.
func parseKey(s string) (Key, error) {
	session, generation, ok := strings.Cut(s, ".")
	if !ok {
		return Key{}, fmt.Errorf("%q is not <session>.<generation>", s)
	}
	k, err := ids.ParseSessionKey(session)
	if err != nil {
		return Key{}, err
	}
	g, err := ids.ParseGeneration(generation)
	return Key{k, g}, err
}

// State says what the image holds against the session's manifests.
type State string

const (
	// Blank: formatted, never active.
	Blank State = "blank"
	// Dirty: written to since its base manifest, by Record.Epoch.
	Dirty State = "dirty"
	// Clean: exactly the manifest Record.Base.
	Clean State = "clean"
)

// Record is what this host knows of one image; it is fsynced before what it says becomes true.
type Record struct {
	Format     int            `json:"format"`
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	State      State          `json:"state"`
	// Epoch is the last one whose writes the image holds; zero while blank.
	Epoch ids.Epoch `json:"epoch"`
	// Attached is the epoch that the image was last attached for. Until Activate the session has
	// written nothing in it, so the image stands for this epoch as well as for Epoch.
	Attached ids.Epoch `json:"attached"`
	// Base is the manifest that the image began from, or equals while clean; empty if none.
	Base      string `json:"base,omitempty"`
	Size      uint64 `json:"size"`
	Image     string `json:"image"`
	Ephemeral bool   `json:"ephemeral,omitempty"`
	// VMWritten is sticky: the host never mounts such an image again.
	VMWritten bool `json:"vm_written,omitempty"`
	// Raw: the image was handed to a virtual machine, which may still write it.
	Raw bool `json:"raw,omitempty"`
	// Pending is a manifest of this image that may have become the session's head.
	Pending Pending `json:"pending,omitzero"`
	// AsOf is when the files were as they are, of an image that came from the store and that no session
	// has written to since.
	AsOf time.Time `json:"as_of,omitzero"`
	// Doubtful: a verification found that the store lacks part of what this image may hold. It is not
	// evicted, and the next snapshot stores everything again.
	Doubtful bool `json:"doubtful,omitempty"`
	// Slept is when the disk was last found clean, for the choice of what to evict.
	Slept time.Time `json:"slept,omitzero"`
}

// Pending is a manifest that was proposed and of which this host does not know yet whether it was
// committed. Its parent is Record.Base.
type Pending struct {
	ID    string    `json:"id"`
	Epoch ids.Epoch `json:"epoch"`
	// Sealed is true if the image has not been written since.
	Sealed          bool      `json:"sealed,omitempty"`
	TakenAt         time.Time `json:"taken_at"`
	Allocated       uint64    `json:"allocated"`
	CrashConsistent bool      `json:"crash_consistent,omitempty"`
	// Anew is true if it leans on nothing that was stored before.
	Anew bool `json:"anew,omitempty"`
}

// Key returns the record's key.
func (r Record) Key() Key { return Key{r.Session, r.Generation} }

// Usable decides whether a local image is the session's newest disk: equal to the head of the
// manifests, or dirty by the epoch that was the last ever active and grown from the head. Everything
// else is stale; a head that moved to an earlier time makes every local image stale.
func (r Record) Usable(head string, lastActive ids.Epoch) bool {
	stands := !lastActive.IsZero() && (r.Epoch == lastActive || r.Attached == lastActive)
	proposed := head != "" && r.Pending.ID == head
	switch r.State {
	case Clean:
		return r.Base != "" && r.Base == head
	case Dirty:
		return proposed && r.Pending.Sealed || stands && (proposed || r.Base == head)
	case Blank:
		return head == "" && r.Attached == lastActive && !lastActive.IsZero()
	}
	return false
}

// Savable reports whether an image that is at rest is the head, or may become the head in epoch. A dirty
// image has to be of the epoch that was last active, unless the scheduler is of a version that does not
// say which epoch that is. A blank image is saved too: a session that was active and wrote nothing has no
// other disk.
func (r Record) Savable(epoch ids.Epoch, head string, lastActive ids.Epoch) bool {
	switch {
	case r.Ephemeral || r.Attached.Compare(epoch) > 0:
		return false
	case r.State == Clean: // the session was awake and wrote nothing, which is the answer
		return r.Base != "" && r.Base == head
	case r.State == Dirty && lastActive.IsZero():
		return r.Base == head || r.Pending.ID != "" && r.Pending.ID == head
	}
	return r.Usable(head, lastActive)
}

// committed returns the record once the pending manifest is the head.
func (r Record) committed(now time.Time) Record {
	r.Base = r.Pending.ID
	r.Doubtful = r.Doubtful && !r.Pending.Anew
	if r.Pending.Sealed {
		r.State, r.Slept = Clean, now.UTC().Truncate(time.Second)
	}
	r.Pending = Pending{}
	return r
}

// attachedFor returns the record of an image that is being attached for w; the image was found
// usable (or blank for a fresh session). A manifest that is still pending will never be the head:
// it belongs to an epoch that has ended.
func (r Record) attachedFor(w Want) Record {
	r.Pending = Pending{}
	r.Size = max(r.Size, w.Size)
	if !w.LastActive.IsZero() && r.State != Clean {
		r.State, r.Epoch = Dirty, w.LastActive
	}
	r.Attached = w.Epoch
	return r
}

// activated returns the record once the session may write in epoch.
func (r Record) activated(epoch ids.Epoch) Record {
	r.State, r.Epoch, r.Attached, r.AsOf = Dirty, epoch, epoch, time.Time{}
	return r
}

// void returns the record of an image that is being replaced: whatever is there is never used.
func (r Record) void() Record {
	r.State, r.Base, r.Epoch, r.Attached, r.Pending, r.Raw = Dirty, "", ids.Epoch{}, ids.Epoch{}, Pending{}, false
	return r
}

// Manifest names a disk at one time.
type Manifest struct {
	ID         string
	Session    ids.SessionKey
	Generation ids.Generation
	Epoch      ids.Epoch
	Parent     string
	Image      string
	Size       uint64
	Allocated  uint64
	TakenAt    time.Time
	// CrashConsistent is true if writers could not be stopped while it was taken.
	CrashConsistent bool
	// VMWritten: as of the record.
	VMWritten bool
}

const (
	recordName = "record.json"
	imageName  = "disk.img"
)

func (s *Store) folder(k Key) string     { return filepath.Join(s.dir, "sessions", k.String()) }
func (s *Store) image(k Key) string      { return filepath.Join(s.folder(k), imageName) }
func (s *Store) mountPoint(k Key) string { return filepath.Join(s.dir, "mnt", k.String()) }

func (s *Store) save(r Record) error {
	return writeRecord(filepath.Join(s.folder(r.Key()), recordName), r, s.at)
}

// load reads a record; a NotFound error means that there is none.
func (s *Store) load(k Key) (Record, error) {
	const op = "read disk record"
	b, err := os.ReadFile(filepath.Join(s.folder(k), recordName))
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, errs.E(op, errkind.NotFound, k.String(), "this host has no disk of the session")
	}
	if err != nil {
		return Record{}, errs.E(op, errkind.Internal, k.String(), err)
	}
	var r Record
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&r); err != nil {
		return Record{}, errs.E(op, errkind.DataLoss, k.String(), err)
	}
	if r.Format != Format || r.Key() != k {
		return Record{}, errs.Errorf(op, errkind.DataLoss, "the record of %s says format %d and disk %s", k, r.Format, r.Key())
	}
	return r, nil
}
