package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
	"github.com/berth-dev/berth/tools/berth/stack"
)

// Info says how to reach a running cluster; it is <dir>/up.json while it is ready.
type Info struct {
	stack.Info
	Links   string           `json:"links"`
	Members []control.Member `json:"members"`
}

// Say is told what a start waits for.
type Say func(string)

const (
	startTime = 3 * time.Minute // for a phase of the first start, which may unpack images
	sayEvery  = 2 * time.Second
	waitTime  = 20 * time.Second // for the bus, at an orderly stop
)

// supervisor is one running cluster.
type supervisor struct {
	cfg  Config
	log  *slog.Logger
	say  Say
	net  *network
	plan *planner

	// In order of start; every phase stops before those before it.
	nats, schedulers, besides, hosts, gates []*member

	mu    sync.Mutex
	ready bool
	info  Info
}

// Run runs the cluster until ctx ends, then puts active sessions to sleep and stops in order. say,
// which may be nil, hears what the start waits for; ready is called once everything serves.
func Run(ctx context.Context, cfg Config, log *slog.Logger, say Say, ready func(Info)) (err error) {
	if say == nil {
		say = func(string) {}
	}
	if err := cfg.check(); err != nil {
		return err
	}
	unlock, err := stack.Lock(cfg.Stack.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	m, err := cfg.fits(cfg.Stack.Dir)
	if err != nil {
		return err
	}
	if err := stack.RemoveInfo(cfg.Stack.Dir); err != nil {
		return err
	}
	if err := awaitGone(ctx, filepath.Join(cfg.Stack.Dir, "run")); err != nil {
		return err
	}
	s := &supervisor{cfg: cfg, log: log, say: say}
	if s.net, err = openNetwork(cfg.Stack.Dir, m.Network, cfg.Seed); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.net.close()) }()
	m.Network = s.net.prefix.String()
	if err := m.write(cfg.Stack.Dir); err != nil {
		return err
	}
	if err := s.prepare(); err != nil {
		return err
	}
	return s.serve(ctx, ready)
}

// prepare makes everything but processes.
func (s *supervisor) prepare() (err error) {
	s.plan = &planner{cfg: s.cfg, net: s.net, log: s.log, changed: s.changed}
	p := s.plan
	if err := p.folders(); err != nil {
		return err
	}
	if s.nats, err = p.nats(); err != nil {
		return err
	}
	if s.schedulers, err = p.schedulers(); err != nil {
		return err
	}
	if s.besides, err = p.besides(); err != nil {
		return err
	}
	if s.hosts, err = p.hostMembers(); err != nil {
		return err
	}
	if s.gates, err = p.gates(); err != nil {
		return err
	}
	issuer, err := p.issuer()
	if err != nil {
		return err
	}
	s.info.Info = stack.Info{PID: os.Getpid(), URL: p.url, Issuer: issuer, Clients: filepath.Join(s.cfg.Stack.Dir, "clients"),
		Marks: append(s.net.marks(), s.cfg.Stack.Dir)}
	s.info.Links = control.Socket(s.cfg.Stack.Dir)
	for _, h := range s.hosts {
		s.info.Marks = append(s.info.Marks, h.info.Marks...)
	}
	return nil
}

// serve starts the members, and stops them when ctx ends.
func (s *supervisor) serve(ctx context.Context, ready func(Info)) (err error) {
	stopMetrics, err := s.serveMetrics()
	if err != nil {
		return err
	}
	defer stopMetrics()
	stopControl, err := s.serveControl()
	if err != nil {
		return err
	}
	defer stopControl()
	defer s.stop()
	renewing, stopRenewing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRenewing()
	go s.plan.renew(renewing)
	// Schedulers elect a leader while the bus forms; they are asked nothing before it is there.
	s.begin(ctx, s.nats, s.schedulers, s.besides[:1])
	if err := s.await(ctx, s.nats...); err != nil || ctx.Err() != nil {
		return err
	}
	s.begin(ctx, s.besides[1:], s.hosts, s.gates)
	if err := s.await(ctx, slices.Concat(s.schedulers, s.besides, s.hosts, s.gates)...); err != nil || ctx.Err() != nil {
		return err
	}
	if err := s.awaitOne(ctx, s.schedulers); err != nil || ctx.Err() != nil {
		return err
	}
	s.mu.Lock()
	s.ready = true
	s.mu.Unlock()
	s.changed()
	if ready != nil {
		ready(s.current())
	}
	<-ctx.Done()
	s.mu.Lock()
	s.ready = false
	s.mu.Unlock()
	err = stack.RemoveInfo(s.cfg.Stack.Dir)
	if !s.cfg.Stack.LeaveRunning {
		s.drain()
	}
	return err
}

