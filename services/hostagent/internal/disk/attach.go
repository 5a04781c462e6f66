package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// Attach mounts the disk that w asks for, or hands its image out, and promises its space. It is idempotent: the same epoch
// again returns the same attachment. Kinds: Invalid, NotFound (no disk here), StaleEpoch (a newer
// one exists elsewhere), Busy (attached for another epoch, or still written), NoCapacity (no space),
// Refused (a VM wrote it and it was not asked for raw), Conflict, DataLoss. After an error nothing is attached and no blank is lost.
func (s *Store) Attach(ctx context.Context, w Want) (Attachment, error) {
	const op = "attach disk"
	if err := w.check(); err != nil {
		return Attachment{}, err
	}
	defer s.lock(w.Key)()
	if s.isActive(w.Key) {
		return s.again(w)
	}
	if err := s.blankAgain(w); err != nil {
		return Attachment{}, err
	}
	rec, exists, err := s.find(w)
	if err != nil {
		return Attachment{}, err
	}
	created := rec.State == Blank && w.LastActive.IsZero()
	if err := s.lose(w.Key); err != nil { // of a seal that was given up
		return Attachment{}, errs.E(op, kindOf(err), w.Key.String(), err)
	}
	if rec.Pending.ID != "" && rec.Pending.ID == w.Head {
		if rec, err = s.takeOver(rec); err != nil {
			return Attachment{}, errs.E(op, kindOf(err), w.Key.String(), err)
		}
	}
	if err := s.admitWake(&w, rec); err != nil {
		return Attachment{}, err
	}
	next := rec.attachedFor(w)
	table := s.attachTable(rec, next, exists, created)
	if w.Raw {
		table, next = s.rawTable(rec, next, exists, created)
	}
	times, err := s.run.Run(ctx, table)
	if err != nil {
		s.release(w.Key)
		return Attachment{}, errs.E(op, kindOf(err), w.Key.String(), err)
	}
	if err := s.attached(next); err != nil {
		return Attachment{}, errors.Join(errs.E(op, kindOf(err), w.Key.String(), err), s.detach(op, w.Key))
	}
	a := s.attachment(next, created)
	a.Steps = times
	return a, nil
}

// admitWake promises the disk's space, of the larger size if there is enough: a session wakes also
// where its disk cannot grow.
func (s *Store) admitWake(w *Want, rec Record) error {
	const op = "attach disk"
	if w.Size > rec.Size {
		err := s.admit(op, w.Key, w.Size, s.image(w.Key))
		if err == nil || !errs.Is(err, errkind.NoCapacity) {
			return err
		}
		s.log.Warn("no space to grow a disk; it keeps its size", "session", w.Session, "size", rec.Size, "wanted", w.Size)
		w.Size = rec.Size
	}
	return s.admit(op, w.Key, rec.Size, s.image(w.Key))
}

// attached tidies up behind a mount, and has it counted how much was written if nothing is unsaved. Activate
// waits for the count: until then nothing of the session writes.
func (s *Store) attached(rec Record) error {
	k := rec.Key()
	if err := s.tidyFolder(rec); err != nil {
		return err
	}
	if rec.Raw || rec.State == Dirty {
		return nil
	}
	done := make(chan struct{})
	s.mu.Lock()
	s.counting[k] = done
	s.mu.Unlock()
	s.counts.Go(func() { s.countFrom(rec, done) })
	return nil
}

// countFrom notes how much was written to a disk before its session could write, unless it is detached,
// or attached for another epoch, by now.
func (s *Store) countFrom(rec Record, done chan struct{}) {
	k := rec.Key()
	defer close(done)
	defer s.lock(k)()
	s.mu.Lock()
	if s.counting[k] == done {
		delete(s.counting, k)
	}
	s.mu.Unlock()
	now, err := s.load(k)
	if err != nil || !s.isActive(k) || s.handed(k) || now.Attached != rec.Attached || now.State != rec.State {
		return
	}
	if err := syncMount(s.mountPoint(k)); err != nil {
		s.log.Warn("it is not known what was written to a disk; its next snapshot reads all of it", "session", k.Session, "error", err)
		return
	}
	n, ok := s.writtenTo(k)
	s.remember(k, n, ok)
}

// counted waits until nothing is counted any more that was written before the session could write.
func (s *Store) counted(k Key) {
	s.mu.Lock()
	done := s.counting[k]
	s.mu.Unlock()
	if done != nil {
		<-done
	}
}

