package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// A raw disk is an image that a virtual machine writes itself. From the moment that one may have it the
// host looks at none of its bytes: it is cloned, compared by its block map, made longer, moved and
// removed as a file, and nothing of the host mounts, checks or reads it as a file system again.

// Writers are what writes a raw disk: the programs and the kernel of a virtual machine.
type Writers interface {
	// Still has everything written out and stops all writes until release, which whoever called owes
	// within seconds: the guest goes on by itself after a while. crashConsistent: it was stopped as it
	// was, with what it had in memory. It ends with ctx. An error of release says that it may have gone
	// on before.
	Still(ctx context.Context) (release func() error, crashConsistent bool, err error)
	// Pause stops all writes until release, for as long as that takes.
	Pause(ctx context.Context) (release func() error, err error)
}

// SetWriters says who can stop the writes to a raw disk; nil: nobody. Until then a shot is a whole clone
// of one moment, which is crash-consistent. NotFound if it is not attached, StaleEpoch, Invalid for a
// disk that the host mounts.
func (s *Store) SetWriters(k Key, epoch ids.Epoch, w Writers) error {
	const op = "name the writers of the disk"
	defer s.lock(k)()
	if _, err := s.attachedRecord(op, k, epoch); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.active[k]
	if !m.raw {
		return errs.E(op, errkind.Invalid, k.String(), "the host itself has it mounted")
	}
	m.writers = w
	s.active[k] = m
	return nil
}

// adoptRaw takes a raw disk of an earlier process as attached while a machine has it open for writing.
// Another one, of a machine that is gone or never came, is at rest.
func (s *Store) adoptRaw(d Disk) error {
	if !d.Raw || d.Broken != "" {
		return nil
	}
	err := s.unwritten(d.ID, 0)
	if err == nil {
		rec := d.Record
		rec.Raw = false
		return errors.Join(s.within(d.ID, rec.Size), s.save(rec))
	}
	if errors.Is(err, unix.EBUSY) {
		s.active[d.ID] = mounting{size: d.Size, image: s.image(d.ID), raw: true}
		return nil
	}
	return err
}

// handed says that the disk is attached and in the hands of a virtual machine.
func (s *Store) handed(k Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active[k].raw
}

func (s *Store) attachment(rec Record, created bool) Attachment {
	a := Attachment{Record: rec, Created: created}
	if rec.Raw {
		a.File = s.image(rec.Key())
	} else {
		a.Root = s.mountPoint(rec.Key())
	}
	return a
}

// rawTable lists the steps from a record (or nothing) to an image that a virtual machine may open, and
// the record as it is then. What the host alone wrote so far it mounts a last time: to replay a journal
// that a crash left, to grow the file system, and to see to the folders. A blank has all that.
func (s *Store) rawTable(old, next Record, exists, created bool) (steps.Table, Record) {
	k := next.Key()
	t := s.recordTable(old, next, exists)
	if exists && !old.VMWritten {
		t = append(t, []steps.Step{{
			Name: "disk.prepare",
			Do:   func(ctx context.Context) error { return s.prepare(ctx, next, created) },
			Undo: func(context.Context) error { return s.unmount(k) },
		}})
	}
	given := next
	given.Raw, given.VMWritten = true, true
	return append(t, []steps.Step{{
		Name: "disk.hand",
		Do:   func(context.Context) error { return s.give(given) },
		Undo: func(context.Context) error { // nobody was told of the file yet
			s.setRaw(k, false)
			return s.save(next)
		},
	}}), given
}

// prepare mounts an image that no virtual machine has seen, and takes the mount away again.
func (s *Store) prepare(ctx context.Context, rec Record, created bool) error {
	k := rec.Key()
	if err := s.mount(ctx, rec, created); err != nil {
		return err
	}
	if err := errors.Join(syncMount(s.mountPoint(k)), s.unmount(k)); err != nil {
		return err
	}
	return s.at("raw.prepared")
}

// give makes the image ready to be opened by a virtual machine, and records that one may have.
func (s *Store) give(rec Record) error {
	k := rec.Key()
	if err := s.unwritten(k, loopGrace); err != nil {
		return err
	}
	if err := errors.Join(s.within(k, rec.Size), s.stretch(k, rec.Size)); err != nil {
		return err
	}
	if err := syncFile(s.image(k)); err != nil {
		return err
	}
	if err := s.save(rec); err != nil {
		return err
	}
	s.setRaw(k, true)
	return s.at("raw.recorded")
}

func (s *Store) setRaw(k Key, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m, ok := s.active[k]; ok {
		m.device, m.raw, m.writers = "", on, nil
		s.active[k] = m
	}
}

// takeBack ends the use of a raw image. Busy while a machine still has it open for writing.
func (s *Store) takeBack(k Key) error {
	if err := s.unwritten(k, loopGrace); err != nil {
		return err
	}
	rec, err := s.load(k)
	if errs.Is(err, errkind.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.within(k, rec.Size); err != nil {
		return err
	}
	if err := s.at("raw.back"); err != nil {
		return err
	}
	rec.Raw = false
	return s.save(rec)
}

// within cuts an image off where its disk ends. No machine writes beyond, but what emulates one has the
// whole file open, and could make room for itself that nobody promised.
func (s *Store) within(k Key, size uint64) error {
	st, err := os.Stat(s.image(k))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at image: %w", err)
	}
	if uint64(st.Size()) <= size {
		return nil
	}
	s.log.Error("the image of a disk was larger than the disk: what emulates its machine may have been taken over",
		"session", k.Session, "image", st.Size(), "disk", size)
	if err := os.Truncate(s.image(k), int64(size)); err != nil {
		return fmt.Errorf("cut image off: %w", err)
	}
	return nil
}

