package agent

import "github.com/berth-dev/berth/services/hostagent/guest/wire"

// blockSize is the unit in which a ring takes and frees memory.
const blockSize = 32 << 10

// outputs are the streams that a ring keeps.
var outputs = [2]wire.Sub{wire.Stdout, wire.Stderr}

// ring keeps the newest output of one exec, both streams together bounded by
// limit. Bytes are addressed by their offset in their stream. It is not safe
// for concurrent use.
type ring struct {
	limit int
	size  int
	clock uint64 // counts blocks, to find the oldest
	lanes [2]lane
}

// lane is one stream. Block i holds the offsets from origin+i*blockSize on.
type lane struct {
	blocks []block
	origin uint64 // offset of the first byte of blocks[0]
	base   uint64 // oldest offset kept
	end    uint64
}

type block struct {
	born uint64
	data []byte
}

func (r *ring) lane(sub wire.Sub) *lane { return &r.lanes[sub-wire.Stdout] }

// room is how many bytes fit without dropping any.
func (r *ring) room() int { return r.limit - r.size }

// append adds bytes, for which there must be room.
func (r *ring) append(sub wire.Sub, p []byte) {
	l := r.lane(sub)
	r.size += len(p)
	l.end += uint64(len(p))
	for len(p) > 0 {
		last := len(l.blocks) - 1
		if last < 0 || len(l.blocks[last].data) == blockSize {
			if last < 0 {
				l.origin = l.end - uint64(len(p))
			}
			r.clock++
			l.blocks = append(l.blocks, block{born: r.clock, data: make([]byte, 0, min(blockSize, max(len(p), 512)))})
			last++
		}
		b := &l.blocks[last]
		n := min(len(p), blockSize-len(b.data))
		b.data = append(b.data, p[:n]...)
		p = p[n:]
	}
}

// copyAt copies kept bytes from an offset on and returns how many.
func (r *ring) copyAt(sub wire.Sub, offset uint64, dst []byte) int {
	l := r.lane(sub)
	n := 0
	for n < len(dst) && offset >= l.base && offset < l.end {
		at := offset - l.origin
		b := l.blocks[at/blockSize].data
		m := copy(dst[n:], b[at%blockSize:])
		n += m
		offset += uint64(m)
	}
	return n
}

// trim drops what lies before an offset of one stream, at most n bytes.
func (r *ring) trim(sub wire.Sub, before uint64, n int) int {
	l := r.lane(sub)
	before = min(before, l.end, l.base+uint64(n))
	if before <= l.base {
		return 0
	}
	dropped := int(before - l.base)
	l.base = before
	r.size -= dropped
	for len(l.blocks) > 0 && l.origin+uint64(len(l.blocks[0].data)) <= l.base {
		full := len(l.blocks[0].data) == blockSize
		if !full && l.base < l.end {
			break
		}
		l.origin += uint64(len(l.blocks[0].data))
		l.blocks[0].data = nil
		l.blocks = l.blocks[1:]
	}
	return dropped
}

// dropOldest drops up to n bytes in the order of their arrival, of each stream
// only what lies before the given offsets.
func (r *ring) dropOldest(before [2]uint64, n int) int {
	dropped := 0
	for dropped < n {
		oldest := -1
		for i := range r.lanes {
			l := &r.lanes[i]
			if l.base >= min(before[i], l.end) {
				continue
			}
			if oldest < 0 || l.blocks[0].born < r.lanes[oldest].blocks[0].born {
				oldest = i
			}
		}
		if oldest < 0 {
			break
		}
		l := &r.lanes[oldest]
		step := min(n-dropped, int(l.origin+blockSize-l.base))
		dropped += r.trim(outputs[oldest], before[oldest], step)
	}
	return dropped
}
