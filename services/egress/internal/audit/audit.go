// Package audit keeps the audit records of a gate until they are on the bus. It guarantees that a record which
// Record took is written to a file before Record returns, so that it outlives the process, and synced within a
// tenth of a second, so that it outlives the machine but for that time; that it goes to the bus at least once,
// with its own id, and in order; that what is open when the process dies is recorded by the next one; that the
// files never grow over their bound, with room for the records of what is open, and that neither a session nor a
// tenant fills more of them than its share while others need room;
// and that a record which cannot be kept is refused, not forgotten.
package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

const (
	syncEvery = 100 * time.Millisecond
	batch     = 256 // records on their way to the bus
	patience  = 5 * time.Second
	pause     = 200 * time.Millisecond
	markFile  = "sent"
)

// ErrFull says that no more can be kept.
var ErrFull = errors.New("the audit log is full and the bus does not take it")

// Publisher is the bus.
type Publisher interface {
	PublishAsync(ctx context.Context, subject string, m proto.Message, opts ...bus.PubOption) (bus.Future, error)
}

// Config of a spool.
type Config struct {
	Dir string
	Max int64 // bytes of all files
	// Lossy: what cannot be kept is counted and forgotten instead of refused.
	Lossy bool
	Log   *slog.Logger
}

// Spool keeps records. It is safe for concurrent use.
type Spool struct {
	cfg Config
	to  Publisher

	mu       sync.Mutex
	segments []*segment // oldest first; the last one is written to
	next     uint64     // number of the next segment
	total    int64      // bytes of all segments
	room     *room
	dirty    bool
	broken   error // the disk failed

	poke    chan struct{}
	mark    *os.File
	journal *journal
	lost    atomic.Uint64
	sent    atomic.Uint64
}

// Open opens the spool of a folder, with what an earlier process left there. Run sends it.
func Open(cfg Config, to Publisher) (*Spool, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open audit spool: %w", err)
	}
	s := &Spool{cfg: cfg, to: to, room: newRoom(cfg.Max), poke: make(chan struct{}, 1)}
	var err error
	if s.mark, err = os.OpenFile(filepath.Join(cfg.Dir, markFile), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, fmt.Errorf("open audit spool: %w", err)
	}
	err = s.load()
	var left []*egressv1.Record
	if err == nil {
		s.journal, left, err = openJournal(cfg.Dir)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("open audit spool: %w", err)
	}
	s.takeOver(left)
	return s, nil
}

// load takes over what is there: what the mark says is on the bus is not sent again.
func (s *Spool) load() (err error) {
	number, offset := s.readMark()
	if s.segments, err = openSegments(s.cfg.Dir, func([]byte) {}); err != nil {
		return err
	}
	for _, g := range s.segments {
		switch {
		case g.number < number:
			g.acked = g.size
		case g.number == number:
			g.acked = min(offset, g.size)
		}
		s.next = g.number + 1
		s.total += g.size
		for at := g.acked; at < g.size; {
			body, next, err := readFrame(g.file, at, g.size)
			if err != nil {
				g.acked, at = 0, 0 // the mark is of other bytes: all of it is sent again
				if body, next, err = readFrame(g.file, 0, g.size); err != nil {
					return err
				}
			}
			tenant, session := owner(body)
			s.room.wait(tenant, session, next-at)
			at = next
		}
	}
	s.next = max(s.next, number+1)
	s.trim()
	return s.grow()
}

// owner is the tenant and the session of a record's bytes.
func owner(body []byte) (tenant, session string) {
	var r egressv1.Record
	if proto.Unmarshal(body, &r) != nil {
		return "", ""
	}
	return r.GetSession().GetTenant(), r.GetSession().GetSession()
}

// segmentSize is when a new segment is begun.
func (s *Spool) segmentSize() int64 { return max(minSegment, s.cfg.Max/16) }

// grow begins a segment; the lock is held, or nobody else knows the spool.
func (s *Spool) grow() error {
	path := segmentPath(s.cfg.Dir, s.next)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	s.segments = append(s.segments, &segment{number: s.next, path: path, file: f})
	s.next++
	return nil
}

// trim removes segments that are on the bus, but for the one that is written to; the lock is held.
func (s *Spool) trim() {
	for len(s.segments) > 1 && s.segments[0].acked == s.segments[0].size {
		g := s.segments[0]
		if err := g.remove(); err != nil {
			s.cfg.Log.Warn("an audit segment that was sent stays", "file", g.path, "error", err)
		}
		s.total -= g.size
		s.segments = s.segments[1:]
	}
}

