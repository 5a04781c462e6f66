// Package disk keeps the disks of the sessions of one host: one sparse ext4 image each, whose size
// is the quota, attached by loop device and used as the upper layer of the session's root.
//
// It guarantees that an image is handed out only if it is provably the session's newest disk (or a
// blank one for a session that never ran); that every statement of a record is on stable storage
// before it becomes true; that no image is mounted twice; that a disk which was frozen for a shot is
// thawed whatever happens; that an image is evicted only if a store has exactly what it holds; that
// the pool cannot run out of space under a loop device: sessions and clones are admitted against all
// that they may ever take, and if others fill the pool, clones are dropped and then writers stopped;
// and that a crash at any point leaves nothing that the next Open or a Sweep does not find.
package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Sizes of an image in bytes.
const (
	MinSize  = 16 << 20
	MaxSize  = 16 << 40
	SizeUnit = 4096
)

// How long an image may stay bound after its unmount: until other mount tables are looked at, and
// until it counts as busy.
const (
	loopReclaim = 300 * time.Millisecond
	loopGrace   = 5 * time.Second
)

// Config of a store.
type Config struct {
	// Dir holds everything: images, blanks and mount points.
	Dir string
	// Reserve is kept free in the pool beyond the promises made to active sessions, in bytes: clones
	// live from it while the sessions go on.
	Reserve uint64
	// Blanks kept ready per size; see Blanks.
	Blanks Blanks
	// Outer is a folder whose free space also bounds the pool, empty if there is none: that of a pool
	// in a sparse file.
	Outer string
	// Reflink says that files in Dir can be cloned; see extents.Usable.
	Reflink bool
	// HighWater is the share of the pool above which images of sleeping sessions are evicted, if their
	// manifest went through a store; 0 means DefaultHighWater.
	HighWater float64
	// Frozen is told when the writers of a disk are stopped because the pool is full, with a reason
	// for a person; Thawed when they go on. They are called one after another, in order. Nil: nobody.
	Frozen func(k Key, reason string)
	Thawed func(k Key)
	// MarkFrozen notes outside of this process that a mount is about to be frozen, so that somebody
	// thaws it if this process dies; unmark takes the note back. Nil: the next Open thaws.
	MarkFrozen func(k Key, mountpoint string) (unmark func(), err error)
	Log        *slog.Logger
}

// Want asks for the disk of one wake.
type Want struct {
	Key
	// Epoch of this wake.
	Epoch ids.Epoch
	// Head of the session's manifests, empty if it never slept.
	Head string
	// LastActive is the last epoch that was ever active, zero if none.
	LastActive ids.Epoch
	// Fresh is true for the first wake of a generation: only then a blank disk is handed out.
	Fresh bool
	// Size of a fresh disk in bytes; an existing one that is smaller grows if the pool has room.
	Size uint64
	// Image is the digest that a fresh disk is pinned to.
	Image     string
	Ephemeral bool
	// Raw asks for the image file instead of a mount, for a virtual machine that writes it itself.
	Raw bool
}

// Attachment is a disk in use. Root is where it is mounted on the host; it holds the folders Upper and
// Work, and is entered with Beneath alone. Of a raw disk Root is empty and File is the image, which a
// virtual machine opens; Upper and Work lie in it.
type Attachment struct {
	Record
	Root string
	File string
	// Created is true if the disk holds nothing of the session yet.
	Created bool
	Steps   []steps.Time
}

// Folders of a disk.
const (
	Upper = "upper"
	Work  = "work"
)

