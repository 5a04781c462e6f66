package agent

import (
	"context"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// turn orders the calls of successive attaches. A host that was killed may have
// left calls that nobody can stop any more, such as a rename or a fork; certain
// calls of its successor wait for them, so that the dead never overrule the
// living and a list of execs is not outdated by a start from before.
type turn struct {
	before  chan struct{}  // closed when the calls of all earlier attaches are over
	running sync.WaitGroup // calls of this attach
}

// follow makes t the successor of old, which gets no further calls; nil is none.
func (t *turn) follow(old *turn) {
	t.before = make(chan struct{})
	go func() {
		if old != nil {
			<-old.before
			old.running.Wait()
		}
		close(t.before)
	}()
}

// await waits for the calls of earlier attaches.
func (t *turn) await(ctx context.Context) error {
	select {
	case <-t.before:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// changes are the methods of which a late one would undo what a successor did.
var changes = map[string]bool{
	wire.MethodWrite: true, wire.MethodMkdir: true, wire.MethodMove: true, wire.MethodRemove: true,
	wire.MethodImport:  true,
	wire.MethodQuiesce: true, wire.MethodResume: true,
}

// enter notes a call before its handler runs; leave, when it is over.
func (c *call) enter() {
	switch {
	case changes[c.method]:
		c.att.changes.running.Add(1)
	case c.method == wire.MethodStart:
		c.att.starts.running.Add(1)
	}
}

func (c *call) leave() {
	switch {
	case changes[c.method]:
		c.att.changes.running.Done()
	case c.method == wire.MethodStart:
		c.att.starts.running.Done()
	}
}

// awaitTurn waits for what must be over before this call.
func (c *call) awaitTurn() error {
	switch {
	case changes[c.method]:
		return c.att.changes.await(c.ctx)
	case c.method == wire.MethodExecs:
		return c.att.starts.await(c.ctx)
	}
	return c.ctx.Err()
}
