// Package saver brings the disks of one host to the store and back: it turns a still copy of a disk
// into a manifest, makes it the session's head, and makes local images from manifests. It guarantees
// that
//
//   - a manifest is proposed to the head only after every object that it needs is in the store, and
//     recorded on the host before, so that a head which moved is known here after any crash;
//   - a proposal whose outcome is not known is settled before another one is made;
//   - saves, sweeps and the end of one disk never run at the same time: a sleep or a delete ends a
//     save under way first;
//   - a wake from the store hands out what the manifest says, verified, or nothing.
//
// Failures keep their kind: Unavailable (the store, credentials or scheduler cannot be reached: try
// again), NoCapacity (the store or the pool is full), DataLoss (an object is missing or changed),
// StaleEpoch, Conflict and Superseded (somebody else owns the session now).
package saver

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/archive"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// Session is one disk in one epoch.
type Session struct {
	disk.Key
	Tenant ids.Tenant
	Epoch  ids.Epoch
	// Unflushed says that the guest did not write out what it holds itself: what is saved is
	// crash-consistent.
	Unflushed bool
	// Keep says which snapshots stay when a new one is made.
	Keep archive.Keep
	// Head of the session's manifests, where an epoch is sealed that is not the one that wrote.
	Head string
}

// Disk names the disk in the store.
func (s Session) Disk() archive.Disk {
	return archive.Disk{Tenant: s.Tenant, Session: s.Session, Generation: s.Generation}
}

// Disks is what a saver needs of the images of a host; *disk.Store has it.
type Disks interface {
	Get(k disk.Key) (disk.Record, error)
	Shoot(ctx context.Context, k disk.Key, epoch ids.Epoch) (*disk.Shot, error)
	SealShot(ctx context.Context, k disk.Key, epoch ids.Epoch) (*disk.Shot, *disk.Manifest, error)
	Restore(ctx context.Context, rec disk.Record, index []byte, fill func(context.Context, *os.File) error) error
	Settler
}

// Settler makes what was saved true on the host.
type Settler interface {
	Propose(sh *disk.Shot, m disk.Manifest, index []byte) error
	CommitHead(k disk.Key, id string) error
	// Unchanged settles a shot that equals the head.
	Unchanged(sh *disk.Shot) error
	// Withdraw forgets a proposal that can never become the head.
	Withdraw(k disk.Key, id string) error
	Release(sh *disk.Shot) error
}

// Outside is what a saver asks of other services.
type Outside struct {
	// Key gives the data key of the session's generation.
	Key func(ctx context.Context, s Session) (archive.Key, error)
	// Commit moves the session's head from m.Parent to m.ID, and tries until the outcome is known
	// or ctx ends. sealed: the disk has not been written to since.
	Commit func(ctx context.Context, s Session, m archive.Info, sealed bool) error
	// Check fails once this host may not act on sessions; place says what is about to be done.
	Check func(place string) error
}

// Result of a save.
type Result struct {
	archive.Info
	archive.Stats
	// Frozen is how long writers waited.
	Frozen time.Duration
	// Same: nothing had changed since the head, which stays.
	Same bool
	Took time.Duration
}

// Saver is safe for concurrent use.
type Saver struct {
	disks Disks
	depot *archive.Depot
	out   Outside
	log   *slog.Logger

	mu   sync.Mutex
	jobs map[disk.Key]*job
}

// job is what a saver remembers of one disk.
type job struct {
	turn   chan struct{} // holds one token: whoever has it works on the disk
	mu     sync.Mutex
	urgent int                     // how many wait for the turn that no save may hold up
	cancel context.CancelCauseFunc // of the save under way that may be ended, nil if none
	key    *archive.Key
	swept  time.Time
}

// New makes a saver.
func New(disks Disks, depot *archive.Depot, out Outside, log *slog.Logger) *Saver {
	return &Saver{disks: disks, depot: depot, out: out, log: log, jobs: map[disk.Key]*job{}}
}

func (s *Saver) job(k disk.Key) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	j := s.jobs[k]
	if j == nil {
		j = &job{turn: make(chan struct{}, 1)}
		s.jobs[k] = j
	}
	return j
}

// errEnded is why a save ends that stands in the way of a sleep or a delete.
var errEnded = errs.E("save disk", errkind.Superseded, "", "the session goes to sleep or is deleted")

// enter waits for the turn on a disk. Whoever is urgent ends a save under way first, and every one
// that gets the turn before him.
func (j *job) enter(ctx context.Context, urgent bool) (leave func(), err error) {
	if urgent {
		j.mu.Lock()
		j.urgent++
		if j.cancel != nil {
			j.cancel(errEnded)
		}
		j.mu.Unlock()
		defer func() {
			j.mu.Lock()
			j.urgent--
			j.mu.Unlock()
		}()
	}
	select {
	case j.turn <- struct{}{}:
		return func() { <-j.turn }, nil
	case <-ctx.Done():
		return nil, errs.E("wait for another save", errs.Kind(ctx.Err()), "", ctx.Err())
	}
}

// interruptible makes a context that an urgent call ends.
func (j *job) interruptible(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	j.mu.Lock()
	j.cancel = cancel
	if j.urgent > 0 {
		cancel(errEnded)
	}
	j.mu.Unlock()
	return ctx, func() {
		j.mu.Lock()
		j.cancel = nil
		j.mu.Unlock()
		cancel(nil)
	}
}

// key returns the data key of a session's generation, asked for once while it is awake.
func (s *Saver) key(ctx context.Context, on Session, j *job) (archive.Key, error) {
	j.mu.Lock()
	known := j.key
	j.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	k, err := s.out.Key(ctx, on)
	if err != nil {
		return archive.Key{}, errs.Wrap("get the disk's key", on.Key.String(), err)
	}
	j.mu.Lock()
	j.key = &k
	j.mu.Unlock()
	return k, nil
}

// Stop ends a save under way, waits for its end, and forgets the disk's key. After it the disk may
// be detached or deleted.
func (s *Saver) Stop(ctx context.Context, k disk.Key) error {
	j := s.job(k)
	leave, err := j.enter(ctx, true)
	if err != nil {
		return err
	}
	defer leave()
	s.mu.Lock()
	if s.jobs[k] == j {
		delete(s.jobs, k)
	}
	s.mu.Unlock()
	j.mu.Lock()
	j.key = nil
	j.mu.Unlock()
	return nil
}
