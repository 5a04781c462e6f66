package disk

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// FIFREEZE and FITHAW of linux/fs.h, which package unix lacks.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freezeTime is how long a file system may take to freeze before a shot is taken without.
const freezeTime = 5 * time.Second

// freezeFile stops all writes to the file system of d after bringing what was written to the image.
// One that is frozen already is fine.
func freezeFile(d *os.File) error {
	if err := unix.IoctlSetInt(int(d.Fd()), fiFreeze, 0); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("freeze disk: %w", err)
	}
	return nil
}

// thawFile lets writes go on. Idempotent.
func thawFile(d *os.File) error {
	_, err := thawed(d)
	return err
}

// thawed lets writes go on; was is false if they went on already.
func thawed(d *os.File) (was bool, err error) {
	err = unix.IoctlSetInt(int(d.Fd()), fiThaw, 0)
	if err == nil || errors.Is(err, unix.EINVAL) {
		return err == nil, nil
	}
	return true, fmt.Errorf("thaw disk: %w", err)
}

// freezeMount is freezeFile or thawFile of a mount point.
func freezeMount(point string, on bool) error {
	d, err := os.Open(point)
	if err != nil {
		return fmt.Errorf("open disk: %w", err)
	}
	defer func() { _ = d.Close() }()
	if on {
		return freezeFile(d)
	}
	return thawFile(d)
}

// hold is a file system that is frozen, or will be once the kernel has written what is in memory.
type hold struct {
	stop   func() stopped // waits for the kernel, or for the guest
	resume func() (was bool, err error)
	unmark func()
	began  time.Time
	done   chan struct{} // stop has answered

	mu       sync.Mutex
	answered bool
	stopped
	released bool
	early    bool // somebody else thawed it before
}

// stopped is how far writers were stopped.
type stopped struct {
	err   error
	loose bool // they were not
	crash bool // what they had not written out is still in memory
}

// holdMount prepares the freeze of a mounted disk.
func (s *Store) holdMount(k Key) (*hold, error) {
	const op = "freeze disk"
	h := &hold{done: make(chan struct{}), unmark: func() {}}
	dir, err := os.Open(s.mountPoint(k))
	if err != nil {
		return nil, errs.E(op, errkind.Internal, k.String(), err)
	}
	if s.markFrozen != nil {
		if h.unmark, err = s.markFrozen(k, s.mountPoint(k)); err != nil {
			_ = dir.Close()
			return nil, errs.E(op, errkind.Unavailable, k.String(), fmt.Errorf("nobody would thaw it if this process died: %w", err))
		}
	}
	h.stop = func() stopped { return stopped{err: s.freezeFile(dir)} }
	h.resume = func() (bool, error) {
		was, err := thawed(dir)
		return was, errors.Join(err, dir.Close())
	}
	return h, nil
}

// freeze begins to freeze the disk of k and waits at most the patience for it. The hold is to be
// thawed whatever came of it; frozen is false if the patience ran out. Another hold that the kernel
// has not answered yet makes it Busy. full: until the pool has room. The caller has the lock of k.
func (s *Store) freeze(k Key, patience time.Duration, full bool) (h *hold, frozen bool, err error) {
	const op = "freeze disk"
	s.mu.Lock()
	stuck := s.holds[k]
	s.mu.Unlock()
	if stuck != nil && !stuck.over() {
		return nil, false, errs.E(op, errkind.Busy, k.String(), "an earlier freeze has not ended yet")
	}
	if s.handed(k) {
		h, err = s.holdGuest(k, patience, full)
	} else {
		h, err = s.holdMount(k)
	}
	if err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	s.holds[k] = h
	s.mu.Unlock()
	h.began = time.Now()
	go h.run()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-h.done:
	case <-timer.C:
		return h, false, nil
	}
	if h.err != nil {
		return nil, false, errors.Join(errs.E(op, kindOf(h.err), k.String(), h.err), h.thaw())
	}
	return h, true, nil
}

// run asks the kernel, which may take as long as the pool takes to write. If the hold was released
// meanwhile it thaws at once.
func (h *hold) run() {
	how := h.stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answered, h.stopped = true, how
	if h.released {
		_ = h.finish()
	}
	close(h.done)
}

// thaw ends the hold. Idempotent.
func (h *hold) thaw() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.released {
		return nil
	}
	h.released = true
	if !h.answered {
		return nil // run thaws
	}
	return h.finish()
}

// finish is called once, with mu held, when the hold is both answered and released.
func (h *hold) finish() error {
	was, err := h.resume()
	h.early = !was
	h.unmark()
	return err
}

// held says that from freeze to thaw nobody wrote: after a thaw that came from elsewhere, because this
// process stood still for too long, that is not certain.
func (h *hold) held() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answered && !h.early && !h.loose
}

// unwritten says that writers were stopped before they wrote out what they have in memory.
func (h *hold) unwritten() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.crash
}

// over says that nothing of the hold is left.
func (h *hold) over() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.released && h.answered
}
