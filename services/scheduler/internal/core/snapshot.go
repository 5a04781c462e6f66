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

// SnapshotVersion is the newest format of snapshots that this code reads.
const SnapshotVersion = 1

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
	Record    *Record    `json:"record,omitempty"`
	Event     *Event     `json:"event,omitempty"`
}

// WriteTo writes the state as JSON lines in a fixed order: equal states give
// equal bytes.
func (s *State) WriteTo(w io.Writer) (int64, error) {
	count := &counter{w: w}
	buf := bufio.NewWriterSize(count, 1<<16)
	enc := json.NewEncoder(buf)
	sessions, tombs, hosts := s.ordered()
	h := header{Format: format, Version: SnapshotVersion, Incarnation: s.Incarnation, Index: s.Index,
		LeaderTime: s.LeaderTime, OutSeq: s.OutSeq, ExpireHour: s.expireHour, ExpireCount: s.expireCount,
		Lines: len(sessions) + len(tombs) + len(hosts) + len(s.recordQ) + len(s.outbox)}
	err := enc.Encode(h)
	put := func(l line) {
		if err == nil {
			err = enc.Encode(l)
		}
	}
	for _, v := range hosts {
		put(line{Host: v})
	}
	for _, v := range sessions {
		put(line{Session: v})
	}
	for _, v := range tombs {
		put(line{Tombstone: v})
	}
	for _, k := range s.recordQ {
		put(line{Record: s.records[k]})
	}
	for _, v := range s.outbox {
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

func (s *State) ordered() ([]*Session, []*Tombstone, []*Host) {
	sessions := slices.SortedFunc(maps.Values(s.sessions), func(a, b *Session) int { return compare(a.Key, b.Key) })
	tombs := slices.SortedFunc(slices.Values(s.Tombstones()), func(a, b *Tombstone) int { return compare(a.Key, b.Key) })
	return sessions, tombs, s.Hosts()
}

// ReadState reads what WriteTo wrote; a snapshot that is cut short is refused.
func ReadState(r io.Reader) (*State, error) {
	dec := json.NewDecoder(bufio.NewReaderSize(r, 1<<16))
	var h header
	if err := dec.Decode(&h); err != nil {
		return nil, fmt.Errorf("read snapshot header: %w", err)
	}
	if h.Format != format || h.Version < 1 || h.Version > SnapshotVersion {
		return nil, fmt.Errorf("snapshot is %q version %d, this version reads %q up to %d", h.Format, h.Version, format, SnapshotVersion)
	}
	s := NewState()
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
		s.take(l)
	}
	return s, nil
}

func (s *State) take(l line) {
	x := &tx{s: s}
	switch {
	case l.Host != nil:
		s.hosts[l.Host.ID] = l.Host
	case l.Session != nil:
		x.put(l.Session)
	case l.Tombstone != nil:
		x.bury(l.Tombstone)
	case l.Record != nil:
		k := recordKey{l.Record.Session, l.Record.Verb, l.Record.ID}
		s.records[k] = l.Record
		s.recordQ = append(s.recordQ, k)
	case l.Event != nil:
		s.outbox = append(s.outbox, l.Event)
	}
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
