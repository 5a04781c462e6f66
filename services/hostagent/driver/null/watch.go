package null

import (
	"context"
	"slices"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// maxWaiting is how many ends wait for one who does not read before those of removed sandboxes are
// dropped.
const maxWaiting = 4096

// watcher is one Watch: the ends that it has not told yet, each once.
type watcher struct {
	world *World
	mu    sync.Mutex
	queue []*box
	wake  chan struct{} // holds one sign that the queue grew
}

// add is called with the World locked.
func (w *watcher) add(b *box) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) >= maxWaiting {
		w.queue = slices.DeleteFunc(w.queue, func(b *box) bool { return w.world.boxes[b.sb.ID] != b })
	}
	w.queue = append(w.queue, b)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watcher) next() *box {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		return nil
	}
	b := w.queue[0]
	w.queue = w.queue[1:]
	return b
}

// Watch implements driver.Watcher.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	w, out := &watcher{world: d.world, wake: make(chan struct{}, 1)}, make(chan driver.Event)
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	d.world.watchers[w] = true
	for _, b := range d.world.boxes {
		if b.over() {
			w.add(b)
		}
	}
	go w.tell(ctx, out)
	return out, nil
}

func (w *watcher) tell(ctx context.Context, out chan<- driver.Event) {
	defer close(out)
	defer func() {
		w.world.mu.Lock()
		delete(w.world.watchers, w)
		w.world.mu.Unlock()
	}()
	for ctx.Err() == nil {
		b := w.next()
		if b == nil {
			select {
			case <-w.wake:
			case <-ctx.Done():
			}
			continue
		}
		select {
		case out <- driver.Event{ID: b.sb.ID, Kind: driver.EventExited, ExitStatus: b.status, At: b.ended}:
		case <-ctx.Done():
		}
	}
}
