package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// errStale reports a frame for an attach that is over. It is dropped: whatever
// it said can be asked for again.
var errStale = errors.New("agent: the attach is over")

// attachment is one attach of a host, from its sync record to the next one.
type attachment struct {
	sync    wire.Sync
	ctx     context.Context
	cancel  context.CancelFunc
	changes turn // of calls that change files or the state of the sandbox
	starts  turn // of starts of execs
	greeted bool // the sync record was echoed; guarded by sender.mu
	broken  bool // a write failed; guarded by sender.mu

	mu    sync.Mutex
	ready bool // the host's hello was accepted
	calls map[uint32]*call
}

// sender is the only writer of the channel. A frame is written whole before the
// next one begins, even if its attach ends meanwhile.
type sender struct {
	mu      sync.Mutex // held during a write, which may block for long
	w       io.Writer
	buf     []byte
	current atomic.Pointer[attachment]
}

// send writes frames that belong to att, at once. The first frame of an attach
// is preceded by the echo of its sync record.
func (s *sender) send(att *attachment, frames ...wire.Frame) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current.Load() != att || att.broken {
		return errStale
	}
	s.buf = s.buf[:0]
	if !att.greeted {
		s.buf = wire.AppendSync(s.buf, att.sync)
	}
	var err error
	for _, f := range frames {
		if s.buf, err = wire.AppendFrame(s.buf, f); err != nil {
			return fmt.Errorf("agent: encode frame: %w", err)
		}
	}
	att.greeted = true
	if _, err := s.w.Write(s.buf); err != nil {
		att.broken = true
		return fmt.Errorf("agent: write channel: %w", err)
	}
	return nil
}

// sendJSON writes a message, over several frames if it is long.
func (s *sender) sendJSON(att *attachment, t wire.Type, stream uint32, v any) error {
	payload, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("agent: encode message: %w", err)
	}
	if len(payload) > wire.MaxMessage {
		return fmt.Errorf("agent: message of %d bytes: %w", len(payload), wire.ErrTooLarge)
	}
	for len(payload) > wire.MaxPayload {
		part := wire.Frame{Type: t, Flags: wire.FlagMore, Stream: stream, Payload: payload[:wire.MaxPayload]}
		if err := s.send(att, part); err != nil {
			return err
		}
		payload = payload[wire.MaxPayload:]
	}
	return s.send(att, wire.Frame{Type: t, Stream: stream, Payload: payload})
}
