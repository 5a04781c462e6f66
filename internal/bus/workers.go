package bus

import "time"

// workerIdle is how long a goroutine waits for another request to answer.
const workerIdle = 5 * time.Second

// workers run requests, any number at once, in goroutines that wait for
// another one when they are done: the stack that a handler needs has then grown
// already, which costs more than the goroutine.
type workers struct {
	next chan func()
	end  <-chan struct{} // none is waited for any more
}

func newWorkers(end <-chan struct{}) *workers { return &workers{next: make(chan func()), end: end} }

// run has f run at once, in a goroutine that waits or in a new one.
func (w *workers) run(f func()) {
	select {
	case w.next <- f:
	default:
		go w.work(f)
	}
}

func (w *workers) work(f func()) {
	idle := time.NewTimer(workerIdle)
	defer idle.Stop()
	for {
		f()
		idle.Reset(workerIdle)
		select {
		case f = <-w.next:
		case <-idle.C:
			return
		case <-w.end:
			return
		}
	}
}
