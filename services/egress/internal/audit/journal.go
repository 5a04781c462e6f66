package audit

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

const (
	journalFile = "open"
	slotSize    = 2048
	maxSlots    = 1 << 18
)

// journal has what is open now, one slot of a file for each: what it says would be recorded if the process
// ended without another word.
type journal struct {
	file *os.File

	mu   sync.Mutex
	free []int64
	next int64
}

// openJournal opens it, with the records that an earlier process left there.
func openJournal(dir string) (*journal, []*egressv1.Record, error) {
	f, err := os.OpenFile(filepath.Join(dir, journalFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	var left []*egressv1.Record
	for at := int64(0); at < info.Size(); at += slotSize {
		body, _, err := readFrame(f, at, min(at+slotSize, info.Size()))
		if err != nil {
			continue // free, or never written whole: then it was not let out
		}
		r := &egressv1.Record{}
		if proto.Unmarshal(body, r) == nil {
			left = append(left, r)
		}
	}
	return &journal{file: f}, left, nil
}

// begin writes what is open; end clears it.
func (j *journal) begin(r *egressv1.Record) (end func(), err error) {
	body, err := proto.Marshal(r)
	if err == nil && len(body) > slotSize-frameHead {
		r = proto.CloneOf(r)
		r.Path, r.Actor = "", nil
		body, err = proto.Marshal(r)
	}
	if err == nil && (len(body) == 0 || len(body) > slotSize-frameHead) {
		err = fmt.Errorf("a record of %d bytes does not fit", len(body))
	}
	if err != nil {
		return nil, err
	}
	j.mu.Lock()
	slot := j.next
	if n := len(j.free); n > 0 {
		slot, j.free = j.free[n-1], j.free[:n-1]
	} else if j.next < maxSlots {
		j.next++
	} else {
		j.mu.Unlock()
		return nil, ErrFull
	}
	j.mu.Unlock()
	if _, err := j.file.WriteAt(frame(make([]byte, 0, frameHead+len(body)), body), slot*slotSize); err != nil {
		j.release(slot)
		return nil, err
	}
	var once sync.Once
	return func() { once.Do(func() { j.release(slot) }) }, nil
}

// release clears a slot. One that cannot be cleared is told once more after a restart, and is not used again.
func (j *journal) release(slot int64) {
	var none [frameHead]byte
	if _, err := j.file.WriteAt(none[:], slot*slotSize); err != nil {
		return
	}
	j.mu.Lock()
	j.free = append(j.free, slot)
	j.mu.Unlock()
}

// more is how much longer a record may be than what Begin was given: the address, the counts, how it ended.
const more = 384

// Begin notes that something is open, and holds room for its record. If the process ends before end is called,
// r is recorded by the next one, with the time at which it was found. An error: it must not be opened.
func (s *Spool) Begin(r *egressv1.Record) (end func(), err error) {
	tenant, session, n := r.GetSession().GetTenant(), r.GetSession().GetSession(), needs(r)
	s.mu.Lock()
	if err = s.room.fits(tenant, session, s.total, n); err == nil {
		s.room.hold(tenant, session, n)
	}
	s.mu.Unlock()
	if err != nil {
		return s.without(err)
	}
	forget, err := s.journal.begin(r)
	release := sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.room.release(session, n)
	})
	if err != nil {
		release()
		return s.without(err)
	}
	return func() { forget(); release() }, nil
}

// without lets something be opened that is not noted, if it may.
func (s *Spool) without(err error) (func(), error) {
	if !s.cfg.Lossy {
		return nil, err
	}
	s.lost.Add(1)
	return func() {}, nil
}

// needs is what the record of something that is open now will need at most.
func needs(r *egressv1.Record) int64 { return int64(frameHead + proto.Size(r) + more) }

// takeOver records what an earlier process left open, and empties the journal. Room was held for it then.
func (s *Spool) takeOver(left []*egressv1.Record) {
	for _, r := range left {
		r.Ended = timestamppb.Now()
		s.mu.Lock()
		n := needs(r)
		s.room.hold(r.GetSession().GetTenant(), r.GetSession().GetSession(), n)
		s.mu.Unlock()
		err := s.Record(r)
		s.mu.Lock()
		s.room.release(r.GetSession().GetSession(), n)
		s.mu.Unlock()
		if err != nil {
			s.lost.Add(1)
			s.cfg.Log.Error("what was open when the gate ended is not recorded", "id", r.GetId(), "error", err)
		}
	}
	if err := s.journal.file.Truncate(0); err != nil {
		s.cfg.Log.Warn("what was open when the gate ended may be recorded twice", "error", err)
	}
}
