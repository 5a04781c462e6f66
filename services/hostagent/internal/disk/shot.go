package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// Before a disk is frozen it is synced so often, unless a round wrote less than this: what is left is
// written while the session waits.
const (
	syncRounds  = 3
	syncEnough  = 4 << 20
	sectorBytes = 512
	// thawSectors is what a freeze and thaw write by themselves: the superblock.
	thawSectors = 4096 / sectorBytes
)

// Shot is a still copy of a disk at one time. Its files stay readable until Release or until it is
// lost; nobody else may hold them longer.
type Shot struct {
	Key
	Epoch  ids.Epoch
	Parent string   // Record.Base at that time
	Image  *os.File // read-only
	// Base is the parent's clone, nil if it is not known here; BaseIndex is the parent's plain index.
	Base            *os.File
	BaseIndex       []byte
	Size            uint64
	ImageDigest     string
	TakenAt         time.Time
	CrashConsistent bool
	// VMWritten: a virtual machine wrote what it holds.
	VMWritten bool
	// Anew asks to store everything again: what the store has may be damaged.
	Anew bool
	// Sealed is true if the disk was taken away from the session: nothing is newer than this shot.
	Sealed bool
	// Frozen is how long writers were blocked.
	Frozen time.Duration

	attached ids.Epoch // what the record says, and must still say when the shot is proposed

	lost    chan struct{}
	written uint64 // of the loop device, when it was taken
	counted bool
	direct  bool // Image is the disk itself
	moved   bool // it was written to while it was copied

	allocated uint64

	mu     sync.Mutex
	isLost bool
	closed bool
}

// Lost is closed when the pool took the shot's space back, or the disk is used again: whoever reads
// it must stop, for what it reads now is worthless. Propose refuses such a shot.
func (sh *Shot) Lost() <-chan struct{} { return sh.lost }

// Allocated is what the still copy holds, in bytes.
func (sh *Shot) Allocated() uint64 { return sh.allocated }

func newShot(rec Record, epoch ids.Epoch) *Shot {
	return &Shot{
		Key: rec.Key(), Epoch: epoch, attached: rec.Attached, Parent: rec.Base, Anew: rec.Doubtful, Size: rec.Size, ImageDigest: rec.Image,
		VMWritten: rec.VMWritten,
		TakenAt:   time.Now().UTC(), lost: make(chan struct{}),
	}
}

// lose tells whoever reads the shot. Its files stay open for them until they release it: what they
// read is worthless, but it is nobody else's.
func (sh *Shot) lose() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if !sh.isLost && !sh.closed {
		sh.isLost = true
		close(sh.lost)
	}
}

// close closes the files. Idempotent.
func (sh *Shot) close() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.closed {
		return
	}
	sh.closed = true
	_ = sh.Image.Close()
	if sh.Base != nil {
		_ = sh.Base.Close()
	}
}

// over says that the shot was lost or released.
func (sh *Shot) over() bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return sh.isLost || sh.closed
}

// Shoot takes a still copy of an attached disk while the session goes on. Writers are blocked for the
// clone alone; if the file system does not freeze within 5 s the copy is taken all the same and is
// crash-consistent. One shot per disk at a time: Busy. Kinds: NotFound (not attached), StaleEpoch,
// Conflict (an earlier manifest is pending: CommitHead or Withdraw it), NoCapacity, Refused
// (ephemeral).
func (s *Store) Shoot(ctx context.Context, k Key, epoch ids.Epoch) (*Shot, error) {
	const op = "take a shot of the disk"
	defer s.lock(k)()
	rec, err := s.attachedRecord(op, k, epoch)
	if err != nil {
		return nil, err
	}
	if rec, err = s.sealable(op, rec.activated(epoch), epoch); err != nil {
		return nil, err
	}
	if err := s.shootable(op, rec); err != nil {
		return nil, err
	}
	end, err := s.allowClone(op, k)
	if err != nil {
		return nil, err
	}
	defer end()
	sh := newShot(rec, epoch)
	if err := s.still(ctx, sh, s.file(k, shotImageName)); err != nil {
		return nil, errs.E(op, kindOf(err), k.String(), err)
	}
	s.hand(sh, rec)
	return sh, nil
}

