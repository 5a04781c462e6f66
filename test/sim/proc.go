package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// proc is a process: it dies with its tasks and all that they kept in memory.
type proc struct {
	w       *World
	name    string
	node    string // machine; links are cut between machines
	host    ids.Host
	up      bool
	paused  bool
	backlog []func()
	tasks   []*task
	begin   func() // what a start does
	ended   func() // what a crash loses
	// rate is how fast its monotonic clock runs, and skew how far its wall clock is off.
	rate  float64
	skew  time.Duration
	gen   int // starts
	serve map[string]handler
}

// handler answers one method. It runs as a task of the serving process.
type handler func(t *task, c *ctx, from ids.Host, req any) (any, error)

func (w *World) proc(name, node string) *proc {
	p := &proc{w: w, name: name, node: node, rate: 1, serve: map[string]handler{}}
	w.procs = append(w.procs, p)
	return p
}

func (p *proc) start() {
	if p.up {
		return
	}
	p.up, p.paused = true, false
	p.gen++
	p.w.say("start %s", p.name)
	if p.begin != nil {
		p.begin()
	}
}

// crash is kill -9.
func (p *proc) crash() {
	if !p.up {
		return
	}
	p.up, p.paused, p.backlog = false, false, nil
	tasks := p.tasks
	p.tasks = nil
	for _, t := range tasks {
		t.kill()
	}
	clear(p.serve)
	if p.ended != nil {
		p.ended()
	}
	p.w.say("crash %s", p.name)
}

// pause is SIGSTOP.
func (p *proc) pause() {
	if p.up && !p.paused {
		p.paused = true
		p.w.say("pause %s", p.name)
	}
}

func (p *proc) resume() {
	if !p.paused {
		return
	}
	p.paused = false
	p.w.say("resume %s", p.name)
	late := p.backlog
	p.backlog = nil
	for _, f := range late {
		p.w.after(0, f)
	}
}

// running: it can do something now.
func (p *proc) running() bool { return p.up && !p.paused }

// mono is the process's monotonic clock.
func (p *proc) mono() time.Duration { return time.Duration(float64(p.w.now) * p.rate) }

// real converts a duration of its clock to real time.
func (p *proc) real(d time.Duration) time.Duration {
	if d < 0 {
		return d
	}
	return time.Duration(float64(d) / p.rate)
}

// wall is what the process thinks that the time is.
func (p *proc) wall() time.Time { return epoch0.Add(p.w.now + p.skew) }

// fault is an error with its kind.
type fault struct {
	kind  errkind.Kind
	why   string
	since time.Time // of a refusal as busy
	lone  bool      // nobody serves what was called
	final bool      // the stored outcome of a request
}

func (f *fault) Error() string { return f.kind.String() + ": " + f.why }

func fail(kind errkind.Kind, why string) error { return &fault{kind: kind, why: why} }

// kindOf is the kind of an error, OK for none.
func kindOf(err error) errkind.Kind {
	if err == nil {
		return errkind.OK
	}
	if f, ok := err.(*fault); ok {
		return f.kind
	}
	return errkind.Internal
}

func is(err error, k errkind.Kind) bool { return err != nil && kindOf(err) == k }
