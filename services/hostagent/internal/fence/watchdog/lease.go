package watchdog

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Lease is the page that hostagent and watchdog share: the times, on the clock of Now, from which
// nothing may run here, and from which nothing may be left. It is in memory that both have mapped, so
// that a reader never sees half of a word and a writer never waits.
//
// The first word is that of the format before, which had no other: a hostagent of that format keeps
// a watchdog of this one from freezing, and never has it stop anything.
type Lease struct{ page []byte }

// The words of the page.
const (
	wordFreeze  = iota // from then on nothing may run
	wordStop           // from then on nothing may be left; 0: never
	wordStopped        // when the watchdog last stopped something; 0: never
	words
)

// Values of wordFreeze that are no time.
const (
	none      = 0  // there is no lease: nothing may run
	dismissed = -1 // the watchdog is not needed any more
)

const pageBytes = words * 8

// OpenLease opens the page in a host's folder, and makes it if need be. One of the format before grows.
func OpenLease(dir string) (*Lease, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lease"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(pageBytes); err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	page, err := unix.Mmap(int(f.Fd()), 0, pageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map lease: %w", err)
	}
	return &Lease{page}, nil
}

func (l *Lease) word(i int) *int64 { return (*int64)(unsafe.Pointer(&l.page[8*i])) }

// Set says from when on nothing may run, and nothing may be left (0: that is never said), unless it
// is set again. The order is such that a reader who takes freeze first never sees a later freeze with
// an earlier stop.
func (l *Lease) Set(freeze, stop time.Duration) {
	l.Keep(stop)
	atomic.StoreInt64(l.word(wordFreeze), int64(freeze))
}

// Keep says from when on nothing may be left, and lets stand from when on nothing may run.
func (l *Lease) Keep(stop time.Duration) { atomic.StoreInt64(l.word(wordStop), int64(stop)) }

// Freeze says that nothing may run from now on.
func (l *Lease) Freeze() { atomic.StoreInt64(l.word(wordFreeze), none) }

// Dismiss ends the watchdog.
func (l *Lease) Dismiss() { atomic.StoreInt64(l.word(wordFreeze), dismissed) }

// Dismissed reports whether the watchdog was told to end.
func (l *Lease) Dismissed() bool { return l.freeze() == dismissed }

// Stopped is when the watchdog last stopped something here, 0 if never.
func (l *Lease) Stopped() time.Duration { return time.Duration(atomic.LoadInt64(l.word(wordStopped))) }

func (l *Lease) stopped(at time.Duration) { atomic.StoreInt64(l.word(wordStopped), int64(at)) }

func (l *Lease) freeze() int64 { return atomic.LoadInt64(l.word(wordFreeze)) }

func (l *Lease) stop() int64 { return atomic.LoadInt64(l.word(wordStop)) }

// Close unmaps the page.
func (l *Lease) Close() error { return unix.Munmap(l.page) }

// Now is the time since the machine started, also while it was suspended; no clock change moves it.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 1<<63 - 1 // cannot happen on Linux; a lease that has run out is the safe side
	}
	return time.Duration(ts.Nano())
}
