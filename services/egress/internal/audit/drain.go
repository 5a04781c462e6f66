package audit

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// outgoing is one record on its way.
type outgoing struct {
	session string
	id      string
	segment *segment
	end     int64 // offset behind it
	size    int64
	future  bus.Future
	err     error
}

// drain sends what waits, batch by batch. It says false when the bus does not take it: then it is tried
// again from there.
func (s *Spool) drain(ctx context.Context) bool {
	for {
		out, err := s.send(ctx)
		if len(out) == 0 {
			return err == nil
		}
		if !s.settle(ctx, out) || err != nil {
			return false
		}
	}
}

// send publishes the next records in order, up to a batch.
func (s *Spool) send(ctx context.Context) ([]outgoing, error) {
	s.mu.Lock()
	var from *segment
	for _, g := range s.segments {
		if g.acked < g.size {
			from = g
			break
		}
	}
	if from == nil {
		s.mu.Unlock()
		return nil, nil
	}
	at, size := from.acked, from.size
	s.mu.Unlock()
	var out []outgoing
	for len(out) < batch {
		body, next, err := readFrame(from.file, at, size)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			// What cannot be read now was whole when it was written: the disk lost it. The rest of this file
			// cannot be found without it.
			s.cfg.Log.Error("audit records are lost: their file is damaged", "file", from.path, "offset", at, "error", err)
			out = append(out, outgoing{segment: from, end: size, size: size - at, err: errDamaged})
			break
		}
		o := outgoing{segment: from, end: next, size: next - at}
		var r egressv1.Record
		if o.err = proto.Unmarshal(body, &r); o.err != nil {
			o.err = errDamaged
		} else {
			o.session, o.id = r.GetSession().GetSession(), r.GetId()
			if o.future, err = s.publish(ctx, &r); err != nil {
				return out, err
			}
		}
		out, at = append(out, o), next
	}
	return out, nil
}

var errDamaged = errors.New("damaged")

func (s *Spool) publish(ctx context.Context, r *egressv1.Record) (bus.Future, error) {
	return s.to.PublishAsync(ctx, subjectOf(r), r, bus.WithID(r.GetId()), bus.WithTime(r.GetEnded().AsTime()))
}

// settle waits for the acknowledgements in order and notes how far the bus has it.
func (s *Spool) settle(ctx context.Context, out []outgoing) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	all := true
	done := out[:0:0]
	for _, o := range out {
		if o.err == nil {
			_, o.err = o.future.Wait(ctx)
		}
		switch {
		case o.err == nil:
			s.sent.Add(1)
		case errors.Is(o.err, errDamaged):
			s.lost.Add(1)
		case errs.Is(o.err, errkind.TooLarge), errs.Is(o.err, errkind.Invalid):
			s.lost.Add(1)
			s.cfg.Log.Error("an audit record is not taken by the bus", "id", o.id, "error", o.err)
		default:
			all = false
		}
		if !all {
			break
		}
		done = append(done, o)
	}
	s.acked(done)
	return all
}

// acked forgets what is on the bus.
func (s *Spool) acked(done []outgoing) {
	if len(done) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range done {
		o.segment.acked = o.end
		s.room.sent(o.session, o.size)
	}
	last := done[len(done)-1]
	s.writeMark(last.segment.number, last.end)
	s.trim()
	if g := s.segments[len(s.segments)-1]; g.acked == g.size && g.size >= s.segmentSize()/2 && s.total > s.cfg.Max/2 {
		if err := s.grow(); err == nil {
			s.trim()
		}
	}
}

// The mark says up to where everything is on the bus: segment, offset, checksum. One that was torn is none:
// then more is sent again than needs be, with the same ids.
func (s *Spool) writeMark(number uint64, offset int64) {
	var b [20]byte
	binary.BigEndian.PutUint64(b[:8], number)
	binary.BigEndian.PutUint64(b[8:16], uint64(offset))
	binary.BigEndian.PutUint32(b[16:], crc32.Checksum(b[:16], castagnoli))
	if _, err := s.mark.WriteAt(b[:], 0); err != nil {
		s.cfg.Log.Warn("how far the audit records are sent is not noted: some may be sent twice", "error", err)
	}
}

func (s *Spool) readMark() (uint64, int64) {
	var b [20]byte
	if _, err := s.mark.ReadAt(b[:], 0); err != nil || crc32.Checksum(b[:16], castagnoli) != binary.BigEndian.Uint32(b[16:]) {
		return 0, 0
	}
	return binary.BigEndian.Uint64(b[:8]), int64(binary.BigEndian.Uint64(b[8:16]))
}
