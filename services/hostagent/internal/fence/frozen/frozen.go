// Package frozen notes which file systems are frozen for a moment, so that the watchdog thaws them
// when whoever froze them was killed or stands still. It guarantees that a file system with a mark is
// thawed soon after Limit if its owner does not renew it, and that nothing else is: the mark names the mount
// point and its device, and no symlink is followed to it.
//
// A thaw by the watchdog makes the owner's own FITHAW answer EINVAL: what was read since the freeze
// is not of one moment then.
package frozen

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Limit is how long a file system may be frozen after its owner stopped to run.
	Limit = 5 * time.Second
	// slowest is how long the kernel may take to freeze: until it has, there is nothing to thaw, and
	// the one that asked may be dead.
	slowest = 10 * time.Minute

	lookEvery  = 500 * time.Millisecond
	renewEvery = time.Second

	// From linux/fs.h, which golang.org/x/sys lacks.
	fiThaw = 0xc0045878
)

// Dir is the folder of marks in a host's folder.
func Dir(host string) string { return filepath.Join(host, "frozen") }

// Mark says that mountpoint is about to be frozen; call it before FIFREEZE, and unmark after FITHAW.
// While this process lives and runs the mark is renewed, so a freeze may last. dir is that of Dir; key
// is a file's name, the same one for the same disk: a mark that an earlier process left is replaced.
func Mark(dir, key, mountpoint string) (unmark func(), err error) {
	m, err := newMarker(dir, key, mountpoint)
	if err != nil {
		return nil, fmt.Errorf("mark %s as frozen: %w", mountpoint, err)
	}
	path := filepath.Join(dir, key)
	if err := m.put(path); err != nil {
		return nil, fmt.Errorf("mark %s as frozen: %w", mountpoint, err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		m.renew(path, stop)
	}()
	return sync.OnceFunc(func() {
		close(stop)
		<-done
		_ = os.Remove(path)
	}), nil
}

func newMarker(dir, key, mountpoint string) (m marker, err error) {
	if key == "" || key != filepath.Base(key) || key[0] == '.' {
		return m, fmt.Errorf("%q is no name of a file", key)
	}
	if m.point, err = filepath.EvalSymlinks(mountpoint); err != nil {
		return m, err
	}
	var st unix.Stat_t
	if err := errors.Join(unix.Stat(m.point, &st), os.MkdirAll(dir, 0o700)); err != nil {
		return m, err
	}
	m.at, m.dev = now(), uint64(st.Dev)
	return m, nil
}

// put replaces the mark in one step. A symlink is whole at once, and nobody follows this one.
func (m marker) put(path string) error {
	next := filepath.Join(filepath.Dir(path), ".next-"+filepath.Base(path))
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(m.String(), next); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// renew keeps the mark young until stop. One that the watchdog took away stays away.
func (m marker) renew(path string, stop <-chan struct{}) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		if _, err := os.Lstat(path); err != nil {
			return
		}
		m.at = now()
		_ = m.put(path) // the next one may go well, or the watchdog thaws
	}
}

// marker is the content of a mark.
type marker struct {
	at    time.Duration // CLOCK_BOOTTIME
	dev   uint64
	point string
}

func (m marker) String() string { return fmt.Sprintf("%d:%d:%s", int64(m.at), m.dev, m.point) }

func parse(s string) (marker, error) {
	f := strings.SplitN(s, ":", 3)
	if len(f) != 3 || !filepath.IsAbs(f[2]) {
		return marker{}, errors.New("no mark of a frozen file system")
	}
	at, err := strconv.ParseInt(f[0], 10, 64)
	dev, derr := strconv.ParseUint(f[1], 10, 64)
	return marker{time.Duration(at), dev, f[2]}, errors.Join(err, derr)
}

// over reports that a mark is too old, or of an earlier run of the machine.
func (m marker) over(now time.Duration) bool { return m.at > now || now-m.at >= Limit }

// Watch thaws what stays frozen too long, for as long as the process lives.
func Watch(dir string, say func(string)) {
	w := watch{dir: dir, say: say, busy: map[string]bool{}}
	for ; ; time.Sleep(lookEvery) {
		w.look(now())
	}
}

type watch struct {
	dir string
	say func(string)

	mu   sync.Mutex
	busy map[string]bool // a thaw that hangs holds up no other
}

func (w *watch) look(now time.Duration) {
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		return // nothing was ever frozen
	}
	for _, e := range entries {
		path := filepath.Join(w.dir, e.Name())
		target, err := os.Readlink(path)
		if err != nil {
			continue
		}
		m, err := parse(target)
		if err == nil && !m.over(now) || !w.begin(path) {
			continue
		}
		go func() {
			defer w.end(path)
			if err != nil || w.thaw(m, now) {
				_ = os.Remove(path)
			}
		}()
	}
}

func (w *watch) begin(path string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy[path] {
		return false
	}
	w.busy[path] = true
	return true
}

func (w *watch) end(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.busy, path)
}

// thaw reports whether the mark is done with: its file system surely is not frozen any more.
func (w *watch) thaw(m marker, now time.Duration) (done bool) {
	fd, err := unix.Openat2(unix.AT_FDCWD, m.point, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NONBLOCK | unix.O_NOATIME | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || uint64(st.Dev) != m.dev {
		return true // it is unmounted
	}
	err = unix.IoctlSetInt(fd, fiThaw, 0)
	if err == nil {
		w.say("thawed " + m.point + ": it was left frozen")
	}
	return err == nil || errors.Is(err, unix.EINVAL) && (m.at > now || now-m.at > slowest)
}

func now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 1<<63 - 1 // cannot happen on Linux; everything is thawed then
	}
	return time.Duration(ts.Nano())
}
