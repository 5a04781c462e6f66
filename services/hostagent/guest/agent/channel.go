package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// channel reads frames and hands them to calls. The reading goroutine never
// waits for anything but input, so that a new attach is noticed at all times.
type channel struct {
	agent *Agent
	out   *sender
	in    *wire.Reader
	att   *attachment
	last  *attachment       // att, or the one that was
	parts map[uint32][]byte // requests that go on in a further frame
}

// Serve speaks the protocol over r and w until r ends; it returns the error of
// the reader, io.EOF at its end. Execs outlive it. retry is asked after an
// error of r whether to read on; nil never does.
func (a *Agent) Serve(ctx context.Context, r io.Reader, w io.Writer, retry func(error) bool) error {
	c := &channel{agent: a, out: &sender{w: w}, in: wire.NewReader(r)}
	defer c.end()
	for {
		item, err := c.in.Next()
		switch {
		case errors.Is(err, wire.ErrCorrupt):
			c.desync()
		case err != nil:
			if retry == nil || !retry(err) {
				return err
			}
		case item.Sync != nil:
			c.attach(ctx, *item.Sync)
		case c.att != nil:
			c.dispatch(item.Frame)
		}
	}
}

// attach begins a new attachment and ends all calls of the one before.
func (c *channel) attach(ctx context.Context, s wire.Sync) {
	c.end()
	att := &attachment{sync: s, calls: map[uint32]*call{}}
	if old := c.last; old != nil {
		att.changes.follow(&old.changes)
		att.starts.follow(&old.starts)
	} else {
		att.changes.follow(nil)
		att.starts.follow(nil)
	}
	c.last = att
	att.ctx, att.cancel = context.WithCancel(ctx)
	c.att = att
	c.parts = map[uint32][]byte{}
	c.out.current.Store(att)
	c.agent.log.Info("attached", "attach", s.AttachID, "discarded", c.in.Discarded())
}

func (c *channel) end() {
	if c.att == nil {
		return
	}
	c.out.current.Store(nil)
	c.att.cancel()
	c.att.mu.Lock()
	calls := c.att.calls
	c.att.calls = nil
	c.att.mu.Unlock()
	for _, call := range calls {
		call.stop()
	}
	c.att = nil
}

// desync tells the host that the frame boundary was lost.
func (c *channel) desync() {
	c.agent.log.Warn("corrupt frame, waiting for the next attach")
	if att := c.att; att != nil {
		go func() { _ = c.out.send(att, wire.Frame{Type: wire.TypeDesync}) }()
	}
}

func (c *channel) dispatch(f wire.Frame) {
	switch f.Type {
	case wire.TypeHello:
		c.hello(f)
	case wire.TypeRequest:
		c.request(f)
	case wire.TypeData, wire.TypeEnd, wire.TypeAck, wire.TypeCancel:
		c.att.mu.Lock()
		call := c.att.calls[f.Stream]
		c.att.mu.Unlock()
		if call != nil {
			call.take(f)
		}
	}
}

func (c *channel) hello(f wire.Frame) {
	var theirs wire.Hello
	ours := wire.Hello{
		Min: wire.MinVersion, Max: wire.MaxVersion, Instance: c.agent.instance,
		Capabilities: []string{"pty", "watch", "quiesce", "import"}, Software: Version,
	}
	if c.agent.opts.Disk != nil {
		ours.Capabilities = append(ours.Capabilities, wire.CapabilityDisk)
	}
	if c.agent.opts.Enter {
		ours.Capabilities = append(ours.Capabilities, wire.CapabilityEnter)
	}
	err := json.Unmarshal(f.Payload, &theirs)
	if err == nil {
		ours.Version, err = wire.Negotiate(theirs, ours)
	}
	att := c.att
	if err != nil {
		failure := wire.Failf(wire.KindVersion, "hello: %v", err)
		go func() { _ = c.out.sendJSON(att, wire.TypeError, 0, failure) }()
		return
	}
	att.mu.Lock()
	att.ready = true
	att.mu.Unlock()
	go func() { _ = c.out.sendJSON(att, wire.TypeHello, 0, ours) }()
}

// request gathers the parts of a request and starts its call.
func (c *channel) request(f wire.Frame) {
	part, started := c.parts[f.Stream]
	switch {
	case len(part)+len(f.Payload) > wire.MaxMessage || (!started && len(c.parts) >= 64):
		delete(c.parts, f.Stream)
		c.refuse(f.Stream, wire.Failf(wire.KindTooLarge, "request above %d bytes", wire.MaxMessage))
		return
	case f.Flags&wire.FlagMore != 0:
		c.parts[f.Stream] = append(part, f.Payload...)
		return
	}
	delete(c.parts, f.Stream)
	body := f.Payload
	if started {
		body = append(part, f.Payload...)
	}
	if !c.att.ready {
		c.refuse(f.Stream, wire.Failf(wire.KindInvalid, "request before hello"))
		return
	}
	if err := c.start(f.Stream, body); err != nil {
		c.refuse(f.Stream, err)
	}
}

func (c *channel) start(stream uint32, body []byte) *wire.Failure {
	var req wire.Request
	if err := json.Unmarshal(body, &req); err != nil {
		return wire.Failf(wire.KindInvalid, "request: %v", err)
	}
	handler, ok := handlers[req.Method]
	if !ok {
		return wire.Failf(wire.KindUnsupported, "unknown method %q", req.Method)
	}
	a := c.agent
	if a.calls.Load() >= MaxCalls {
		return wire.Failf(wire.KindTooMany, "more than %d calls at a time", MaxCalls)
	}
	call := &call{agent: a, out: c.out, att: c.att, stream: stream, method: req.Method, params: req.Params}
	call.ctx, call.cancel = context.WithCancel(c.att.ctx)
	if req.Method == wire.MethodWrite || req.Method == wire.MethodImport {
		call.in = newInbox()
	}
	c.att.mu.Lock()
	_, taken := c.att.calls[stream]
	if !taken {
		c.att.calls[stream] = call
	}
	c.att.mu.Unlock()
	if taken {
		call.cancel()
		return wire.Failf(wire.KindInvalid, "stream %d is in use", stream)
	}
	a.calls.Add(1)
	call.enter()
	go call.run(handler)
	return nil
}

func (c *channel) refuse(stream uint32, f *wire.Failure) {
	att := c.att
	go func() { _ = c.out.sendJSON(att, wire.TypeError, stream, f) }()
}

// asFailure turns any error into what goes to the host.
func asFailure(method string, err error) *wire.Failure {
	var f *wire.Failure
	if errors.As(err, &f) {
		return f
	}
	if errors.Is(err, context.Canceled) {
		return wire.Failf(wire.KindCancelled, "%s: cancelled", method)
	}
	return systemFailure(fmt.Errorf("%s: %w", method, err))
}
