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

// Lease is the word that hostagent and watchdog share: the time, on the clock of Now, from which
// nothing may run here. It is in memory that both have mapped, so that a reader never sees half of
// it and a writer never waits.
type Lease struct{ page []byte }

// Values of the word that are no time.
const (
	none      = 0  // there was no lease yet: nothing may run
	dismissed = -1 // the watchdog is not needed any more
)

// OpenLease opens the word in a host's folder, and makes it if need be.
func OpenLease(dir string) (*Lease, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lease"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	defer f.Close()
	if err := f.Truncate(8); err != nil {
		return nil, fmt.Errorf("open lease: %w", err)
	}
	page, err := unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map lease: %w", err)
	}
	return &Lease{page}, nil
}

func (l *Lease) word() *int64 { return (*int64)(unsafe.Pointer(&l.page[0])) }

// Set says from when on nothing may run, unless it is set again.
func (l *Lease) Set(at time.Duration) { atomic.StoreInt64(l.word(), int64(at)) }

// Dismiss ends the watchdog.
func (l *Lease) Dismiss() { atomic.StoreInt64(l.word(), dismissed) }

// Dismissed reports whether the watchdog was told to end.
func (l *Lease) Dismissed() bool { return l.get() == dismissed }

func (l *Lease) get() int64 { return atomic.LoadInt64(l.word()) }

// Close unmaps the word.
func (l *Lease) Close() error { return unix.Munmap(l.page) }

// Now is the time since the machine started, also while it was suspended; no clock change moves it.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 1<<63 - 1 // cannot happen on Linux; a lease that has run out is the safe side
	}
	return time.Duration(ts.Nano())
}
