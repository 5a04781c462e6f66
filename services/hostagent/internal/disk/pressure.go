package disk

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
)

// DefaultHighWater is the share of the pool above which images of sleepers are evicted.
const DefaultHighWater = 0.85

// How often the pool is looked at. The nearer it is to its limits, the more often: nothing writes
// faster than pressureRate.
const (
	pressureIdle  = 2 * time.Second
	pressureSlow  = 200 * time.Millisecond
	pressureFast  = 4 * time.Millisecond
	pressureRate  = 4 << 30 // bytes a second
	leastFloor    = 8 << 20
	highWaterEach = 5 * time.Second
)

// minder keeps the pool from running out of space under the loop devices.
type minder struct {
	s      *Store
	cancel context.CancelFunc
	done   chan struct{}
	looked time.Time // when the share of sleepers was computed
}

func startMinder(ctx context.Context, s *Store) *minder {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m := &minder{s: s, cancel: cancel, done: make(chan struct{})}
	go m.mind(ctx)
	return m
}

func (m *minder) close() {
	m.cancel()
	<-m.done
}

func (m *minder) mind(ctx context.Context) {
	defer close(m.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		timer.Reset(m.look())
	}
}

// floor is the free space below which writers are stopped while promises cannot be kept.
func (s *Store) floor() uint64 { return max(s.reserve/2, leastFloor) }

// look gives up what must be given up now, and says when to look again.
func (m *minder) look() time.Duration {
	s := m.s
	sp, err := s.account()
	if err != nil {
		s.log.Error("cannot measure the disk pool", "error", err)
		return pressureSlow
	}
	if time.Since(m.looked) >= highWaterEach {
		m.looked = time.Now()
		s.evictAbove(sp)
	}
	tight, before := int64(s.reserve/4), sp
	if sp.slack() < tight {
		sp = s.relieve(sp)
	}
	if sp.slack() >= tight || sp.Free >= 2*s.floor() {
		s.thawAll()
	}
	s.mu.Lock()
	attached, frozen := len(s.active), len(s.frozen)
	s.mu.Unlock()
	if attached == 0 {
		return pressureIdle
	}
	ahead := sp.slack() - tight
	if frozen > 0 || ahead <= 0 && sp.slack() >= 0 && sp.Free <= before.Free {
		return pressureSlow // no clone is left that could grow
	}
	if ahead <= 0 {
		ahead = int64(sp.Free) - int64(s.floor())
	}
	wait := time.Duration(float64(max(ahead, 0)) / pressureRate * float64(time.Second))
	return min(max(wait, pressureFast), pressureSlow)
}

// relieve gives up what costs least first, until there is some slack again: base clones, running shots
// and views, images of sleepers. When nothing is left and the reserve would be used up, it stops the
// writers. It is for space that others took: what this store gives away itself is never more than it
// has.
func (s *Store) relieve(sp Space) Space {
	tight, worse := int64(s.reserve/4), int64(s.reserve/8)
	again := func() bool {
		now, err := s.account()
		if err == nil {
			sp = now
		}
		return err == nil
	}
	s.collect()
	s.cutOff()
	for _, attached := range []bool{false, true} {
		for again() && sp.slack() < tight && s.dropBase(attached, Key{}) {
		}
	}
	for sp.slack() < worse && s.loseOne() && again() {
	}
	for sp.slack() < worse && s.evictOne() && again() {
	}
	if sp.slack() < 0 && sp.Free < s.floor() {
		s.freezeAll(sp)
	}
	return sp
}

// evictAbove evicts sleepers while the disks fill more of the pool than they should. What others keep
// in the same file system counts as not there.
func (s *Store) evictAbove(sp Space) {
	for {
		used, err := s.used()
		if err != nil || float64(used) <= s.highWater*float64(used+sp.Free) || !s.evictOne() {
			return
		}
		if sp, err = s.account(); err != nil {
			return
		}
	}
}

// used is what the images hold. Clones share most of theirs and are not counted.
func (s *Store) used() (uint64, error) {
	all, err := s.records()
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, r := range all {
		if n, err := allocated(s.image(r.Key())); err == nil {
			sum += n
		}
	}
	return sum, nil
}

// collect makes XFS give back at once what it keeps for writes to come to shared blocks. Other file
// systems keep nothing.
func (s *Store) collect() {
	d, err := os.Open(s.dir)
	if err != nil {
		return
	}
	defer func() { _ = d.Close() }()
	const freeEOFBlocks = 0x8080583a // XFS_IOC_FREE_EOFBLOCKS
	request := struct {
		version, flags, uid, gid, project, _ uint32
		minSize                              uint64
		_                                    [12]uint64
	}{version: 1, flags: 1} // wait for it
	_ = ioctl(d, freeEOFBlocks, &request)
}

