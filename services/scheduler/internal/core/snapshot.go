package core

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// SnapshotVersion is the newest format of snapshots that this code reads. A
// snapshot has the format of the newest entry that led to it, so that a replica
// which reads the entries of a group also reads its snapshots.
const SnapshotVersion = EntryVersion

// header is the first line of a snapshot.
type header struct {
	Format      string        `json:"format"`
	Version     int           `json:"version"`
	Incarnation uint32        `json:"incarnation"`
	Index       uint64        `json:"index"`
	LeaderTime  time.Duration `json:"leader_time"`
	OutSeq      uint64        `json:"out_seq"`
	ExpireHour  time.Duration `json:"expire_hour,omitempty"`
	ExpireCount int           `json:"expire_count,omitempty"`
	Lines       int           `json:"lines"`
}

const format = "berth-scheduler"

// line is one record of a snapshot: one part is set.
type line struct {
	Session   *Session   `json:"session,omitempty"`
	Tombstone *Tombstone `json:"tombstone,omitempty"`
	Host      *Host      `json:"host,omitempty"`
	Gone      *GoneHost  `json:"gone,omitempty"`
	Record    *Record    `json:"record,omitempty"`
	Event     *Event     `json:"event,omitempty"`
}

// Frozen is the state at one moment, to be written while entries go on. It
// holds no maps, so that freezing takes little time.
type Frozen struct {
	h        header
	sessions []*Session
	tombs    []*Tombstone
	hosts    []*Host
	gone     []*GoneHost
	records  []*Record
	outbox   []*Event
}

// Freeze takes the state as it is now.
func (s *State) Freeze() *Frozen {
	f := &Frozen{
		h: header{Format: format, Version: max(s.Format, 1), Incarnation: s.Incarnation, Index: s.Index,
			LeaderTime: s.LeaderTime, OutSeq: s.OutSeq, ExpireHour: s.expireHour, ExpireCount: s.expireCount},
		sessions: s.Sessions(), tombs: s.Tombstones(), hosts: s.Hosts(), outbox: slices.Clone(s.outbox),
		gone: slices.Collect(maps.Values(s.gone)), records: make([]*Record, len(s.recordQ)),
	}
	for i, sl := range s.recordQ {
		f.records[i] = sl.r
	}
	f.h.Lines = len(f.sessions) + len(f.tombs) + len(f.hosts) + len(f.gone) + len(f.records) + len(f.outbox)
	return f
}

// WriteTo writes the state; see Frozen.WriteTo.
func (s *State) WriteTo(w io.Writer) (int64, error) { return s.Freeze().WriteTo(w) }

// WriteTo writes the state as JSON lines in a fixed order: equal states give
// equal bytes.
func (f *Frozen) WriteTo(w io.Writer) (int64, error) {
	count := &counter{w: w}
	buf := bufio.NewWriterSize(count, 1<<16)
	enc := json.NewEncoder(buf)
	slices.SortFunc(f.sessions, func(a, b *Session) int { return compare(a.Key, b.Key) })
	slices.SortFunc(f.tombs, func(a, b *Tombstone) int { return compare(a.Key, b.Key) })
	slices.SortFunc(f.gone, func(a, b *GoneHost) int { return compare(a.ID, b.ID) })
	err := enc.Encode(f.h)
	put := func(l line) {
		if err == nil {
			err = enc.Encode(l)
		}
	}
	for _, v := range f.hosts {
		put(line{Host: v})
	}
	for _, v := range f.gone {
		put(line{Gone: v})
	}
	for _, v := range f.sessions {
		put(line{Session: v})
	}
	for _, v := range f.tombs {
		put(line{Tombstone: v})
	}
	for _, v := range f.records {
		put(line{Record: v})
	}
	for _, v := range f.outbox {
		put(line{Event: v})
	}
	if err == nil {
		err = buf.Flush()
	}
	if err != nil {
		return count.n, fmt.Errorf("write snapshot: %w", err)
	}
	return count.n, nil
}

// ReadState reads what WriteTo wrote; a snapshot that is cut short is refused.
func ReadState(r io.Reader) (*State, error) {
	dec := json.NewDecoder(bufio.NewReaderSize(r, 1<<16))
	var h header
	if err := dec.Decode(&h); err != nil {
		return nil, fmt.Errorf("read snapshot header: %w", err)
	}
	if h.Format != format || h.Version < 1 {
		return nil, fmt.Errorf("snapshot is %q version %d, this version reads %q", h.Format, h.Version, format)
	}
	if h.Version > SnapshotVersion {
		return nil, NewerFormat{"snapshot", h.Version, SnapshotVersion}
	}
	s := NewState()
	s.Format = h.Version
	s.Incarnation, s.Index, s.LeaderTime, s.OutSeq = h.Incarnation, h.Index, h.LeaderTime, h.OutSeq
	s.expireHour, s.expireCount = h.ExpireHour, h.ExpireCount
	for n := range h.Lines {
		var l line
		if err := dec.Decode(&l); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, fmt.Errorf("read snapshot line %d of %d: %w", n+1, h.Lines, err)
		}
		if err := s.take(l, h.Version); err != nil {
			return nil, fmt.Errorf("read snapshot line %d of %d: %w", n+1, h.Lines, err)
		}
	}
	return s, nil
}

func (s *State) take(l line, version int) error {
	x := &tx{s: s}
	switch {
	case l.Host != nil:
		l.Host.ID = intern(s.in, l.Host.ID)
		s.setHost(l.Host)
	case l.Gone != nil:
		s.gone[l.Gone.ID] = l.Gone
	case l.Session != nil:
		v := l.Session
		switch {
		case v.Key == "", v.Terms == nil:
			return errors.New("a session has no key or no terms")
		case v.State == Waking && v.Wake == nil, v.State == Deleting && v.Deletion == nil:
			return fmt.Errorf("session %s is %s, but not what for", v.Key, StateName(v.State))
		case s.Session(v.Key) != nil:
			return fmt.Errorf("session %s is there twice", v.Key)
		}
		if version < handoffSince { // then a session never left its newest disk
			v.unsaved(v.Dirty)
		}
		s.share(v)
		x.put(v)
	case l.Tombstone != nil:
		x.bury(l.Tombstone)
	case l.Record != nil:
		s.keep(l.Record)
	case l.Event != nil:
		s.outbox = append(s.outbox, l.Event)
	}
	return nil
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
