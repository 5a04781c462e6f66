package sim

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
)

// Options of one simulation.
type Options struct {
	// Trace, if set, gets every line of the trace.
	Trace io.Writer
	// Mutation is a guard that is switched off, to see that the simulation finds it.
	Mutation Mutation

	stops bool // watchdogs stop what they froze
}

// Broken is an invariant that did not hold.
type Broken struct {
	Invariant string
	What      string
	Step      int
	At        time.Duration
}

func (b *Broken) Error() string {
	return fmt.Sprintf("invariant %s broken at step %d (%s): %s", b.Invariant, b.Step, b.At, b.What)
}

// Result of one simulation.
type Result struct {
	Seed    uint64
	Steps   int
	Virtual time.Duration
	Hash    uint64 // of the trace
	Broken  *Broken
	Tail    []string // the newest lines of the trace
	Hits    Coverage
}

// World is everything there is in one simulation.
type World struct {
	kernel
	opt      Options
	cov      Coverage
	broken   *Broken
	procs    []*proc
	idle     []*thread
	services map[string][]*proc
	net      net
	faults   faults
	undo     []func()
	calm     bool
	pace     time.Duration // of users
	draining map[ids.Host]bool
	linger   time.Duration // not at rest before

	group       *group
	stream      *stream
	store       *store
	credentials *credentials
	lifecycle   *lifecycle
	identity    *identity
	machines    []*machine
	users       *users
	advice      *advice

	truth
}

// step bounds: no simulation is longer.
const (
	maxSteps = 3_000_000
	quietIn  = 15 * time.Minute // of virtual time, once nothing fails any more
)

// Run plays one seed.
func Run(seed uint64, opt Options) (res Result) {
	w := newWorld(seed, opt)
	defer func() {
		if r := recover(); r != nil {
			w.broken = &Broken{Invariant: "no-panic", What: fmt.Sprint(r), Step: w.steps, At: w.now}
		}
		w.finish()
		res = Result{Seed: seed, Steps: w.steps, Virtual: w.now, Hash: w.hash, Broken: w.broken, Tail: w.tail(), Hits: w.cov}
	}()
	w.begin()
	w.play(w.between(40*time.Second, 200*time.Second), nil)
	w.settleDown()
	w.play(quietIn, w.restless)
	if w.broken == nil {
		if why := w.restless(); why != "" {
			w.inspect()
			w.breaks("ends-quiet", "%s after nothing has failed for %s: %s", "not at rest", quietIn, why)
		}
	}
	if w.broken == nil {
		w.sameReplicas()
	}
	return res
}

func newWorld(seed uint64, opt Options) *World {
	w := &World{kernel: newKernel(seed, opt.Trace), opt: opt, cov: Coverage{}, services: map[string][]*proc{}, draining: map[ids.Host]bool{}, truth: newTruth(), advice: newAdvice(seed)}
	w.net.cut = map[[2]string]bool{}
	w.opt.stops = true
	w.pace = w.between(200*time.Millisecond, 6*time.Second)
	w.chooseFaults()
	w.store = &store{w: w, all: map[string]*manifest{}}
	w.group = newGroup(w, 3)
	w.stream = newStream(w)
	w.credentials = newCredentials(w)
	w.lifecycle = newLifecycle(w)
	w.identity = newIdentity(w)
	for i := range 2 + w.rng.IntN(3) {
		w.machines = append(w.machines, newMachine(w, i+1))
	}
	w.users = newUsers(w, 2+w.rng.IntN(5))
	return w
}

func (w *World) begin() {
	w.stream.p.start()
	for _, r := range w.group.reps {
		r.p.start()
	}
	w.credentials.p.start()
	w.lifecycle.p.start()
	w.identity.p.start()
	for _, m := range w.machines {
		m.boot()
	}
	w.users.begin()
	w.after(w.between(5*time.Second, 15*time.Second), w.trouble)
	w.after(time.Second, w.scribble)
}

func (w *World) scribble() {
	for _, m := range w.machines {
		m.scribble()
	}
	w.after(w.between(200*time.Millisecond, 2*time.Second), w.scribble)
}

// play runs events for d of virtual time, until an invariant breaks, or until rest is empty.
func (w *World) play(d time.Duration, rest func() string) {
	end := w.now + d
	next := w.now
	for w.broken == nil {
		if rest != nil && w.now >= next {
			if rest() == "" {
				return
			}
			next = w.now + 2*time.Second
		}
		if len(w.queue) == 0 || w.queue[0].at > end {
			w.now = end
			return
		}
		e, _ := w.pop()
		w.now = e.at
		w.steps++
		e.run()
		w.check()
		if w.steps > maxSteps {
			w.breaks("bounded", "more than %d steps", maxSteps)
		}
	}
}