// Store is safe for concurrent use; calls for one key wait for each other.
type Store struct {
	dir     string
	outer   string
	reserve uint64
	reflink bool
	// highWater, onFrozen, onThawed, markFrozen as in Config.
	highWater  float64
	onFrozen   func(Key, string)
	onThawed   func(Key)
	markFrozen func(Key, string) (func(), error)
	log        *slog.Logger
	run        steps.Runner
	fault      func(step string) error
	freezeFile func(*os.File) error
	freezeTime time.Duration
	slow       sync.Once

	blanks *blanks
	minder *minder
	room   sync.Mutex // held while space is given away; before mu, and after the lock of a key
	mu     sync.Mutex // of all below
	busy   map[Key]*sync.Mutex
	// active has the disks that are attached, also those being attached or restored.
	active    map[Key]mounting
	shots     map[Key]*Shot
	views     map[Key]*View
	restoring map[Key]bool
	cloning   map[Key]bool   // a clone of an attached disk is about to be made
	holds     map[Key]*hold  // the last freeze of each disk
	frozen    map[Key]*hold  // disks that are frozen for the pool's sake
	ending    map[Key]bool   // attached disks whose session is being stopped
	saved     map[Key]uint64 // what was written to the loop device until the last committed shot
	counting  map[Key]chan struct{}
	counts    sync.WaitGroup
	notices   []func() // that were not told yet
	telling   bool
}

// Open makes or reopens the store in cfg.Dir and begins to make blanks. Disks that an earlier
// process left mounted stay attached.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	return open(ctx, cfg, nil)
}

func open(ctx context.Context, cfg Config, fault func(string) error) (*Store, error) {
	const op = "open disk store"
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, errs.E(op, errkind.Invalid, cfg.Dir, err)
	}
	s := &Store{
		dir: dir, outer: cfg.Outer, reserve: cfg.Reserve, reflink: cfg.Reflink, highWater: cfg.HighWater,
		onFrozen: cfg.Frozen, onThawed: cfg.Thawed, markFrozen: cfg.MarkFrozen,
		log: cfg.Log, fault: fault, freezeFile: freezeFile, freezeTime: freezeTime,
		busy: map[Key]*sync.Mutex{}, active: map[Key]mounting{}, shots: map[Key]*Shot{}, views: map[Key]*View{},
		restoring: map[Key]bool{}, cloning: map[Key]bool{}, holds: map[Key]*hold{}, frozen: map[Key]*hold{}, ending: map[Key]bool{}, saved: map[Key]uint64{}, counting: map[Key]chan struct{}{},
	}
	if s.highWater <= 0 || s.highWater > 1 {
		s.highWater = DefaultHighWater
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.run.Fault = fault
	for _, d := range []string{"sessions", "blanks", "mnt", "views"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, errs.E(op, errkind.Internal, dir, err)
		}
	}
	if err := mounts.Share(filepath.Join(dir, "mnt")); err != nil {
		return nil, errs.E(op, errkind.Internal, dir, err)
	}
	if err := s.adopt(); err != nil {
		return nil, errs.E(op, errkind.Internal, dir, err)
	}
	s.blanks = newBlanks(ctx, s, cfg.Blanks)
	s.minder = startMinder(ctx, s)
	return s, nil
}

// adopt takes the disks that are still mounted as attached, and removes what an earlier process was
// making.
func (s *Store) adopt() error {
	inv, err := s.inventory()
	if err != nil {
		return err
	}
	for _, d := range inv.Disks {
		if err := s.adoptRaw(d); err != nil {
			return err
		}
		if d.Mounted && !d.Raw {
			// An earlier process may have died in a shot.
			if err := freezeMount(s.mountPoint(d.ID), false); err != nil {
				return err
			}
			s.active[d.ID] = mounting{size: d.Size, image: s.image(d.ID), device: d.Device}
		}
		if d.Broken != "" {
			continue
		}
		if err := s.tidyFolder(d.Record); err != nil {
			return err
		}
	}
	return s.tidyViews()
}

// Close ends the making of blanks. Attached disks stay attached for the next Open.
func (s *Store) Close() error {
	s.blanks.close()
	s.minder.close()
	s.counts.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.active) > 0 {
		return nil
	}
	return mounts.Unshare(filepath.Join(s.dir, "mnt"))
}

