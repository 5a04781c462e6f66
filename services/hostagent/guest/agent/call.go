package agent

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"sync"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// handler does the work of a call. A nil result means that it answered itself.
type handler func(c *call) (result any, err error)

// handlers lists what the agent can do. It is a map and no init() does more.
var handlers map[string]handler

func init() {
	handlers = map[string]handler{
		wire.MethodStart: (*call).execStart, wire.MethodAttach: (*call).execAttach,
		wire.MethodDetach: (*call).execDetach, wire.MethodSignal: (*call).execSignal,
		wire.MethodResize: (*call).execResize, wire.MethodExecs: (*call).execList,
		wire.MethodStdin: (*call).execStdin,
		wire.MethodRead:  (*call).fileRead, wire.MethodWrite: (*call).fileWrite,
		wire.MethodStat: (*call).fileStat, wire.MethodList: (*call).fileList,
		wire.MethodMkdir: (*call).fileMkdir, wire.MethodMove: (*call).fileMove,
		wire.MethodRemove: (*call).fileRemove, wire.MethodWatch: (*call).fileWatch,
		wire.MethodImport: (*call).fileImport,
		wire.MethodPing:   (*call).ping, wire.MethodStats: (*call).stats,
		wire.MethodQuiesce: (*call).quiesce, wire.MethodResume: (*call).resume,
		wire.MethodSync: (*call).sync, wire.MethodEnter: (*call).enterRoot,
		wire.MethodFreeze: (*call).diskFreeze, wire.MethodThaw: (*call).diskThaw, wire.MethodGrow: (*call).diskGrow,
		wire.MethodUsage: (*call).diskUsage, wire.MethodExport: (*call).fileExport,
	}
}

// call is one request of the host and the stream that goes with it. It ends
// with its attachment.
type call struct {
	agent  *Agent
	out    *sender
	att    *attachment
	stream uint32
	method string
	params json.RawMessage
	ctx    context.Context
	cancel context.CancelFunc

	mu      sync.Mutex
	in      *inbox // bytes from the host, nil if the method takes none
	shared  bool   // in belongs to an exec and outlives the call
	failure error  // why the call was stopped, if not by the host
	onAck   func(sub wire.Sub, offset uint64)
	acked   uint64 // for calls without onAck
	wake    chan struct{}
}

func (c *call) run(h handler) {
	defer c.finish()
	defer c.leave()
	var result any
	err := c.awaitTurn()
	if err == nil {
		err = c.agent.answers(c.method)
	}
	if err == nil {
		result, err = h(c)
	}
	switch {
	case err != nil && c.ctx.Err() != nil && c.att.ctx.Err() != nil:
		// Nobody is there to hear it.
	case err != nil:
		c.reply(wire.TypeError, asFailure(c.method, err))
	case result != nil:
		c.reply(wire.TypeResult, result)
	}
}

func (c *call) finish() {
	c.stop()
	c.att.mu.Lock()
	if c.att.calls != nil {
		delete(c.att.calls, c.stream)
	}
	c.att.mu.Unlock()
	c.agent.calls.Add(-1)
}

// stop makes the handler return soon.
func (c *call) stop() { c.abort(context.Canceled) }

// abort is stop for a reason that the host is told.
func (c *call) abort(reason error) {
	c.mu.Lock()
	if c.failure == nil {
		c.failure = reason
	}
	in := c.in
	if c.shared {
		in = nil
	}
	c.mu.Unlock()
	c.cancel()
	if in != nil {
		in.fail(reason)
	}
}

// take accepts a frame of the host; it does not block.
func (c *call) take(f wire.Frame) {
	c.mu.Lock()
	in := c.in
	c.mu.Unlock()
	var err error
	switch {
	case f.Type == wire.TypeCancel:
		c.stop()
	case f.Type == wire.TypeAck:
		c.takeAck(f)
	case in != nil && f.Type == wire.TypeData:
		err = in.put(f.Offset, f.Payload)
	case in != nil && f.Type == wire.TypeEnd:
		err = in.end(f.Offset)
	}
	if err != nil {
		c.abort(err)
	}
}

func (c *call) takeAck(f wire.Frame) {
	c.mu.Lock()
	onAck := c.onAck
	if onAck == nil && f.Offset > c.acked {
		c.acked = f.Offset
		if c.wake != nil {
			close(c.wake)
			c.wake = nil
		}
	}
	c.mu.Unlock()
	if onAck != nil {
		onAck(f.Sub, f.Offset)
	}
}

func (c *call) decode(v any) error {
	if err := json.Unmarshal(c.params, v); err != nil {
		return wire.Failf(wire.KindInvalid, "%s: parameters: %v", c.method, err)
	}
	return nil
}

func (c *call) send(frames ...wire.Frame) error {
	for i := range frames {
		frames[i].Stream = c.stream
	}
	return c.out.send(c.att, frames...)
}

func (c *call) reply(t wire.Type, v any) {
	if err := c.out.sendJSON(c.att, t, c.stream, v); err != nil && !errors.Is(err, errStale) {
		c.agent.log.Warn("reply lost", "method", c.method, "error", err)
	}
}

// credit waits until the host acknowledged enough for sent to be inside the
// window, and returns how many bytes may follow.
func (c *call) credit(sent uint64) (uint64, error) {
	for {
		c.mu.Lock()
		if sent < c.acked+wire.Window {
			room := c.acked + wire.Window - sent
			c.mu.Unlock()
			return room, nil
		}
		if c.wake == nil {
			c.wake = make(chan struct{})
		}
		wake := c.wake
		c.mu.Unlock()
		select {
		case <-wake:
		case <-c.ctx.Done():
			return 0, c.ctx.Err()
		}
	}
}

// sendAck tells the host what was taken and up to where it may send.
func (c *call) sendAck(taken, limit uint64) error {
	payload := binary.BigEndian.AppendUint64(nil, limit)
	return c.send(wire.Frame{Type: wire.TypeAck, Offset: taken, Payload: payload})
}
