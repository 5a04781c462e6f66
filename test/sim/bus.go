package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
)

// net is what the bus does to messages.
type net struct {
	drop, dup, late float64
	cut             map[[2]string]bool // ordered pairs of machines
}

func (w *World) connected(a, b *proc) bool {
	return a.node == b.node || !w.net.cut[[2]string{a.node, b.node}]
}

// delay is how long a message takes. Messages overtake each other.
func (w *World) delay() time.Duration {
	switch x := w.rng.Float64(); {
	case x < w.net.late/4:
		w.cov.hit("message very late")
		return w.between(time.Second, 20*time.Second)
	case x < w.net.late:
		w.cov.hit("message late")
		return w.between(10*time.Millisecond, 700*time.Millisecond)
	}
	return w.between(200*time.Microsecond, 2*time.Millisecond)
}

// carry takes a message from a to b, perhaps twice, perhaps never.
func (w *World) carry(a, b *proc, what string, deliver func()) {
	n := 1
	switch {
	case !w.connected(a, b):
		w.cov.hit("message into a cut link")
		return
	case w.chance(w.net.drop):
		w.cov.hit("message dropped")
		w.say("drop %s %s>%s", what, a.name, b.name)
		return
	case w.chance(w.net.dup):
		w.cov.hit("message doubled")
		n = 2
	}
	gen := b.gen
	for range n {
		w.after(w.delay(), func() {
			if b.up && b.gen == gen {
				deliver()
			}
		})
	}
}

// call asks a service for something and waits for the answer until ctx ends.
func (t *task) call(c *ctx, service, method string, req any) (any, error) {
	w, from := t.w, t.p
	to := w.server(service, method)
	if to == nil {
		t.wait(c, w.between(300*time.Microsecond, 2*time.Millisecond))
		return nil, &fault{kind: errkind.Unavailable, why: "nobody serves " + service + "." + method, lone: true}
	}
	var got signal
	var resp any
	var err error
	w.carry(from, to, method, func() {
		h := to.serve[method]
		if h == nil {
			return
		}
		hc := w.background()
		if c != nil && c.until != 0 {
			hc = w.within(nil, c.until-w.now)
		}
		w.spawn(to, method, func(ht *task) {
			r, e := h(ht, hc, from.host, req)
			w.carry(to, from, method+" answer", func() {
				if !got.set {
					resp, err = r, e
					got.fire(w)
				}
			})
		})
	})
	t.wait(c, -1, &got)
	if !got.set {
		return nil, fail(c.kind, "no answer of "+service+"."+method)
	}
	return resp, err
}

// server is a process that serves a method; with several, any of them.
func (w *World) server(service, method string) *proc {
	var all []*proc
	for _, p := range w.services[service] {
		if p.up && p.serve[method] != nil {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return pick(&w.kernel, all)
}

// ask is bus.Invoke: to the scheduler, which has one leader, it sends the same request again while
// nobody leads or the leader that was asked does not any more, until its context ends.
func ask[R any](t *task, c *ctx, service, method string, req any) (R, error) {
	var none R
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		resp, err := t.call(c, service, method, req)
		if err == nil {
			return resp.(R), nil
		}
		f, _ := err.(*fault)
		if service != "scheduler" || c.over() || !(is(err, errkind.NotLeader) || f != nil && f.lone) {
			return none, err
		}
		t.wait(c, pause)
		if c.over() {
			return none, err
		}
	}
}