// shootable refuses what could not be committed anyway.
func (s *Store) shootable(op string, rec Record) error {
	k := rec.Key()
	s.mu.Lock()
	running, frozen := s.shots[k], s.frozen[k] != nil
	s.mu.Unlock()
	switch {
	case rec.Ephemeral:
		return errs.E(op, errkind.Refused, k.String(), "an ephemeral session has no snapshots")
	case rec.Pending.ID != "":
		return errs.E(op, errkind.Conflict, k.String(), "the manifest "+rec.Pending.ID+" is pending: commit or withdraw it first")
	case running != nil:
		return errs.E(op, errkind.Busy, k.String(), "another shot of the disk is not released yet")
	case frozen:
		return errs.E(op, errkind.NoCapacity, k.String(), "the disk is frozen until the pool has room")
	}
	return nil
}

// still copies the frozen image to path and opens it as the shot's image. After an error nothing is
// left, and in any case nothing stays frozen.
func (s *Store) still(ctx context.Context, sh *Shot, path string) (err error) {
	k := sh.Key
	image, err := os.Open(s.image(k))
	if err != nil {
		return err
	}
	defer func() { _ = image.Close() }()
	copied, err := os.OpenFile(path+making, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		_ = copied.Close()
		if err != nil {
			_ = discard(path + making)
		}
	}()
	if err := s.settle(ctx, k); err != nil {
		return err
	}
	mirror, err := s.follow(ctx, k, copied, image)
	if err != nil {
		return err
	}
	if err := s.copyFrozen(ctx, sh, mirror, copied, image); err != nil {
		return err
	}
	if sh.moved && mirror != nil {
		// Ranges that were cloned one by one while the session wrote are of no one moment; a whole
		// clone is.
		if err := s.copyAgain(ctx, sh, copied, image); err != nil {
			return err
		}
	}
	if err := copied.Sync(); err != nil {
		return fmt.Errorf("sync clone: %w", err)
	}
	if err := s.at("shot.synced"); err != nil {
		return err
	}
	if err := os.Rename(path+making, path); err != nil {
		return err
	}
	if sh.Image, err = os.Open(path); err != nil {
		return errors.Join(err, discard(path))
	}
	return s.at("shot.named")
}

// copyFrozen is the part for which writers wait. Where a mirror follows the image, only what changed
// is cloned; if it says that the shot is crash-consistent the mirror may be a mixture.
func (s *Store) copyFrozen(ctx context.Context, sh *Shot, mirror *extents.Mirror, to, from *os.File) (err error) {
	patience := s.freezeTime
	if s.handed(sh.Key) {
		patience *= 2 // the guest is asked first, then the machine is paused
	}
	h, frozen, err := s.freeze(sh.Key, patience, false)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, h.thaw())
		sh.Frozen = time.Since(h.began)
		sh.moved = !frozen || !h.held()
		sh.CrashConsistent = sh.moved || h.unwritten()
	}()
	if !frozen {
		s.log.Warn("the disk did not freeze in time; the snapshot is crash-consistent", "session", sh.Session, "after", patience)
	}
	if err := s.at("shot.frozen"); err != nil {
		return err
	}
	if err := s.bearable(sh.Key); err != nil {
		return err
	}
	sh.TakenAt = time.Now().UTC()
	sh.written, sh.counted = s.writtenTo(sh.Key)
	switch {
	case mirror == nil:
		err = s.copyImage(ctx, to, from)
	case frozen:
		_, err = mirror.Update(ctx)
	}
	if err != nil {
		return err
	}
	return s.at("shot.cloned")
}

// copyAgain replaces the copy of a disk that did not stay frozen by one of one moment.
func (s *Store) copyAgain(ctx context.Context, sh *Shot, to, from *os.File) error {
	sh.TakenAt = time.Now().UTC()
	sh.written, sh.counted = s.writtenTo(sh.Key)
	if err := to.Truncate(0); err != nil {
		return err
	}
	if err := s.copyImage(ctx, to, from); err != nil {
		return err
	}
	return s.at("shot.again")
}

