// Package svc runs services: it starts them in order, restarts one that
// fails with a growing pause, stops them in reverse order, and says which are
// healthy. It also loads configuration: one struct per binary, defaults set
// by its maker, unknown keys refused.
package svc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Service is something that runs until its context ends.
type Service interface {
	// Name is unique within a group.
	Name() string
	// Run runs until ctx ends, and then returns nil after it has tidied up.
	// Any other return is a failure, and the group runs it again. It calls
	// ready once when it is able to serve.
	Run(ctx context.Context, ready func()) error
}

// Func makes a Service of a function.
func Func(name string, run func(ctx context.Context, ready func()) error) Service {
	return fn{name, run}
}

type fn struct {
	name string
	run  func(context.Context, func()) error
}

func (f fn) Name() string                                { return f.name }
func (f fn) Run(ctx context.Context, ready func()) error { return f.run(ctx, ready) }

// State is how one service is.
type State struct {
	Name     string    `json:"name"`
	Ready    bool      `json:"ready"`
	Since    time.Time `json:"since"`
	Restarts int       `json:"restarts"`
	Error    string    `json:"error,omitempty"` // of the last failure
}

// Options of a group. The zero value is usable.
type Options struct {
	Log       *slog.Logger
	MinPause  time.Duration // before the first restart, default 100 ms
	MaxPause  time.Duration // at most, default 10 s
	StopAfter time.Duration // time for each service to stop, default 20 s
	MustStart time.Duration // time for each service to become ready the first time, default 1 minute
}

// Group runs services.
type Group struct {
	opts     Options
	services []Service
	mu       sync.Mutex
	states   map[string]*State
}

// NewGroup makes a group; services start in the order given and stop in the
// reverse.
func NewGroup(opts Options, services ...Service) *Group {
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	opts.MinPause = or(opts.MinPause, 100*time.Millisecond)
	opts.MaxPause = or(opts.MaxPause, 10*time.Second)
	opts.StopAfter = or(opts.StopAfter, 20*time.Second)
	opts.MustStart = or(opts.MustStart, time.Minute)
	g := &Group{opts: opts, services: services, states: map[string]*State{}}
	for _, s := range services {
		g.states[s.Name()] = &State{Name: s.Name(), Since: time.Now()}
	}
	return g
}

func or(d, def time.Duration) time.Duration {
	if d <= 0 {
		return def
	}
	return d
}

// Run starts every service, each after the one before it is ready, calls
// ready (which may be nil) when all are, and runs until ctx ends; then it
// stops them in reverse order. It returns an error if one does not become
// ready at first, or does not stop in time.
func (g *Group) Run(ctx context.Context, ready func()) error {
	var running []*runner
	var startErr error
	for _, s := range g.services {
		r := g.start(s)
		running = append(running, r)
		if startErr = g.awaitReady(ctx, r); startErr != nil || ctx.Err() != nil {
			break
		}
	}
	if startErr == nil && ctx.Err() == nil {
		if ready != nil {
			ready()
		}
		<-ctx.Done()
	}
	errs := []error{startErr}
	for _, r := range slices.Backward(running) {
		errs = append(errs, g.stop(r))
	}
	return errors.Join(errs...)
}

type runner struct {
	name   string
	cancel context.CancelFunc
	ready  chan struct{} // closed when ready the first time
	failed chan error    // the first failure before that
	done   chan struct{}
}

func (g *Group) start(s Service) *runner {
	ctx, cancel := context.WithCancel(context.Background())
	r := &runner{name: s.Name(), cancel: cancel, ready: make(chan struct{}), failed: make(chan error, 1), done: make(chan struct{})}
	go g.keep(ctx, s, r)
	return r
}

// fail tells of the first failure, if the service was never ready: who waits
// for it would otherwise take either for the news.
func (r *runner) fail(err error) {
	select {
	case <-r.ready:
		return
	default:
	}
	select {
	case r.failed <- err:
	default:
	}
}

// keep runs a service again and again until ctx ends.
func (g *Group) keep(ctx context.Context, s Service, r *runner) {
	defer close(r.done)
	var once sync.Once
	log, pause := g.opts.Log.With("service", r.name), g.opts.MinPause
	for ctx.Err() == nil {
		began := time.Now()
		err := runOnce(ctx, s, func() {
			g.set(r.name, func(st *State) { st.Ready, st.Since, st.Error = true, time.Now(), "" })
			once.Do(func() { close(r.ready) })
		})
		g.set(r.name, func(st *State) { st.Ready, st.Since = false, time.Now() })
		if ctx.Err() != nil {
			if err != nil && !errors.Is(err, context.Canceled) {
				log.Warn("service ended with an error while stopping", "error", err)
			}
			return
		}
		if err == nil {
			err = errors.New("it returned although nobody stopped it")
		}
		g.set(r.name, func(st *State) { st.Restarts, st.Error = st.Restarts+1, err.Error() })
		r.fail(err)
		if time.Since(began) > g.opts.MaxPause {
			pause = g.opts.MinPause
		}
		log.Error("service failed and starts again", "error", err, "after", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, g.opts.MaxPause)
	}
}

func runOnce(ctx context.Context, s Service, ready func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return s.Run(ctx, ready)
}

// awaitReady waits for the first readiness; a service that fails before it is
// given up, because what it lacks (a port, a right) rarely comes by waiting.
func (g *Group) awaitReady(ctx context.Context, r *runner) error {
	select {
	case <-r.ready:
		return nil
	case err := <-r.failed:
		return fmt.Errorf("%s did not start: %w", r.name, err)
	case <-ctx.Done():
		return nil
	case <-time.After(g.opts.MustStart):
		return fmt.Errorf("%s was not ready within %s", r.name, g.opts.MustStart)
	}
}

func (g *Group) stop(r *runner) error {
	r.cancel()
	select {
	case <-r.done:
		return nil
	case <-time.After(g.opts.StopAfter):
		return fmt.Errorf("%s did not stop within %s", r.name, g.opts.StopAfter)
	}
}

func (g *Group) set(name string, f func(*State)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g.states[name])
}

// States says how every service is, in order of start.
func (g *Group) States() []State {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]State, 0, len(g.services))
	for _, s := range g.services {
		out = append(out, *g.states[s.Name()])
	}
	return out
}

// Healthy reports whether every service is ready.
func (g *Group) Healthy() bool {
	return !slices.ContainsFunc(g.States(), func(s State) bool { return !s.Ready })
}

// SignalContext ends with SIGINT or SIGTERM; a second signal ends the process
// at once.
func SignalContext(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case <-ch:
			cancel()
		case <-ctx.Done():
		}
		if _, ok := <-ch; ok {
			os.Exit(130)
		}
	}()
	return ctx, func() { signal.Stop(ch); close(ch); cancel() }
}