// cutOff takes back what machines took of the pool beyond their disks, before others give up anything.
func (s *Store) cutOff() {
	s.mu.Lock()
	var keys []Key
	for k, m := range s.active {
		if m.raw {
			keys = append(keys, k)
		}
	}
	s.mu.Unlock()
	for _, k := range keys {
		s.tryLocked(k, func() bool { // it may grow at this moment
			rec, err := s.load(k)
			if err == nil {
				err = s.within(k, rec.Size)
			}
			if err != nil {
				s.log.Error("a machine's image may be larger than its disk", "session", k.Session, "error", err)
			}
			return err == nil
		})
	}
}

// unwritten waits until nobody has the image open for writing. The kernel gives a lease on a file only
// then.
func (s *Store) unwritten(k Key, grace time.Duration) error {
	f, err := os.Open(s.image(k))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open image: %w", err)
	}
	defer func() { _ = f.Close() }()
	deadline := time.Now().Add(grace)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		if err == nil {
			_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
			return err
		}
		if !errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("look for writers of the image: %w", err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the image is still open for writing%s: %w", openers(s.image(k)), unix.EBUSY)
		}
		time.Sleep(pause)
	}
}

// openers names the processes that have the file open, for the operator.
func openers(path string) string {
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	out, told := "", map[string]bool{}
	for _, fd := range fds {
		pid, _, _ := strings.Cut(strings.TrimPrefix(fd, "/proc/"), "/")
		if to, err := os.Readlink(fd); err != nil || to != path || told[pid] || pid == fmt.Sprint(os.Getpid()) {
			continue
		}
		told[pid] = true
		name, _ := os.ReadFile("/proc/" + pid + "/comm")
		out += fmt.Sprintf("; process %s (%s) has it", pid, strings.TrimSpace(string(name)))
	}
	return out
}

// holdGuest prepares the stop of a machine that writes a raw disk. For a shot the guest is asked, and a
// guest whose writes nobody can stop is cloned all the same where a clone is of one moment. full: until
// the pool has room; a guest that was asked would go on by itself.
func (s *Store) holdGuest(k Key, patience time.Duration, full bool) (*hold, error) {
	s.mu.Lock()
	w := s.active[k].writers
	s.mu.Unlock()
	if w == nil && (full || !s.reflink) {
		return nil, errs.E("freeze disk", errkind.Unavailable, k.String(), "nobody can stop the virtual machine that writes this disk")
	}
	h := &hold{done: make(chan struct{}), unmark: func() {}}
	var release func() error
	h.stop = func() (out stopped) {
		if w == nil {
			return stopped{loose: true}
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if full {
			release, out.err = w.Pause(ctx)
			return out
		}
		if release, out.crash, out.err = w.Still(ctx); out.err != nil && s.reflink {
			s.log.Warn("a virtual machine's writes could not be stopped; its snapshot is crash-consistent", "session", k.Session, "error", out.err)
			out = stopped{loose: true}
		}
		return out
	}
	h.resume = func() (bool, error) {
		if release == nil {
			return true, nil
		}
		err := release()
		if err != nil && !full {
			s.log.Warn("a virtual machine may have gone on before its snapshot was taken", "session", k.Session, "error", err)
			return false, nil
		}
		return err == nil, err
	}
	return h, nil
}

// freezeFull stops the writers of a disk until the pool has room.
func (s *Store) freezeFull(k Key) (*hold, bool, error) { return s.freeze(k, s.freezeTime, true) }

// writeOut brings what the session wrote into the image. What a guest has in its own memory is for the
// guest to write.
func (s *Store) writeOut(k Key) error {
	if s.handed(k) {
		return syncFile(s.image(k))
	}
	return syncMount(s.mountPoint(k))
}

// superblock is what a freeze and thaw write by themselves, also in a guest.
const superblock = SizeUnit

// rawDirty compares the block maps of a raw image and of its base. Without a base nobody knows.
func (s *Store) rawDirty(op string, k Key) (bool, error) {
	rec, err := s.load(k)
	if err != nil {
		return true, errs.Wrap(op, k.String(), err)
	}
	base, _ := s.openBase(rec)
	if base == nil {
		return true, nil
	}
	defer func() { _ = base.Close() }()
	if rec.Pending.ID != "" || rec.Doubtful {
		return true, nil
	}
	image, err := os.Open(s.image(k))
	if err != nil {
		return true, errs.E(op, errkind.Internal, k.String(), err)
	}
	defer func() { _ = image.Close() }()
	if err := image.Sync(); err != nil {
		return true, errs.E(op, kindOf(err), k.String(), err)
	}
	changed, err := extents.Changed(base, image)
	if err != nil { // it is written meanwhile, or cannot be told here
		return true, nil
	}
	return len(changed) > 1 || len(changed) == 1 && changed[0].End() > superblock, nil
}

// blankAgain removes the image of a session that was never active if a wake in another tier that came to
// nothing gave it to a virtual machine: it holds nothing, and the next one is new.
func (s *Store) blankAgain(w Want) error {
	rec, err := s.load(w.Key)
	if err != nil || !w.Fresh || w.Raw || !rec.VMWritten || rec.State != Blank {
		return nil
	}
	if err := s.unwritten(w.Key, loopGrace); err != nil {
		return errs.E("attach disk", kindOf(err), w.String(), err)
	}
	return s.erase("attach disk", w.Key)
}