// again answers a repeated Attach.
func (s *Store) again(w Want) (Attachment, error) {
	rec, err := s.load(w.Key)
	if err != nil {
		return Attachment{}, err
	}
	switch {
	case rec.Attached != w.Epoch:
		return Attachment{}, errs.Errorf("attach disk", errkind.Busy,
			"%s is attached for epoch %s, asked for %s", w.Key, rec.Attached, w.Epoch)
	case rec.Raw != w.Raw:
		return Attachment{}, errs.E("attach disk", errkind.Busy, w.Key.String(), "it is attached in another way")
	}
	return s.attachment(rec, rec.State == Blank), nil
}

// attachTable lists the steps from a record (or nothing) to a mounted disk.
func (s *Store) attachTable(old, next Record, exists, created bool) steps.Table {
	k := next.Key()
	mount := steps.Step{
		Name: "disk.mount",
		Do:   func(ctx context.Context) error { return s.mount(ctx, next, created) },
		Undo: func(context.Context) error { return s.unmount(k) },
	}
	t := s.recordTable(old, next, exists)
	if exists && next.Size > old.Size { // a record never says less than the image has: a raw one is cut off there
		return append(t, []steps.Step{mount})
	}
	// The mount writes nothing of the session's: whichever record a crash leaves is true of the image. Only
	// an image without any must not be mounted: it would be replaced.
	last := len(t) - 1
	t[last] = append([]steps.Step{mount}, t[last]...)
	return t
}

// recordTable lists the steps to the record of a disk that is to be attached, and to its image if there is
// none; the last stage brings it all to stable storage.
func (s *Store) recordTable(old, next Record, exists bool) steps.Table {
	k := next.Key()
	record := steps.Step{Name: "disk.record", Do: func(context.Context) error { return s.save(next) }}
	if exists {
		record.Undo = func(context.Context) error {
			back := old
			if st, err := os.Stat(s.image(k)); err == nil && uint64(st.Size()) > old.Size {
				back.Size = next.Size // it has grown already
			}
			return s.save(back)
		}
		return steps.Table{{record}}
	}
	claim := steps.Step{
		Name: "disk.claim",
		Do:   func(ctx context.Context) error { return s.claim(ctx, k, next.Size) },
		Undo: func(context.Context) error { return s.unclaim(k) },
	}
	folder := steps.Step{Name: "disk.folder", Do: func(context.Context) error { return syncDir(filepath.Join(s.dir, "sessions")) }}
	return steps.Table{{claim}, {record}, {folder}}
}

// claim puts an image without a record into the session's folder. An image that a crash left there
// has no record, so it was never mounted: it is replaced.
func (s *Store) claim(ctx context.Context, k Key, size uint64) error {
	if err := os.MkdirAll(s.folder(k), 0o700); err != nil {
		return err
	}
	if err := s.blanks.claim(ctx, size, s.image(k)); err != nil {
		return err
	}
	return s.at("claim.renamed") // the record that follows brings the folder to stable storage
}

// unclaim removes a disk that was never active.
func (s *Store) unclaim(k Key) error {
	if err := os.RemoveAll(s.folder(k)); err != nil {
		return err
	}
	return syncDir(filepath.Join(s.dir, "sessions"))
}

// mount attaches and mounts the image and sees to its size and its two folders. Only a disk that holds
// nothing of the session yet may lack them.
func (s *Store) mount(ctx context.Context, rec Record, created bool) error {
	k := rec.Key()
	point := s.mountPoint(k)
	mounted, err := mounts.IsMount(point)
	if err != nil {
		return err
	}
	if mounted {
		return folders(point, created)
	}
	if err := s.stretch(k, rec.Size); err != nil {
		return err
	}
	if err := s.bind(k); err != nil {
		return err
	}
	if err := s.fit(ctx, k, rec.Size); err != nil {
		return err
	}
	return folders(point, created)
}

// bind attaches the image to a loop device and mounts that.
func (s *Store) bind(k Key) error {
	point := s.mountPoint(k)
	if err := loopdev.WaitFree(s.image(k), loopGrace); err != nil {
		return err
	}
	dev, err := loopdev.Attach(s.image(k), false)
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	if err := s.at("mount.loop"); err != nil {
		return err
	}
	if err := os.MkdirAll(point, 0o700); err != nil {
		return err
	}
	// noinit_itable: unused inode tables stay holes. discard: what is deleted returns to the pool.
	err = unix.Mount(dev.Name(), point, "ext4", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME,
		"errors=remount-ro,noinit_itable,discard")
	if err != nil {
		return fmt.Errorf("mount %s: %w", dev.Name(), err)
	}
	s.mu.Lock()
	if m, ok := s.active[k]; ok {
		m.device = dev.Name()
		s.active[k] = m
	}
	s.mu.Unlock()
	return s.at("mount.mounted")
}