// lock serialises the calls for one key.
func (s *Store) lock(k Key) func() {
	s.mu.Lock()
	m := s.keyLock(k)
	s.mu.Unlock()
	m.Lock()
	return m.Unlock
}

func (s *Store) keyLock(k Key) *sync.Mutex {
	m := s.busy[k]
	if m == nil {
		m = &sync.Mutex{}
		s.busy[k] = m
	}
	return m
}

func (s *Store) at(step string) error {
	if s.fault == nil {
		return nil
	}
	return s.fault(step)
}

func (s *Store) isActive(k Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.active[k]
	return ok
}

func (s *Store) device(k Key) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active[k].device
}

func (w Want) check() error {
	const op = "attach disk"
	if _, err := ids.ParseSessionKey(string(w.Session)); err != nil {
		return errs.E(op, errkind.Invalid, "", err)
	}
	if w.Generation.IsZero() || w.Epoch.IsZero() {
		return errs.E(op, errkind.Invalid, w.Key.String(), "generation and epoch must be given")
	}
	if !w.Fresh {
		if w.Size == 0 {
			return nil
		}
		return checkSize(w.Size)
	}
	if w.Head != "" || !w.LastActive.IsZero() {
		return errs.E(op, errkind.Invalid, w.Key.String(), "a session that slept or was active is not fresh")
	}
	if w.Image == "" {
		return errs.E(op, errkind.Invalid, w.Key.String(), "a fresh disk needs the digest of its image")
	}
	return checkSize(w.Size)
}

func checkSize(size uint64) error {
	if size < MinSize || size > MaxSize || size%SizeUnit != 0 {
		return errs.Errorf("attach disk", errkind.Invalid,
			"disk size %d must be a multiple of %d between %d and %d bytes", size, SizeUnit, MinSize, MaxSize)
	}
	return nil
}

// find loads the record that w may use, or makes up the one of a fresh disk (exists is false then).
func (s *Store) find(w Want) (rec Record, exists bool, err error) {
	const op = "attach disk"
	rec, err = s.load(w.Key)
	switch {
	case errs.Is(err, errkind.NotFound) && w.Fresh:
		return Record{
			Format: Format, Session: w.Session, Generation: w.Generation, State: Blank,
			Size: w.Size, Image: w.Image, Ephemeral: w.Ephemeral,
		}, false, nil
	case err != nil:
		return rec, false, err
	case w.Fresh && rec.State != Blank:
		return rec, true, errs.E(op, errkind.Conflict, w.Key.String(),
			"asked for a fresh disk, but this generation was already active here")
	case !w.Fresh && !rec.Usable(w.Head, w.LastActive):
		return rec, true, errs.Errorf(op, errkind.StaleEpoch,
			"the local disk %s (%s, epoch %s, base %q) is not the newest: head %q, last active %s",
			w.Key, rec.State, rec.Epoch, rec.Base, w.Head, w.LastActive)
	case rec.VMWritten && !w.Raw: // of what is stale, the store has another one
		return rec, true, errs.E(op, errkind.Refused, w.Key.String(), errkind.VMWritten+"; it wakes in a virtual machine only")
	}
	if _, err := os.Lstat(s.image(w.Key)); errors.Is(err, fs.ErrNotExist) {
		return rec, true, errs.E(op, errkind.DataLoss, w.Key.String(), "the record is there but the image is not")
	}
	return rec, true, nil
}

// List returns everything that the store finds, owned or not.
func (s *Store) List() (Inventory, error) {
	inv, err := s.inventory()
	if err != nil {
		return inv, errs.E("list disks", errkind.Internal, s.dir, err)
	}
	return inv, nil
}

// Get returns the record of one disk; NotFound if this host has none.
func (s *Store) Get(k Key) (Record, error) {
	return s.load(k)
}

func fmtBytes(n uint64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