// loseOne takes back the space of one running shot or view; whoever reads it is told.
func (s *Store) loseOne() bool {
	s.mu.Lock()
	var keys []Key
	for k, sh := range s.shots {
		if !sh.direct {
			keys = append(keys, k)
		}
	}
	var views []Key
	for k := range s.views {
		views = append(views, k)
	}
	s.mu.Unlock()
	for _, k := range keys {
		lost := s.tryLocked(k, func() bool {
			if err := s.lose(k); err != nil {
				return false
			}
			return s.dropClone(k, shotImageName) == nil // also that of a pending manifest
		})
		if lost {
			s.log.Warn("gave up a snapshot that was being uploaded: the disk pool needs its space", "session", k.Session)
			return true
		}
	}
	for _, k := range views {
		if s.tryLocked(k, func() bool { return s.loseView(k) }) {
			s.log.Warn("ended a view of a disk: the disk pool needs its space", "session", k.Session)
			return true
		}
	}
	return false
}

// freezeAll stops all writers: the pool would answer their loop devices with 'no space'.
func (s *Store) freezeAll(sp Space) {
	s.mu.Lock()
	var keys []Key
	for k, m := range s.active {
		if (m.device != "" || m.raw) && s.frozen[k] == nil && !s.ending[k] {
			keys = append(keys, k)
		}
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, k := range keys {
		wg.Go(func() { s.tryLocked(k, func() bool { return s.freezeFor(k, sp) }) })
	}
	wg.Wait()
}

func (s *Store) freezeFor(k Key, sp Space) bool {
	s.mu.Lock()
	ending := s.ending[k]
	s.mu.Unlock()
	if ending || !s.isActive(k) {
		return false
	}
	h, _, err := s.freezeFull(k) // one that is not frozen in time will be later
	if err != nil {
		s.log.Error("cannot stop the writers of a disk", "session", k.Session, "error", err)
		return false
	}
	s.mu.Lock()
	s.frozen[k] = h
	s.mu.Unlock()
	reason := fmt.Sprintf("the host's disk pool is full: %s are free of which %s are promised; writing goes on when there is room",
		fmtBytes(sp.Free), fmtBytes(sp.Promised))
	s.log.Error("stopped the writers of a disk", "session", k.Session, "reason", reason)
	if s.onFrozen != nil {
		s.notify(func() { s.onFrozen(k, reason) })
	}
	return true
}

// notify tells others what happened, in order and without any lock: they may call the store.
func (s *Store) notify(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notices = append(s.notices, f)
	if s.telling {
		return
	}
	s.telling = true
	go func() {
		for {
			s.mu.Lock()
			if len(s.notices) == 0 {
				s.telling = false
				s.mu.Unlock()
				return
			}
			next := s.notices[0]
			s.notices = s.notices[1:]
			s.mu.Unlock()
			next()
		}
	}()
}

// thawAll lets the writers go on.
func (s *Store) thawAll() {
	s.mu.Lock()
	var keys []Key
	for k := range s.frozen {
		keys = append(keys, k)
	}
	s.mu.Unlock()
	for _, k := range keys {
		s.tryLocked(k, func() bool {
			if err := s.thaw(k); err != nil {
				s.log.Error("cannot let the writers of a disk go on", "session", k.Session, "error", err)
				return false
			}
			return true
		})
	}
}

// thaw ends what freezeAll did to one disk. The caller has its lock. Idempotent.
func (s *Store) thaw(k Key) error {
	s.mu.Lock()
	h := s.frozen[k]
	delete(s.frozen, k)
	s.mu.Unlock()
	if h == nil {
		return nil
	}
	err := h.thaw()
	if s.onThawed != nil {
		s.notify(func() { s.onThawed(k) })
	}
	return err
}

// LetGo lets the writers of a disk go on for their end, until it is detached: a process that waits for
// a frozen file system cannot be killed, and a session that cannot be stopped gives no space back. What
// it may write until then is bounded by its memory, and what is free is not yet used up when writers
// are stopped.
func (s *Store) LetGo(k Key) error {
	defer s.lock(k)()
	if !s.isActive(k) {
		return nil
	}
	s.mu.Lock()
	s.ending[k] = true
	s.mu.Unlock()
	if err := s.thaw(k); err != nil {
		return errs.E("let the writers of the disk go on", kindOf(err), k.String(), err)
	}
	return nil
}

func ioctl[T any](f *os.File, request uintptr, arg *T) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
		return errno
	}
	return nil
}
