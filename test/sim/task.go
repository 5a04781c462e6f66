package sim

import (
	"fmt"
	"iter"
	"runtime/debug"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
)

// task is one thread of a process. Tasks hand control to each other at one place only, park, and only
// the kernel's queue says whose turn it is.
type task struct {
	w      *World
	p      *proc
	name   string
	f      func(*task)
	on     *thread // nil: it did not begin
	park0  uint64  // which wait it is in
	dead   bool
	killed bool
	done   signal
}

// killed unwinds a task whose process ended.
type killed struct{}

// thread is a coroutine on which one task after another runs, so that stacks grow once.
type thread struct {
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	t     *task
}

// thread returns one that is free.
func (w *World) thread() *thread {
	if n := len(w.idle); n > 0 {
		th := w.idle[n-1]
		w.idle = w.idle[:n-1]
		return th
	}
	th := &thread{}
	th.next, th.stop = iter.Pull(func(yield func(struct{}) bool) {
		th.yield = yield
		for {
			th.t.run()
			if !yield(struct{}{}) {
				return
			}
		}
	})
	return th
}

// spawn begins a task of a process. It runs when the present event is over.
func (w *World) spawn(p *proc, name string, f func(*task)) *task {
	t := &task{w: w, p: p, name: name, f: f}
	p.tasks = append(p.tasks, t)
	w.after(0, func() { t.resume(0) })
	return t
}

// run is the whole of a task, until it ends or is killed.
func (t *task) run() {
	defer func() {
		t.dead = true
		if r := recover(); r != nil {
			if _, ok := r.(killed); !ok {
				panic(fmt.Sprintf("task %s of %s: %v\n%s", t.name, t.p.name, r, debug.Stack()))
			}
		}
	}()
	t.f(t)
}

// resume runs a task on, if it still is in that wait.
func (t *task) resume(park uint64) {
	if t.dead || t.park0 != park {
		return
	}
	if t.p.paused {
		t.p.backlog = append(t.p.backlog, func() { t.resume(park) })
		return
	}
	t.park0++
	if t.on == nil {
		t.on = t.w.thread()
		t.on.t = t
	}
	th := t.on
	th.next()
	if !t.dead {
		return
	}
	if t.killed {
		return // meanwhile, with its process
	}
	t.w.idle = append(t.w.idle, th)
	t.p.tasks = remove(t.p.tasks, t)
	t.done.fire(t.w)
}

// kill ends a task where it waits.
func (t *task) kill() {
	if t.dead {
		return
	}
	t.dead, t.killed = true, true
	if t.on != nil {
		t.on.stop()
	}
}

func remove[T comparable](s []T, v T) []T {
	if i := slices.Index(s, v); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}

// signal is set once, or again and again by whoever takes it.
type signal struct {
	set   bool
	waits []waiter
}

type waiter struct {
	t    *task
	park uint64
}

func (s *signal) fire(w *World) {
	s.set = true
	waits := s.waits
	s.waits = nil
	for _, x := range waits {
		w.after(0, func() { x.t.resume(x.park) })
	}
}

// take resets a signal and reports whether it was set.
func (s *signal) take() bool {
	was := s.set
	s.set = false
	return was
}

// wait parks until one of the signals is set, ctx ends, or d passes (d < 0: never).
func (t *task) wait(c *ctx, d time.Duration, on ...*signal) {
	if c != nil && c.end.set {
		return
	}
	for _, s := range on {
		if s.set {
			return
		}
	}
	park := t.park0
	if c != nil {
		c.end.waits = append(c.end.waits, waiter{t, park})
	}
	for _, s := range on {
		s.waits = append(s.waits, waiter{t, park})
	}
	if d >= 0 {
		t.w.after(d, func() { t.resume(park) })
	}
	if !t.on.yield(struct{}{}) {
		panic(killed{})
	}
}

// sleep waits for d on the clock of the task's process.
func (t *task) sleep(c *ctx, d time.Duration) error {
	t.wait(c, t.p.real(d))
	return c.err()
}

// ctx ends with its parent, by cancel, or at a time.
type ctx struct {
	end   signal
	kind  errkind.Kind
	below []*ctx
	until time.Duration // 0: none
}

func (w *World) background() *ctx { return &ctx{} }

// within is a context that ends after d of real time, and with its parent.
func (w *World) within(c *ctx, d time.Duration) *ctx {
	n := w.under(c)
	n.until = w.now + max(d, 0)
	if c != nil && c.until != 0 {
		n.until = min(n.until, c.until)
	}
	w.after(n.until-w.now, func() { n.cancel(w, errkind.Deadline) })
	return n
}

// under is a context that ends with its parent.
func (w *World) under(c *ctx) *ctx {
	n := &ctx{}
	if c != nil {
		n.until = c.until
		if c.end.set {
			n.kind, n.end.set = c.kind, true
		} else {
			c.below = append(c.below, n)
		}
	}
	return n
}

func (c *ctx) cancel(w *World, kind errkind.Kind) {
	if c.end.set {
		return
	}
	c.kind = kind
	c.end.fire(w)
	for _, b := range c.below {
		b.cancel(w, kind)
	}
	c.below = nil
}

func (c *ctx) over() bool { return c != nil && c.end.set }

func (c *ctx) err() error {
	if c == nil || !c.end.set {
		return nil
	}
	return fail(c.kind, "the context ended")
}