// inspect writes down what there is when the end is not quiet.
func (w *World) inspect() {
	for _, p := range w.procs {
		names := map[string]int{}
		for _, t := range p.tasks {
			names[t.name]++
		}
		w.say("process %s up %v paused %v tasks %v", p.name, p.up, p.paused, names)
	}
	for _, s := range sorted(w.group.oracle) {
		w.say("session %s %s epoch %s host %q newest %q dirty %v head %q left %v needs stop %v failure %v wake %v", short(s.Key), s.State, s.Epoch, s.Host, s.Newest, s.Dirty, s.Manifest, s.Left, s.NeedsStop, s.Failure, s.Wake)
	}
	for _, k := range w.stream.sortedTimers() {
		m := w.stream.timers[k]
		w.say("timer %s of %s due %s tries %d again at %s", k.kind, short(ids.SessionKey(k.session)), m.t.GetDue().AsTime().Sub(epoch0), m.late, m.at)
	}
	for _, u := range w.users.all {
		for _, r := range u.open {
			w.say("user %d: %s %s tries %d durable %v", u.n, r.verb, r.id, r.tries, r.stored != nil)
		}
	}
}

// settleDown heals everything.
func (w *World) settleDown() {
	w.say("heal")
	w.calm, w.users.calm = true, true
	for _, f := range w.undo {
		f()
	}
	w.faults.failWake, w.faults.slowWake = 0, 0
	w.net = net{cut: map[[2]string]bool{}}
	for _, p := range w.procs {
		p.resume()
		p.ready()
	}
	for _, m := range w.machines {
		m.awake()
		m.boot()
		if m.up {
			m.dog.start()
			m.agent.start()
		}
	}
	w.spawn(w.users.p, "operator", w.tidy)
	if w.chance(0.1) { // what sleeps reaches the end of its retention
		w.stream.early, w.linger = true, w.now+6*time.Minute
	}
}

// ready starts a service that is down. Machines see to their own.
func (p *proc) ready() {
	if p.host == "" && !p.up {
		p.start()
	}
}

// tidy is the operator once nothing fails any more: hosts that will not come back are removed, one
// that lives is drained for good, the others serve.
func (w *World) tidy(t *task) {
	for _, m := range w.machines {
		if !m.removed && w.group.oracle.Removed(m.id) { // by a request whose answer was late
			m.cut()
			m.dead, m.removed = true, true
		}
		for m.dead && !m.removed && w.group.oracle.Host(m.id) != nil {
			if w.takeOut(t, m, true) {
				break
			}
			t.sleep(nil, 2*time.Second)
		}
	}
	for len(w.draining) > 0 {
		t.sleep(nil, time.Second)
	}
	for _, m := range w.machines {
		if !m.removed && w.group.oracle.Removed(m.id) { // by a request whose answer was late
			m.cut()
			m.dead, m.removed = true, true
		}
	}
	var left []*machine
	for _, m := range w.machines {
		if !m.removed && !m.dead {
			left = append(left, m)
		}
	}
	if len(left) > 1 && w.chance(0.4) {
		w.empty(t, pick(&w.kernel, left))
	}
	w.tidied = true
}

// empty drains a host for good. The operator looks at it until it is drained, and asks again when a late
// resume that was sent before took the drain back.
func (w *World) empty(t *task, m *machine) {
	for range 100 {
		if _, err := ask[struct{}](t, w.within(nil, 20*time.Second), "scheduler", "drain", drainReq{m.id, true, 20 * time.Second}); err == nil {
			w.drained = m
			break
		}
		t.sleep(nil, time.Second)
	}
	w.spawn(t.p, "operator", func(t *task) {
		for w.drained == m {
			h := w.group.oracle.Host(m.id)
			if h == nil || h.Drained {
				return
			}
			if !h.Draining {
				w.cov.hit("drain taken back by a late resume")
				_, _ = ask[struct{}](t, w.within(nil, 20*time.Second), "scheduler", "drain", drainReq{m.id, true, 20 * time.Second})
			}
			t.sleep(nil, 2*time.Second)
		}
	})
}

// finish ends every task, so that nothing of the simulation stays.
func (w *World) finish() {
	for _, p := range w.procs {
		tasks := p.tasks
		p.tasks = nil
		for _, t := range tasks {
			t.kill()
		}
	}
	for _, th := range w.idle {
		th.stop()
	}
	w.queue, w.idle = nil, nil
}

// breaks notes the first invariant that did not hold.
func (w *World) breaks(invariant, format string, args ...any) {
	if w.broken == nil {
		w.broken = &Broken{Invariant: invariant, What: fmt.Sprintf(format, args...), Step: w.steps, At: w.now}
		w.say("BROKEN %s", w.broken.Error())
	}
}

// served is the word of a service that begins to serve; callers wait for it by asking again.
func (w *World) served(string) {}

func sortedKeys[K ~string, V any](m map[K]V) []K {
	out := make([]K, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func sortedDisks[V any](m map[host.Key]V) []host.Key {
	out := make([]host.Key, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b host.Key) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), a.Generation.Compare(b.Generation))
	})
	return out
}

// short names a session in a trace.
func short(k ids.SessionKey) string { return string(k[:min(len(k), 6)]) }
