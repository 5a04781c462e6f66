package wire

import (
	"bytes"
	"errors"
	"io"
)

// ErrCorrupt reports bytes that are no valid frame. The reader goes on; its
// next item is a sync record.
var ErrCorrupt = errors.New("wire: corrupt frame, discarding up to the next sync record")

// Item is what a Reader found: a sync record, or else a frame.
type Item struct {
	Sync  *Sync
	Frame Frame
}

// Reader finds frames and sync records in a byte stream of any quality. It
// starts out discarding: the first item is a sync record. It is not safe for
// concurrent use and uses a fixed amount of memory.
type Reader struct {
	src     io.Reader
	buf     []byte
	r, w    int  // buf[r:w] is unread
	sync    int  // where the first magic in buf[r:w] begins, or -1
	hunting bool // discarding up to the next sync record
	dropped uint64
}

// NewReader returns a Reader of src.
func NewReader(src io.Reader) *Reader {
	return &Reader{src: src, buf: make([]byte, 4*MaxPayload), sync: -1, hunting: true}
}

// Discarded counts the bytes that were thrown away so far.
func (r *Reader) Discarded() uint64 { return r.dropped }

// Next returns the next item. ErrCorrupt is not final: call Next again. Any
// other error comes from the source; a source that recovers may be read on,
// with no byte lost.
func (r *Reader) Next() (Item, error) {
	for {
		item, verdict := r.parse()
		switch verdict {
		case whole:
			return item, nil
		case broken:
			return Item{}, ErrCorrupt
		}
		if err := r.fill(); err != nil {
			return Item{}, err
		}
	}
}

// parse takes one item from the buffer, if there is a whole one.
func (r *Reader) parse() (Item, verdict) {
	limit := r.w
	if r.sync >= 0 {
		limit = r.sync
	}
	if !r.hunting {
		frame, size, verdict := decode(r.buf[r.r:limit])
		switch verdict {
		case whole:
			r.r += size
			return Item{Frame: frame}, whole
		case broken:
			if r.sync < 0 && r.magicMayFollow() {
				return Item{}, short
			}
			if r.sync < 0 {
				r.hunting = true
				return Item{}, broken
			}
		}
		if r.sync < 0 {
			return Item{}, short
		}
	}
	return r.parseSync()
}

// magicMayFollow says whether the last bytes are the beginning of the magic. Then
// what looks broken may be a half frame of a killed peer.
func (r *Reader) magicMayFollow() bool {
	if r.w-r.r > MaxFrame {
		return false // a half frame is shorter
	}
	for n := min(len(magic)-1, r.w-r.r); n > 0; n-- {
		if bytes.HasPrefix(magic[:], r.buf[r.w-n:r.w]) {
			return true
		}
	}
	return false
}

// parseSync discards up to the next valid sync record and takes it.
func (r *Reader) parseSync() (Item, verdict) {
	r.hunting = true
	for r.sync >= 0 {
		r.discard(r.sync)
		if r.w-r.r < SyncSize {
			return Item{}, short
		}
		s, ok := decodeSync(r.buf[r.r:])
		if ok {
			r.r += SyncSize
			r.hunting = false
			r.find(r.r)
			return Item{Sync: &s}, whole
		}
		r.find(r.r + 1)
	}
	r.discard(max(r.r, r.w-len(magic)+1))
	return Item{}, short
}

func (r *Reader) discard(to int) {
	r.dropped += uint64(to - r.r)
	r.r = to
}

// find looks for the first magic at or after from.
func (r *Reader) find(from int) {
	r.sync = -1
	if at := bytes.Index(r.buf[from:r.w], magic[:]); at >= 0 {
		r.sync = from + at
	}
}

// fill reads once from the source.
func (r *Reader) fill() error {
	if len(r.buf)-r.w < MaxPayload {
		copy(r.buf, r.buf[r.r:r.w])
		if r.sync >= 0 {
			r.sync -= r.r
		}
		r.w -= r.r
		r.r = 0
	}
	n, err := r.src.Read(r.buf[r.w:])
	seen := r.w
	r.w += n
	if n > 0 {
		if r.sync < 0 {
			r.find(max(r.r, seen-len(magic)+1))
		}
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}
