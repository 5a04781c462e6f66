package pool

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nuid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const leaderKey = "leader"

// kv is what the election and the stored state need of a bucket. Update fails with Conflict when
// somebody else wrote first, Create with Exists; after any other error the write may have happened.
type kv interface {
	Get(ctx context.Context, key string) (value []byte, revision uint64, err error)
	Create(ctx context.Context, key string, value []byte) (revision uint64, err error)
	Update(ctx context.Context, key string, value []byte, last uint64) (revision uint64, err error)
}

// seat is the value of the key leader. Each leadership has a name of its own, so that a renewal whose
// answer was lost is known again.
type seat struct {
	Instance string    `json:"instance"`
	Name     string    `json:"name"`
	Term     uint64    `json:"term,omitempty"` // of renewals; that of the taking is its revision
	Renewed  time.Time `json:"renewed"`
}

// election takes the seat, and renews it while it is held. Terms are revisions of the key, so they
// only grow. Whoever finds a revision that has not changed for a lease of its own monotonic time may
// take the seat; time in which the key could not be read does not count.
type election struct {
	kv       kv
	instance string
	lease    time.Duration
	every    time.Duration
	log      *slog.Logger
	// alone: no other instance can hold the seat, so nobody is waited for.
	alone bool
}

// tenure is one leadership.
type tenure struct {
	term uint64
	name string
	last uint64       // revision of the latest renewal
	good atomic.Int64 // when the latest renewal was begun, since birth
}

var birth = time.Now()

func (t *tenure) renewed(at time.Time) { t.good.Store(int64(at.Sub(birth))) }

// holds reports whether nobody else can have taken the seat yet.
func (t *tenure) holds(lease time.Duration) bool {
	return time.Since(birth)-time.Duration(t.good.Load()) < lease
}

// take waits for the seat and takes it. It returns nil when ctx ends.
func (e *election) take(ctx context.Context) *tenure {
	var seen uint64
	var since, looked time.Time // when seen was first read, and when the key was last read
	for first := true; first || sleep(ctx, e.every); first = false {
		began := time.Now()
		s, rev, err := e.read(ctx)
		free := false
		switch {
		case errs.Is(err, errkind.NotFound):
			free, rev = true, 0
		case err != nil:
			if ctx.Err() == nil {
				e.log.Debug("cannot read who leads", "error", err)
			}
			seen = 0
			continue
		case s.Name == "" || e.alone:
			free = true
		case rev != seen || began.Sub(looked) > 2*e.every: // or this process stood still, and may have missed a renewal
			seen, since = rev, time.Now()
		default:
			free = began.Sub(since) >= e.lease
		}
		looked = time.Now()
		if !free {
			continue
		}
		if t := e.sit(ctx, rev); t != nil {
			return t
		}
	}
	return nil
}

// sit writes the first seat of a leadership over the one of a revision, or where there is none.
func (e *election) sit(ctx context.Context, over uint64) *tenure {
	ctx, cancel := context.WithTimeout(ctx, e.patience())
	defer cancel()
	t := &tenure{name: nuid.Next()}
	began := time.Now()
	value := e.seat(t)
	var err error
	if over == 0 {
		t.term, err = e.kv.Create(ctx, leaderKey, value)
	} else {
		t.term, err = e.kv.Update(ctx, leaderKey, value, over)
	}
	if err != nil { // a seat that was taken all the same is nobody's, and free after a lease
		e.log.Debug("did not become the leader", "error", err)
		return nil
	}
	t.last = t.term
	t.renewed(began)
	return t
}

// keep renews the seat until ctx ends, or it is another's: then it returns true. While the key cannot
// be written it tries on: nobody else can write it either, or this one will see that it did. doubt is
// a host's word that another leads: it looks at once, and believes it when its own lease is over.
func (e *election) keep(ctx context.Context, t *tenure, doubt signal) (lost bool) {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-doubt:
			if !t.holds(e.lease) {
				return true
			}
			sleep(ctx, e.every/10)
		case <-time.After(e.every):
		}
		began := time.Now()
		rctx, cancel := context.WithTimeout(ctx, e.patience())
		rev, err := e.kv.Update(rctx, leaderKey, e.seat(t), t.last)
		cancel()
		if errs.Is(err, errkind.Conflict) || errs.Is(err, errkind.Exists) || errs.Is(err, errkind.NotFound) {
			// Perhaps it is our own renewal, whose answer was lost.
			var s seat
			if s, rev, err = e.read(ctx); err == nil && s.Name != t.name || errs.Is(err, errkind.NotFound) {
				return true
			}
		}
		if err != nil {
			if ctx.Err() == nil {
				e.log.Warn("cannot renew the leadership; nothing is prepared until it can", "error", err)
			}
			continue
		}
		t.last = rev
		t.renewed(began)
	}
}

// leave gives the seat up, so that the next one need not wait.
func (e *election) leave(t *tenure) {
	ctx, cancel := context.WithTimeout(context.Background(), e.patience())
	defer cancel()
	raw, _ := json.Marshal(seat{Instance: e.instance, Renewed: time.Now()})
	if _, err := e.kv.Update(ctx, leaderKey, raw, t.last); err != nil {
		e.log.Debug("the leadership ends by its lease", "error", err)
	}
}

func (e *election) seat(t *tenure) []byte {
	raw, err := json.Marshal(seat{Instance: e.instance, Name: t.name, Term: t.term, Renewed: time.Now()})
	if err != nil {
		panic(err) // strings and times
	}
	return raw
}

func (e *election) read(ctx context.Context) (s seat, rev uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.patience())
	defer cancel()
	raw, rev, err := e.kv.Get(ctx, leaderKey)
	if err != nil {
		return s, rev, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		e.log.Warn("the key leader holds no seat; it counts as another's", "error", err)
	}
	return s, rev, nil
}

// patience is how long one read or write may take.
func (e *election) patience() time.Duration { return max(e.lease*2/5, 100*time.Millisecond) }

// sleep waits and says whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
