// Package auditlog records what a service decided, beside the path of the
// request: while JetStream has no leader, requests go on and records wait. It
// guarantees order per Log, that nothing is dropped while the bus can be
// written within a minute, and backpressure instead of loss: when its
// queue is full, Record waits. What could not be written in time is logged as
// an error without its body.
//
// A log with a journal also guarantees that a record outlives the process once
// Record has returned, and is published until the stream has it; one that had
// to wait for longer than a minute may be published after later ones. Each
// record is published at least once, under one id; the stream stores it once as
// long as its duplicate window remembers the id.
package auditlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/nats-io/nuid"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
)

const (
	queue    = 4096
	patience = time.Minute
	pause    = 200 * time.Millisecond
	// parkedEvery is how often records of a journal are published again that a
	// stream did not take within patience. The journal bounds how many there are.
	parkedEvery = 5 * time.Second
)

// Log writes audit records of one service.
type Log struct {
	conn    *bus.Conn
	log     *slog.Logger
	in      chan record
	done    chan struct{}
	stop    context.CancelFunc
	ctx     context.Context
	journal *journal // nil: none
	parked  []record
	isIn    map[string]bool // ids of parked
	rest    time.Time       // until when none of parked is published beside others
	began   time.Time
	// patience is how long later records wait for one that is not acknowledged.
	patience time.Duration
}

type record struct {
	ctx     context.Context
	subject string
	body    []byte
	at      time.Time
	id      string
	kept    bool // in the journal
	sent    bus.Future
	err     error
}

// New starts a log without a journal; Close ends it.
func New(conn *bus.Conn, log *slog.Logger) *Log { return start(conn, log, nil, nil, patience) }

// Open starts a log with a journal in a directory, which several processes may
// share, and publishes what processes that died left there; Close ends it.
func Open(conn *bus.Conn, log *slog.Logger, dir string) (*Log, error) {
	j, left, err := openJournal(dir, log)
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return nil, fmt.Errorf("the disk of the audit journal is full; free space in %s: %w", dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open audit journal in %s: %w", dir, err)
	}
	var records []record
	for _, l := range left {
		records = append(records, record{ctx: context.Background(), subject: l.Subject, body: l.Body, at: l.At, id: l.ID, kept: true})
	}
	return start(conn, log, j, records, patience), nil
}

func start(conn *bus.Conn, log *slog.Logger, j *journal, left []record, patience time.Duration) *Log {
	ctx, stop := context.WithCancel(context.Background())
	l := &Log{conn: conn, log: log, in: make(chan record, queue), done: make(chan struct{}), ctx: ctx, stop: stop, journal: j, isIn: map[string]bool{}, began: time.Now(), patience: patience}
	sent := make(chan record, queue)
	go func() {
		defer close(sent)
		send := func(r record) {
			r.sent, r.err = l.publish(r)
			sent <- r
		}
		for _, r := range left {
			send(r)
		}
		for r := range l.in {
			send(r)
		}
	}()
	go func() {
		defer close(l.done)
		l.settleAll(sent)
	}()
	return l
}

// Record queues a record under a random id. ctx serves tracing only. It must
// not be called after Close.
func (l *Log) Record(ctx context.Context, subject string, body proto.Message) {
	l.RecordAs(ctx, "audit-"+l.conn.Self().Name()+"-"+nuid.Next(), subject, body)
}

// RecordAs queues a record under an id of its own: the same decision, recorded
// again, is stored once. The id must stay unknown to every login that may publish to
// the stream, because an id that was used before makes a record vanish.
func (l *Log) RecordAs(ctx context.Context, id, subject string, body proto.Message) {
	if r, ok := l.record(ctx, id, subject, body); ok {
		r.kept = l.keep(r)
		l.in <- r
	}
}

// Offer is Record for what may rather be lost than waited for: when the queue
// is full, after minutes without a bus that can be written, it says false.
func (l *Log) Offer(ctx context.Context, subject string, body proto.Message) bool {
	r, ok := l.record(ctx, "audit-"+l.conn.Self().Name()+"-"+nuid.Next(), subject, body)
	if !ok {
		return false
	}
	select {
	case l.in <- r:
		return true
	default:
		return false
	}
}

