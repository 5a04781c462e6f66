package hostend

import (
	"context"
	"fmt"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// WatchEvent is one change below a watched path: Op is create, write, remove,
// rename or chmod. An overflow has no path and means that events were lost.
type WatchEvent = wire.WatchEvent

// maxWaiting is what the guest may send before an event is taken.
const maxWaiting = 256

// Watcher is a watch. Take events with Next, and Close it in the end.
type Watcher struct {
	conn   *Conn
	id     uint32
	answer *answer
	wake   chan struct{}

	mu    sync.Mutex
	queue []WatchEvent
	taken uint64
	err   error
}

// Watch reports changes of a file or directory, with recursive also of the
// directories below it (at most 1024). It has begun when it returns. A consumer
// that is slow gets an overflow event instead of what it missed. Not every file
// system tells of changes; those that other machines make are never seen.
// Errors: ErrNotFound, ErrPermission, ErrTooMany (32 watches), ErrChannelLost.
func (c *Conn) Watch(ctx context.Context, path Path, recursive bool) (*Watcher, error) {
	op := "watch " + path.Name
	w := &Watcher{conn: c, answer: newAnswer(op), wake: make(chan struct{}, 1)}
	id, err := c.open(ctx, wire.MethodWatch, wire.FileWatch{At: path.at(), Recursive: recursive}, w)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	w.id = id
	if err := w.answer.wait(ctx, nil); err != nil {
		c.cancel(id)
		return nil, err
	}
	return w, nil
}

// Next waits for the next event.
func (w *Watcher) Next(ctx context.Context) (WatchEvent, error) {
	for {
		w.mu.Lock()
		if len(w.queue) > 0 {
			ev := w.queue[0]
			w.queue = w.queue[1:]
			w.taken++
			taken := w.taken
			w.mu.Unlock()
			if taken%32 == 0 {
				// A lost channel shows when the queue is empty.
				_ = w.conn.send(ctx, wire.Frame{Type: wire.TypeAck, Stream: w.id, Offset: taken})
			}
			return ev, nil
		}
		err := w.err
		w.mu.Unlock()
		if err != nil {
			return WatchEvent{}, err
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return WatchEvent{}, ctx.Err()
		}
	}
}

// Close ends the watch.
func (w *Watcher) Close() {
	w.conn.cancel(w.id)
	w.end(fmt.Errorf("%s: closed", w.answer.op))
}

func (w *Watcher) end(err error) {
	w.mu.Lock()
	if w.err == nil {
		w.err = err
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *Watcher) lost(err error) {
	w.answer.fail(err)
	w.end(fmt.Errorf("%s: %w", w.answer.op, err))
}

// frame implements receiver.
func (w *Watcher) frame(f wire.Frame) error {
	if !w.answer.settled() {
		_, err := w.answer.frame(f)
		return err
	}
	switch f.Type {
	case wire.TypeEvent:
		var ev WatchEvent
		if err := decode(f.Payload, &ev); err != nil {
			return err
		}
		w.mu.Lock()
		full := len(w.queue) >= 2*maxWaiting
		if !full && w.err == nil {
			w.queue = append(w.queue, ev)
		}
		w.mu.Unlock()
		if full {
			return fmt.Errorf("%w: more than %d events on their way", ErrProtocol, maxWaiting)
		}
		w.end(nil)
	case wire.TypeError:
		w.conn.forget(f.Stream)
		w.end(guestError(w.answer.op, f.Payload))
	}
	return nil
}
