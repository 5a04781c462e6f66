package agent

import (
	"context"
	"encoding/binary"
	"encoding/json"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// reader is the consumer of an exec's output on one call. An exec has at most
// one; a newer one replaces it.
type reader struct {
	pos      [2]uint64 // what was sent
	exitSent bool
	turn     int // the stream to look at first, for fairness
}

// follow sends output, exit and end to the host until there is no more.
func (c *call) follow(x *execution, from wire.Offsets, existing bool) (any, error) {
	r := &reader{pos: [2]uint64{from.Stdout, from.Stderr}}
	if err := x.setReader(c.ctx, r); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.onAck = func(sub wire.Sub, offset uint64) { x.ack(r, sub, offset) }
	c.mu.Unlock()
	stop := context.AfterFunc(c.ctx, x.wake)
	defer stop()
	if err := c.out.sendJSON(c.att, wire.TypeResult, c.stream, x.info(existing)); err != nil {
		return nil, err
	}
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	for {
		frames, err := x.next(c.ctx, r, (*buf)[:wire.MaxPayload])
		if err != nil {
			return nil, err
		}
		if err := c.send(frames...); err != nil {
			return nil, err
		}
		if frames[len(frames)-1].Type == wire.TypeEnd {
			return nil, nil
		}
	}
}

// wake has everybody who waits for the exec look again.
func (x *execution) wake() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.cond.Broadcast()
}

// setReader holds the exec for r, which has everything before r.pos. The call of
// a host that is gone does not take the exec from its successor: its context ends
// before the successor's first request is read.
func (x *execution) setReader(ctx context.Context, r *reader) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	for i := range outputs {
		if end := x.ring.lanes[i].end; r.pos[i] > end {
			return wire.Failf(wire.KindBadOffset, "output ends at %d, not %d", end, r.pos[i])
		}
	}
	for i := range outputs {
		x.acked[i] = max(r.pos[i], x.ring.lanes[i].base)
	}
	x.held = true
	x.reader = r
	x.cond.Broadcast()
	return nil
}

// next waits for the next frames to send: some output, the exit, the end. A
// payload may lie in buf.
func (x *execution) next(ctx context.Context, r *reader, buf []byte) ([]wire.Frame, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for {
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case x.reader != r && x.reader != nil:
			return nil, wire.Failf(wire.KindReplaced, "another reader attached to exec %s", x.key)
		case x.reader != r:
			return nil, wire.Failf(wire.KindCancelled, "exec %s was detached", x.key)
		}
		var frames []wire.Frame
		if f, ok := x.nextOutput(r, buf); ok {
			frames = append(frames, f)
		}
		if x.exit != nil && !r.exitSent && r.pos[0] >= x.exit.Output.Stdout && r.pos[1] >= x.exit.Output.Stderr {
			payload, err := json.Marshal(x.exit)
			if err != nil {
				return nil, err
			}
			r.exitSent = true
			frames = append(frames, wire.Frame{Type: wire.TypeExit, Payload: payload})
		}
		if r.exitSent && x.open == 0 && r.pos[0] == x.ring.lanes[0].end && r.pos[1] == x.ring.lanes[1].end {
			frames = append(frames, wire.Frame{Type: wire.TypeEnd, Offset: r.pos[0]})
		}
		if len(frames) > 0 {
			return frames, nil
		}
		x.cond.Wait()
	}
}

// nextOutput takes a gap or bytes within the window, if there are any.
func (x *execution) nextOutput(r *reader, buf []byte) (wire.Frame, bool) {
	for range outputs {
		i := r.turn
		r.turn = (r.turn + 1) % len(outputs)
		sub, l, pos := outputs[i], &x.ring.lanes[i], r.pos[i]
		if pos < l.base {
			r.pos[i] = l.base
			x.acked[i] = max(x.acked[i], l.base)
			return wire.Frame{
				Type: wire.TypeGap, Sub: sub, Offset: pos,
				Payload: binary.BigEndian.AppendUint64(nil, l.base),
			}, true
		}
		room := x.acked[i] + wire.Window - pos
		if n := min(uint64(len(buf)), room, l.end-pos); n > 0 {
			m := x.ring.copyAt(sub, pos, buf[:n])
			r.pos[i] += uint64(m)
			return wire.Frame{Type: wire.TypeData, Sub: sub, Offset: pos, Payload: buf[:m]}, true
		}
	}
	return wire.Frame{}, false
}
