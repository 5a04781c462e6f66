package wire

import (
	"container/heap"
	"sync"
	"time"
)

// delayed runs functions when they are due, those due at the same time in the order in which they came.
type delayed struct {
	mu   sync.Mutex
	heap later
	n    uint64
	more chan struct{} // something is due earlier than before
	quit chan struct{}
}

type item struct {
	at time.Time
	n  uint64
	f  func()
}

type later []item

func (h later) Len() int { return len(h) }
func (h later) Less(i, j int) bool {
	if h[i].at.Equal(h[j].at) {
		return h[i].n < h[j].n
	}
	return h[i].at.Before(h[j].at)
}
func (h later) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *later) Push(x any)   { *h = append(*h, x.(item)) }
func (h *later) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = item{}
	*h = old[:len(old)-1]
	return last
}

func (d *delayed) start(wg *sync.WaitGroup) {
	d.more, d.quit = make(chan struct{}, 1), make(chan struct{})
	wg.Go(d.run)
}

func (d *delayed) stop() { close(d.quit) }

func (d *delayed) push(at time.Time, f func()) {
	d.mu.Lock()
	d.n++
	heap.Push(&d.heap, item{at, d.n, f})
	first := d.heap[0].n == d.n
	d.mu.Unlock()
	if first {
		select {
		case d.more <- struct{}{}:
		default:
		}
	}
}

// run sends what is due and sleeps until the next is.
func (d *delayed) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait := time.Hour
		for {
			f, left := d.take(time.Now())
			if f == nil {
				wait = left
				break
			}
			f()
		}
		timer.Reset(wait)
		select {
		case <-d.quit:
			return
		case <-d.more:
		case <-timer.C:
		}
	}
}

// take removes the first that is due; else it says how long to wait for it.
func (d *delayed) take(now time.Time) (func(), time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.heap) == 0 {
		return nil, time.Hour
	}
	if left := d.heap[0].at.Sub(now); left > 0 {
		return nil, left
	}
	return heap.Pop(&d.heap).(item).f, 0
}