// copyImage clones where the pool can. Elsewhere it reads all that is allocated, and the session
// waits for it.
func (s *Store) copyImage(ctx context.Context, to, from *os.File) error {
	if s.reflink {
		return extents.Clone(to, from)
	}
	s.slow.Do(func() {
		s.log.Warn("the disk pool cannot clone files: snapshots copy whole disks, and sessions wait for it", "dir", s.dir)
	})
	return extents.CopySparse(ctx, to, from)
}

// settle writes what is in memory while the session goes on, until little is left.
func (s *Store) settle(ctx context.Context, k Key) error {
	for range syncRounds {
		before, ok := s.writtenTo(k)
		if err := s.writeOut(k); err != nil {
			return err
		}
		after, _ := s.writtenTo(k)
		if !ok || (after-before)*sectorBytes < syncEnough {
			break
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return s.at("shot.settled")
}

// hand gives out a shot whose image is open.
func (s *Store) hand(sh *Shot, rec Record) {
	sh.Base, sh.BaseIndex = s.openBase(rec)
	var st unix.Stat_t
	if err := unix.Fstat(int(sh.Image.Fd()), &st); err == nil {
		sh.allocated = uint64(st.Blocks) * sectorBytes
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shots[sh.Key] = sh
}

// Release gives up a shot, or closes the files of one that was proposed: its manifest stays pending.
// Idempotent.
func (s *Store) Release(sh *Shot) error {
	const op = "release shot"
	if sh == nil {
		return nil
	}
	defer s.lock(sh.Key)()
	sh.close()
	return errs.Wrap(op, sh.String(), s.endShot(sh))
}

// endShot removes the clone of a shot that is over, unless it is a pending manifest's. The caller has
// the lock of its key.
func (s *Store) endShot(sh *Shot) error {
	s.mu.Lock()
	current := s.shots[sh.Key] == sh
	if current {
		delete(s.shots, sh.Key)
	}
	s.mu.Unlock()
	if !current || sh.direct {
		return nil
	}
	rec, err := s.load(sh.Key)
	if errs.Is(err, errkind.NotFound) {
		return nil // deleted meanwhile
	}
	if err == nil && rec.Pending.ID != "" && s.reflink {
		return nil
	}
	return s.dropClone(sh.Key, shotImageName)
}

// lose ends the shot of a disk that is about to be used otherwise. The caller has the lock of k.
func (s *Store) lose(k Key) error {
	s.mu.Lock()
	sh := s.shots[k]
	s.mu.Unlock()
	if sh == nil {
		return nil
	}
	sh.lose()
	return s.endShot(sh)
}

// Dirty reports whether a disk may have been written to since the last committed shot, or since it
// was attached without unsaved files. It writes what is in memory first, so that the answer is
// certain for everything before the call. After a restart of this process the answer is true until
// the next commit. NotFound if the disk is not attached.
func (s *Store) Dirty(k Key) (bool, error) {
	const op = "look for changes of the disk"
	s.counted(k)
	defer s.lock(k)()
	if !s.isActive(k) {
		return false, errs.E(op, errkind.NotFound, k.String(), "the disk is not attached")
	}
	s.mu.Lock()
	frozen := s.frozen[k] != nil
	saved, known := s.saved[k]
	s.mu.Unlock()
	if s.handed(k) {
		return s.rawDirty(op, k)
	}
	if !known || frozen {
		return true, nil
	}
	if err := syncMount(s.mountPoint(k)); err != nil {
		return true, errs.E(op, kindOf(err), k.String(), err)
	}
	now, ok := s.writtenTo(k)
	return !ok || now > saved+thawSectors || now < saved, nil
}

// writtenTo counts the sectors written to the loop device of an attached disk.
func (s *Store) writtenTo(k Key) (sectors uint64, ok bool) {
	s.mu.Lock()
	dev := s.active[k].device
	s.mu.Unlock()
	if dev == "" {
		return 0, false
	}
	n, err := loopdev.Written(dev)
	return n, err == nil
}

// remember notes what was written until a committed shot, or until nothing was written yet.
func (s *Store) remember(k Key, sectors uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.saved, k)
	if ok {
		s.saved[k] = sectors
	}
}
