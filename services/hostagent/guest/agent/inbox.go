package agent

import (
	"io"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// inbox holds bytes from the host until a consumer takes them: at most one
// window of them. Bytes that came before are skipped, a hole is refused.
type inbox struct {
	mu       sync.Mutex
	cond     *sync.Cond
	parts    [][]byte
	held     int    // bytes in parts
	received uint64 // end of what was received
	ended    bool   // nothing follows received
	err      error
}

func newInbox() *inbox {
	q := &inbox{}
	q.cond = sync.NewCond(&q.mu)
	return q
}

// put takes bytes at an offset.
func (q *inbox) put(offset uint64, p []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	end := offset + uint64(len(p))
	switch {
	case q.err != nil || end <= q.received:
		return nil
	case offset > q.received:
		return wire.Failf(wire.KindBadOffset, "bytes %d to %d never came", q.received, offset)
	case q.ended:
		return wire.Failf(wire.KindBadOffset, "bytes after the end at %d", q.received)
	}
	p = p[q.received-offset:]
	if q.held+len(p) > wire.Window {
		return wire.Failf(wire.KindTooMany, "sender exceeded its window at %d", q.received)
	}
	q.parts = append(q.parts, append([]byte(nil), p...))
	q.held += len(p)
	q.received = end
	q.cond.Broadcast()
	return nil
}

// end says that the stream has no bytes at or after offset.
func (q *inbox) end(offset uint64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil && offset != q.received {
		return wire.Failf(wire.KindBadOffset, "end at %d, but %d bytes came", offset, q.received)
	}
	q.ended = true
	q.cond.Broadcast()
	return nil
}

// fail ends the inbox for good; the first error wins.
func (q *inbox) fail(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
		q.parts = nil
	}
	q.cond.Broadcast()
}

// poke makes waiters look again.
func (q *inbox) poke() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.cond.Broadcast()
}

// next waits for bytes. It returns io.EOF after the end.
func (q *inbox) next() ([]byte, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		switch {
		case q.err != nil:
			return nil, q.err
		case len(q.parts) > 0:
			p := q.parts[0]
			q.parts = q.parts[1:]
			q.held -= len(p)
			q.cond.Broadcast()
			return p, nil
		case q.ended:
			return nil, io.EOF
		}
		q.cond.Wait()
	}
}

// limit returns up to which offset the sender may send.
func (q *inbox) limit() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.limitLocked()
}

func (q *inbox) limitLocked() uint64 { return q.received + uint64(wire.Window-q.held) }