func folders(point string, create bool) error {
	root, err := openDir(point)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	var st unix.Stat_t
	err = unix.Fstatat(int(root.Fd()), blankMark, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && create:
		err = unix.Unlinkat(int(root.Fd()), blankMark, 0)
	case err == nil:
		return errs.E("attach disk", errkind.DataLoss, "", "the image is a blank one: it is not the session's disk")
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("look for the mark of a blank: %w", err)
	}
	for _, name := range []string{Upper, Work} {
		if create {
			if err := unix.Mkdirat(int(root.Fd()), name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("make %s: %w", name, err)
			}
		}
		f, err := Beneath(root, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		if errors.Is(err, unix.ENOENT) {
			return errs.Errorf("attach disk", errkind.DataLoss, "the image holds no %s folder: it is not the session's disk", name)
		}
		if err != nil {
			return err
		}
		_ = f.Close()
	}
	return nil
}

// unmount takes the mount away and waits until the image is free. Busy if something still uses it.
func (s *Store) unmount(k Key) error {
	point := s.mountPoint(k)
	if err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount disk: %w", err)
	}
	if loopdev.WaitFree(s.image(k), loopReclaim) != nil {
		// Some process took a private copy of the mount table while the disk was mounted.
		mounts.Reclaim(point)
	}
	if err := loopdev.WaitFree(s.image(k), loopGrace); err != nil {
		return fmt.Errorf("%w%s", err, holders(point))
	}
	if err := os.Remove(point); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err)
	}
	return nil
}

// Activate records that the session may write in epoch from now on. Call it after the epoch was
// committed as active and before the first effect of the session; it is idempotent. Busy if the
// disk is attached for another epoch, NotFound if it is not attached.
func (s *Store) Activate(k Key, epoch ids.Epoch) error {
	const op = "activate disk"
	s.counted(k)
	defer s.lock(k)()
	rec, err := s.attachedRecord(op, k, epoch)
	if err != nil {
		return err
	}
	if rec.State == Dirty && rec.Epoch == epoch {
		return nil
	}
	return errs.Wrap(op, k.String(), s.save(rec.activated(epoch)))
}

// Detach unmounts, or takes a raw image back, without a manifest: after a failed wake, or compute that
// died. The record stays
// what it was, so a dirty disk stays usable for its epoch. Idempotent; Busy while it is in use.
func (s *Store) Detach(_ context.Context, k Key) error {
	defer s.lock(k)()
	return s.detach("detach disk", k)
}

func (s *Store) detach(op string, k Key) error {
	if err := s.thaw(k); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	takeBack := s.unmount
	if s.handed(k) {
		takeBack = s.takeBack
	}
	if err := takeBack(k); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	s.release(k)
	return nil
}

// MarkVMWritten records for ever that a virtual machine wrote the image.
func (s *Store) MarkVMWritten(k Key) error {
	const op = "mark disk as written by a virtual machine"
	defer s.lock(k)()
	rec, err := s.load(k)
	if err != nil {
		return errs.Wrap(op, k.String(), err)
	}
	rec.VMWritten = true
	return errs.Wrap(op, k.String(), s.save(rec))
}

// Delete removes the disk with all its clones and returns its space; shots and a view of it are lost. Idempotent; Busy while something uses it.
func (s *Store) Delete(_ context.Context, k Key) error {
	const op = "delete disk"
	defer s.lock(k)()
	if err := s.detach(op, k); err != nil {
		return err
	}
	if err := s.lose(k); err != nil {
		return errs.E(op, errkind.Internal, k.String(), err)
	}
	s.loseView(k)
	if err := s.removeView(k.String(), unix.MNT_DETACH); err != nil {
		return errs.E(op, kindOf(err), k.String(), err)
	}
	return s.erase(op, k)
}

func (s *Store) attachedRecord(op string, k Key, epoch ids.Epoch) (Record, error) {
	rec, err := s.load(k)
	if err != nil {
		return rec, errs.Wrap(op, k.String(), err)
	}
	if !s.isActive(k) {
		return rec, errs.E(op, errkind.NotFound, k.String(), "the disk is not attached")
	}
	if rec.Attached != epoch {
		return rec, errs.Errorf(op, errkind.StaleEpoch, "%s is attached for epoch %s, asked for %s", k, rec.Attached, epoch)
	}
	return rec, nil
}

// kindOf gives the failures of the kernel their kind.
func kindOf(err error) errkind.Kind {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errkind.NoCapacity
	case errors.Is(err, unix.EBUSY):
		return errkind.Busy
	}
	return errs.Kind(err)
}

// holders names the processes that still have the mount, for the operator.
func holders(point string) string {
	out := ""
	for _, pid := range mounts.Holders(point) {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		out += fmt.Sprintf("; process %d (%s) holds it", pid, bytes.TrimSpace(name))
	}
	return out
}
