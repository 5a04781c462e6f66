package containerd

import (
	"context"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

const (
	watchBuffer  = 256
	watchBackoff = 100 * time.Millisecond
	watchPeriod  = 2 * time.Second // of a look at everything, beside the events
	statusGone   = 255             // of a sandbox that vanished: its own status is not known
	maxTold      = 4096            // then some events may come twice
)

// watcher is one Watch.
type watcher struct {
	d    *Driver
	out  chan driver.Event
	told map[ids.SandboxID]map[driver.EventKind]bool
	late map[ids.SandboxID]int // looks at an exit whose status was not known yet
	hits map[ids.SandboxID]uint64
}

// Watch implements driver.Watcher. It outlives containerd: after each break it looks at the state
// of every sandbox again, so that no exit is missed.
func (d *Driver) Watch(ctx context.Context) (<-chan driver.Event, error) {
	w := &watcher{d: d, out: make(chan driver.Event, watchBuffer), told: map[ids.SandboxID]map[driver.EventKind]bool{}, late: map[ids.SandboxID]int{},
		hits: map[ids.SandboxID]uint64{}}
	go w.loop(ctx)
	return w.out, nil
}

func (w *watcher) loop(ctx context.Context) {
	defer close(w.out)
	for ctx.Err() == nil {
		if err := w.follow(ctx); err != nil && ctx.Err() == nil {
			w.d.log.Debug("watch of sandboxes broke; watching again", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchBackoff):
		}
	}
}

// follow looks at everything now and every watchPeriod, and takes containerd's events in between.
func (w *watcher) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := w.d.ctrd.events.Subscribe(ctx, &eventsapi.SubscribeRequest{
		Filters: []string{`topic=="/tasks/exit",namespace==` + namespace, `topic=="/tasks/oom",namespace==` + namespace},
	})
	if err != nil {
		return err
	}
	events, broken := make(chan *types.Envelope), make(chan error, 1)
	go func() {
		for {
			env, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case events <- env:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		if err := w.look(ctx); err != nil {
			return err
		}
		if err := w.events(ctx, events, broken); err != nil {
			return err
		}
	}
}

// events takes events for one watchPeriod.
func (w *watcher) events(ctx context.Context, events <-chan *types.Envelope, broken <-chan error) error {
	period := time.After(watchPeriod)
	for {
		select {
		case env := <-events:
			w.take(ctx, env.Topic, env.Event)
		case err := <-broken:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-period:
			return nil
		}
	}
}

// look tells of the sandboxes that ended and of which no event told, or that vanished.
func (w *watcher) look(ctx context.Context) error {
	found, err := w.d.find(ctx)
	if err != nil {
		return err
	}
	for _, f := range found {
		switch {
		case f.State == driver.Running:
			w.d.sawRunning(f.ID, f.PID)
			w.limits(ctx, f.ID, time.Now())
		case w.told[f.ID][driver.EventExited]:
		case f.State == driver.Exited:
			w.found(ctx, f.ID)
		case w.d.hasRun(f.ID):
			w.exited(ctx, driver.Event{ID: f.ID, Kind: driver.EventExited, ExitStatus: statusGone, At: time.Now()})
		}
	}
	return nil
}

// found tells of an exit that was found by looking. A runtime may call a process stopped before it
// knows its status, which is never made up: after a second look the status is 'not known'.
func (w *watcher) found(ctx context.Context, id ids.SandboxID) {
	e := driver.Event{ID: id, Kind: driver.EventExited, ExitStatus: statusGone, At: time.Now()}
	r, err := call(ctx, w.d.ctrd.tasks.Get, &tasksapi.GetRequest{ContainerID: string(id)})
	known := err == nil && r.Process != nil && r.Process.ExitedAt != nil && r.Process.ExitedAt.AsTime().Unix() > 0
	if !known && w.late[id] == 0 {
		w.late[id]++
		return
	}
	delete(w.late, id)
	if known {
		e.ExitStatus, e.At = w.d.ownStatus(id, r.Process.ExitStatus), r.Process.ExitedAt.AsTime()
	}
	w.exited(ctx, e)
}

func (w *watcher) take(ctx context.Context, topic string, any *anypb.Any) {
	switch topic {
	case "/tasks/oom":
		var e eventtypes.TaskOOM
		if proto.Unmarshal(any.GetValue(), &e) == nil {
			w.tell(ctx, driver.Event{ID: ids.SandboxID(e.ContainerID), Kind: driver.EventOOM, At: time.Now()})
		}
	case "/tasks/exit":
		var e eventtypes.TaskExit
		if proto.Unmarshal(any.GetValue(), &e) == nil && e.ID == e.ContainerID {
			w.exited(ctx, driver.Event{ID: ids.SandboxID(e.ContainerID), Kind: driver.EventExited, ExitStatus: w.d.ownStatus(ids.SandboxID(e.ContainerID), e.ExitStatus), At: e.ExitedAt.AsTime()})
		}
	}
}

// exited tells the reason before the end: the runtime's own word of it can be late or missing.
func (w *watcher) exited(ctx context.Context, e driver.Event) {
	w.limits(ctx, e.ID, e.At)
	if s, err := w.d.Stats(ctx, e.ID); err == nil && s.OOMKills > 0 && !w.told[e.ID][driver.EventOOM] {
		w.tell(ctx, driver.Event{ID: e.ID, Kind: driver.EventOOM, At: e.At})
	}
	if !w.told[e.ID][driver.EventExited] {
		w.tell(ctx, e)
	}
}

// limits tells that a sandbox ran into its limit of processes since the last look.
func (w *watcher) limits(ctx context.Context, id ids.SandboxID, at time.Time) {
	s, err := w.d.Stats(ctx, id)
	if err != nil || s.PIDsHits <= w.hits[id] {
		return
	}
	w.hits[id] = s.PIDsHits
	w.tell(ctx, driver.Event{ID: id, Kind: driver.EventPIDs, At: at})
}

func (w *watcher) tell(ctx context.Context, e driver.Event) {
	if w.d.mustExist("", e.ID) != nil {
		delete(w.told, e.ID) // it was stopped: nobody asks any more
		delete(w.hits, e.ID)
		return
	}
	if len(w.told) > maxTold {
		clear(w.told)
		clear(w.late)
		clear(w.hits)
	}
	if w.told[e.ID] == nil {
		w.told[e.ID] = map[driver.EventKind]bool{}
	}
	w.told[e.ID][e.Kind] = true
	select {
	case w.out <- e:
	case <-ctx.Done():
	}
}
