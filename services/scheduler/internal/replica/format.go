package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

// A group may mix replicas of this version and the one before. Each entry names
// its format and is applied by the rules of that format, so every replica comes
// to the same state as long as it can read every entry. The leader therefore
// writes in the newest format that is already in the log, and raises it with an
// entry of its own once each member has reported that it reads the newer one.
// The log itself remembers the result: a later leader goes on in that format,
// and a replica that cannot read it is not added.

// silentFormat is what a replica reads that does not report a format: the
// version before formats were reported.
const silentFormat = 5

// raiseEvery is how often a leader asks again whether it may raise the format.
const raiseEvery = 5 * time.Second

// Format returns the format in which this replica would write entries as the leader.
func (r *Replica) Format() int {
	return min(max(int(r.fsm.format.Load()), core.OldestWritten), r.fsm.reads)
}

// raising is what a leader noted about the format of its group.
type raising struct {
	mu   sync.Mutex
	term uint64 // in which it was tried before the first entry
	said string // the reason that was logged last
}

// raiseFormat raises the format to the newest one that every member of the
// group reads. It does nothing while a member does not answer.
func (r *Replica) raiseFormat(ctx context.Context) error {
	const op = "raise the format of the log"
	applied := int(r.fsm.format.Load())
	if applied >= r.fsm.reads {
		return nil
	}
	done, err := r.exclusive(ctx, op) // no replica is added meanwhile
	if err != nil {
		return err
	}
	defer done()
	to, why, err := r.readByAll(ctx)
	if err != nil {
		return errs.Wrap(op, "", err)
	}
	if to <= applied {
		r.sayOnce(why)
		return nil
	}
	f, err := r.propose(ctx, core.Entry{V: to, Now: core.At(time.Now()), Raise: &core.Raise{}})
	if err != nil {
		return errs.Wrap(op, "", err)
	}
	r.cfg.Log.Info("the scheduler group writes log entries of a newer format", "format", to, "index", f.Index())
	return nil
}

// readByAll returns the newest format that all members read, and why it is not
// the newest one of this replica.
func (r *Replica) readByAll(ctx context.Context) (format int, why string, err error) {
	servers, _, err := r.servers()
	if err != nil {
		return 0, "", r.failed("list replicas", err)
	}
	type report struct {
		id    raft.ServerID
		reads int
		err   error
	}
	reports := make(chan report, len(servers))
	others := 0
	for _, s := range servers {
		if string(s.ID) == r.cfg.ID {
			continue
		}
		others++
		go func() {
			reads, err := r.reads(ctx, string(s.ID), string(s.Address))
			reports <- report{s.ID, reads, err}
		}()
	}
	format = r.fsm.reads
	for range others {
		select {
		case p := <-reports:
			if p.err != nil {
				return 0, "", errs.E("ask which format a replica reads", errkind.Unavailable, string(p.id), p.err)
			}
			if p.reads < format {
				format, why = p.reads, fmt.Sprintf("replica %s reads entries up to format %d", p.id, p.reads)
			}
		case <-ctx.Done():
			return 0, "", r.failed("ask which format the replicas read", ctx.Err())
		}
	}
	return format, why, nil
}

// reads asks the replica at an address for the newest format that it reads.
func (r *Replica) reads(ctx context.Context, id, addr string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	c, err := r.link.dial(ctx, addr, hello{ID: r.cfg.ID, Want: id, Folder: r.link.pins.own})
	if err != nil {
		return 0, err
	}
	return c.reads, c.Close()
}

// raiseWhileLeading raises the format as soon as all members read it.
func (r *Replica) raiseWhileLeading() {
	for r.IsLeader() && r.Format() < r.fsm.reads {
		select {
		case <-r.done:
			return
		case <-time.After(raiseEvery):
		}
		r.raising.mu.Lock()
		r.tryRaise(raiseEvery)
		r.raising.mu.Unlock()
	}
}

// raiseFirst tries once in a term, before the leader writes its first entry.
func (r *Replica) raiseFirst(term uint64) {
	r.raising.mu.Lock()
	defer r.raising.mu.Unlock()
	if r.raising.term != term {
		r.raising.term = term
		r.tryRaise(2 * r.cfg.Heartbeat)
	}
}

// tryRaise logs why the format stays: entries in the older one go on. The lock is held.
func (r *Replica) tryRaise(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	if err := r.raiseFormat(ctx); err != nil && r.IsLeader() {
		r.sayOnce(err.Error())
	}
}

// sayOnce logs a reason when it changes; the lock is held.
func (r *Replica) sayOnce(why string) {
	if why == r.raising.said {
		return
	}
	r.raising.said = why
	r.cfg.Log.Info("the scheduler group goes on with log entries of an older format", "format", r.Format(), "newest", r.fsm.reads, "reason", why)
}

// canRead returns an error if a replica that is to be added cannot read the log.
func (r *Replica) canRead(id string, reads int) error {
	if format := r.Format(); reads < format {
		return errs.Errorf("add replica", errkind.Refused,
			"replica %s reads log entries up to format %d, the group writes format %d; start it with the version of the others", id, reads, format)
	}
	return nil
}

// decode reads an entry that this replica may apply.
func (m *machine) decode(raw []byte) (core.Entry, error) {
	e, err := core.DecodeEntry(raw)
	if err == nil && e.V > m.reads {
		err = core.NewerFormat{What: "log entry", Format: e.V, Reads: m.reads}
	}
	return e, err
}

// halt ends the replica before it applies what it cannot read: to skip an entry
// that another replica understands would split the state. If Fatal returns, as
// in tests, nothing more is applied until the replica is closed. While raft
// starts, OpenContext returns the error instead.
func (m *machine) halt(err error) {
	m.mu.Lock()
	if m.broken == nil {
		m.broken = err
	}
	m.mu.Unlock()
	if m.started.Load() {
		m.fatal(err)
		<-m.done
	}
}

// failure returns why nothing more is applied.
func (m *machine) failure() error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.broken
}