func (s *supervisor) begin(ctx context.Context, groups ...[]*member) {
	for _, g := range groups {
		for _, m := range g {
			m.begin(ctx)
		}
	}
}

// await returns when every member was ready once, or one gave up.
func (s *supervisor) await(ctx context.Context, members ...*member) error {
	began, end := time.Now(), time.After(startTime)
	tick := time.NewTicker(sayEvery)
	defer tick.Stop()
	for i := 0; i < len(members); {
		select {
		case <-ctx.Done():
			return nil
		case <-members[i].started:
			i++
		case err := <-members[i].failed:
			return fmt.Errorf("%s did not start: %w", members[i].name, err)
		case <-tick.C:
			if err := anyFailed(members); err != nil {
				return err
			}
			s.say(fmt.Sprintf("waiting for %s (%.0f s)", missing(members), time.Since(began).Seconds()))
		case <-end:
			return fmt.Errorf("%s did not become ready within %s; see %s", missing(members), startTime, filepath.Join(s.cfg.Stack.Dir, "log"))
		}
	}
	return nil
}

func anyFailed(members []*member) error {
	for _, m := range members {
		select {
		case err := <-m.failed:
			return fmt.Errorf("%s did not start: %w", m.name, err)
		default:
		}
	}
	return nil
}

func missing(members []*member) string {
	var out []string
	for _, m := range members {
		select {
		case <-m.started:
		default:
			out = append(out, m.name)
		}
	}
	return strings.Join(out, ", ")
}

// awaitOne returns when one of the members serves: the one that leads.
func (s *supervisor) awaitOne(ctx context.Context, members []*member) error {
	first := make(chan struct{})
	done := make(chan struct{})
	defer close(done)
	var once sync.Once
	for _, m := range members {
		go func() {
			select {
			case <-m.served:
				once.Do(func() { close(first) })
			case <-done:
			}
		}()
	}
	tick, end := time.NewTicker(sayEvery), time.After(startTime)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-first:
			return nil
		case <-tick.C:
			if err := anyFailed(members); err != nil {
				return err
			}
			s.say("waiting for a scheduler to lead")
		case <-end:
			return fmt.Errorf("no scheduler leads after %s; see %s", startTime, filepath.Join(s.cfg.Stack.Dir, "log"))
		}
	}
}

// stop ends every member that runs, in the order in which nobody misses another.
func (s *supervisor) stop() {
	for _, group := range [][]*member{s.hosts, s.gates, s.besides, s.schedulers, s.nats} {
		var wg sync.WaitGroup
		for _, m := range group {
			wg.Go(m.stop)
		}
		wg.Wait()
	}
}

// heal undoes what tests did to links and members, so that an orderly stop finds everybody. A member
// that is held stays away.
func (s *supervisor) heal() {
	names := s.net.sw.Names()
	for _, from := range names {
		for _, to := range names {
			if from != to {
				_ = s.net.sw.Set(from, to, wire.Rule{}) // both are there
			}
		}
	}
	for _, m := range s.all() {
		if m.show().State == control.Paused {
			_ = m.act(context.Background(), control.Resume) // it may have been killed meanwhile
		}
	}
}

// drain puts sessions to sleep, if there is anybody to ask. What stays awake is taken over by the next
// start.
func (s *supervisor) drain() {
	s.say("putting sessions to sleep")
	s.heal()
	ctx, cancel := context.WithTimeout(context.Background(), waitTime)
	defer cancel()
	login, err := bus.ReadLogin(bus.LoginPath(s.cfg.Stack.Dir, subjects.Service("lifecycle")))
	if err == nil {
		var conn *bus.Conn
		if conn, err = bus.Connect(ctx, login, bus.WithLogger(s.log)); err == nil {
			defer conn.Close()
			stack.Drain(context.Background(), conn, s.log)
			return
		}
	}
	s.log.Warn("sessions stay awake", "error", err)
}

func (s *supervisor) all() (out []*member) {
	for _, g := range [][]*member{s.nats, s.schedulers, s.besides, s.hosts, s.gates} {
		out = append(out, g...)
	}
	return out
}

// current is what up.json says now.
func (s *supervisor) current() Info {
	info := s.info
	for _, m := range s.all() {
		info.Members = append(info.Members, m.show())
	}
	return info
}

// changed keeps up.json true while it is there.
func (s *supervisor) changed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready {
		return
	}
	if err := stack.WriteInfo(s.cfg.Stack.Dir, s.current()); err != nil {
		s.log.Error("cannot say what runs", "error", err)
	}
}