// Record keeps a record, whose id must be unique. ErrFull, or an error of the disk: it is not kept.
func (s *Spool) Record(r *egressv1.Record) error {
	body, err := proto.Marshal(r)
	if err != nil {
		return err
	}
	if len(body) == 0 || len(body) > maxBody {
		return fmt.Errorf("an audit record of %d bytes cannot be kept", len(body))
	}
	frames := frame(make([]byte, 0, frameHead+len(body)), body)
	s.mu.Lock()
	err = s.append(r, frames)
	s.mu.Unlock()
	if err != nil {
		if !s.cfg.Lossy {
			return err
		}
		s.lost.Add(1)
		return nil
	}
	select {
	case s.poke <- struct{}{}:
	default:
	}
	return nil
}

// append writes one frame; the lock is held.
func (s *Spool) append(r *egressv1.Record, frames []byte) error {
	n := int64(len(frames))
	if err := s.room.take(r, s.total, n); err != nil {
		return err
	}
	g := s.segments[len(s.segments)-1]
	if g.size > 0 && g.size+int64(len(frames)) > s.segmentSize() {
		if err := g.file.Sync(); err != nil {
			return s.fails(err)
		}
		if err := s.grow(); err != nil {
			return s.fails(err)
		}
		g = s.segments[len(s.segments)-1]
		s.trim()
	}
	if err := g.write(frames); err != nil {
		return s.fails(err)
	}
	s.total, s.dirty, s.broken = s.total+n, true, nil
	s.room.wait(r.GetSession().GetTenant(), r.GetSession().GetSession(), n)
	return nil
}

func (s *Spool) fails(err error) error {
	s.broken = fmt.Errorf("the audit log cannot be written: %w", err)
	return s.broken
}

// reserve is what must be free for traffic to begin: about one record.
const reserve = 2048

// Ready says why a record of a session might not be kept now; nil: it would be.
func (s *Spool) Ready(session string) error {
	if s.cfg.Lossy {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return s.broken
	}
	return s.room.fits("", session, s.total, min(reserve, s.cfg.Max/16))
}

// Waiting is how many bytes are not on the bus yet.
func (s *Spool) Waiting() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.room.waiting
}

// Lost is how many records were forgotten because the spool was full.
func (s *Spool) Lost() uint64 { return s.lost.Load() }

// Sent is how many records went to the bus.
func (s *Spool) Sent() uint64 { return s.sent.Load() }

// Run sends records until ctx ends, and then what is left for as long as grace says.
func (s *Spool) Run(ctx context.Context, grace time.Duration) {
	stopSync := make(chan struct{})
	synced := make(chan struct{})
	go func() { defer close(synced); s.syncing(stopSync) }()
	defer func() { close(stopSync); <-synced }()
	for ctx.Err() == nil {
		if !s.drain(ctx) {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			continue
		}
		select {
		case <-ctx.Done():
		case <-s.poke:
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	for last.Err() == nil && !s.drain(last) {
		select {
		case <-last.Done():
		case <-time.After(pause / 4):
		}
	}
}

// syncing syncs what was written, ten times a second.
func (s *Spool) syncing(stop chan struct{}) {
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for ended := false; !ended; {
		select {
		case <-tick.C:
		case <-stop:
			ended = true
		}
		s.mu.Lock()
		dirty, g := s.dirty, s.segments[len(s.segments)-1]
		s.dirty = false
		s.mu.Unlock()
		if !dirty {
			continue
		}
		if err := g.file.Sync(); err != nil && !errors.Is(err, os.ErrClosed) {
			s.mu.Lock()
			s.broken = fmt.Errorf("the audit log cannot be synced: %w", err)
			s.mu.Unlock()
			s.cfg.Log.Error("audit records are not synced", "error", err)
		}
	}
}

// Close closes the files; what is not on the bus stays in them.
func (s *Spool) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.segments {
		_ = g.file.Sync()
		_ = g.file.Close()
	}
	_ = s.mark.Close()
	if s.journal != nil {
		_ = s.journal.file.Close()
	}
}

// subjectOf is where a record goes.
func subjectOf(r *egressv1.Record) string {
	return subjects.Audit("egress", ids.Tenant(r.GetSession().GetTenant()), ids.SessionKey(r.GetSession().GetSession()))
}