func (l *Log) record(ctx context.Context, id, subject string, body proto.Message) (record, bool) {
	r := record{ctx: context.WithoutCancel(ctx), subject: subject, at: time.Now(), id: id}
	var err error
	if r.body, err = proto.Marshal(body); err != nil {
		l.log.Error("audit record not written", "subject", subject, "id", id, "error", err)
		return r, false
	}
	return r, true
}

// keep writes a record to the journal, if there is one.
func (l *Log) keep(r record) bool {
	if l.journal == nil {
		return false
	}
	err := l.journal.add(line{ID: r.id, Subject: r.subject, At: r.at, Body: r.body})
	if err != nil {
		l.log.Error("audit record is in memory only", "subject", r.subject, "id", r.id, "error", err)
	}
	return err == nil
}

func (l *Log) publish(r record) (bus.Future, error) {
	return l.conn.PublishRawAsync(r.ctx, r.subject, r.body, bus.WithID(r.id), bus.WithTime(r.at))
}

// settleAll waits for the acknowledgements of all records, in order.
func (l *Log) settleAll(sent <-chan record) {
	for {
		var again <-chan time.Time
		if len(l.parked) > 0 {
			again = time.After(parkedEvery)
		}
		select {
		case r, ok := <-sent:
			if !ok {
				l.settleParked(len(l.parked))
				return
			}
			l.settle(r)
		case <-again:
			l.settleParked(len(l.parked))
		}
	}
}

// settle waits for the acknowledgement and tries again for a while; the id
// makes a record that arrived after all count once.
func (l *Log) settle(r record) {
	since := r.at
	if since.Before(l.began) || since.After(time.Now()) { // of an earlier process, or the clock was set back since
		since = l.began
	}
	err := l.written(r, max(time.Until(since.Add(l.patience)), 0))
	switch {
	case err == nil:
		if time.Now().After(l.rest) {
			defer l.settleParked(2) // the stream is back; later records do not wait for all of them
		}
	case r.kept && (l.ctx.Err() != nil || errs.Kind(err).Retry()):
		if !l.isIn[r.id] {
			l.isIn[r.id] = true
			l.parked = append(l.parked, r)
		}
		l.log.Warn("audit record waits in the journal", "subject", r.subject, "id", r.id, "error", err)
		return
	default:
		l.log.Error("audit record not written", "subject", r.subject, "id", r.id, "error", err)
	}
	l.forget(r)
}

// forget marks a record of the journal as done.
func (l *Log) forget(r record) {
	if !r.kept {
		return
	}
	if err := l.journal.done(r.id); err != nil {
		l.log.Warn("audit record will be published again at the next start", "id", r.id, "error", err)
	}
}

// settleParked publishes up to n parked records, until one is not acknowledged.
// That one is the last next time, so that it keeps neither the others back nor
// those that come later. What the stream will never take is logged and dropped.
func (l *Log) settleParked(n int) {
	for ; n > 0 && len(l.parked) > 0 && l.ctx.Err() == nil; n-- {
		r := l.parked[0]
		r.sent, r.err = l.publish(r)
		err := l.written(r, parkedEvery)
		again := err != nil && (l.ctx.Err() != nil || errs.Kind(err).Retry())
		l.parked = l.parked[1:]
		if again {
			l.parked = append(l.parked, r)
			l.rest = time.Now().Add(10 * parkedEvery)
			return
		}
		if err != nil {
			l.log.Error("audit record not written", "subject", r.subject, "id", r.id, "error", err)
		}
		delete(l.isIn, r.id)
		l.forget(r)
	}
}

// written waits until the stream has a record that was published.
func (l *Log) written(r record, d time.Duration) error {
	ctx, cancel := context.WithTimeout(l.ctx, d)
	defer cancel()
	// Without a pause at first: of the many that failed while the stream had no
	// leader only the first has to wait for the next one.
	for wait := time.Duration(0); ; wait = pause {
		if r.err == nil {
			_, r.err = r.sent.Wait(ctx)
		}
		if r.err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return r.err
		case <-time.After(wait):
		}
		r.sent, r.err = l.publish(r)
	}
}

// Close writes what is queued until ctx ends; the rest stays in the journal.
func (l *Log) Close(ctx context.Context) {
	close(l.in)
	select {
	case <-l.done:
	case <-ctx.Done():
		l.stop()
		<-l.done
	}
	l.stop()
	if l.journal != nil {
		if err := l.journal.close(); err != nil {
			l.log.Warn("close audit journal", "error", err)
		}
	}
}
