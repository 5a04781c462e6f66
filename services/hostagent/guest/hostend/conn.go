package hostend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Options of an attach. The zero value is fine.
type Options struct {
	// AttachID appears in the logs of the guest; random if 0.
	AttachID uint64
	// Log gets what is odd about the guest; nothing if nil.
	Log *slog.Logger
}

// Guest is what the guest said of itself in the hello.
type Guest struct {
	Version      int      // of the protocol, negotiated
	Capabilities []string // optional features
	// Instance changes when the agent was restarted; all execs are gone then.
	Instance string
	Software string
}

// receiver gets the frames of one stream on the reading goroutine. It must not
// block. An error ends the Conn.
type receiver interface {
	frame(f wire.Frame) error
	lost(err error)
}

// Conn is one attach to a guest. See the package for what it guarantees.
type Conn struct {
	r     io.Reader
	w     io.Writer
	in    *wire.Reader
	log   *slog.Logger
	sync  wire.Sync
	guest Guest
	out   chan []byte
	done  chan struct{} // closed when the Conn has ended
	ended sync.WaitGroup
	// strays is the reading goroutine's.
	strays strays

	mu      sync.Mutex
	err     error
	streams map[uint32]receiver
	next    uint32
	stdins  map[string]*stdinStream
}

// Attach takes over the channel: it synchronises with the guest whatever state
// a predecessor left the streams in, and returns when the guest has answered.
// r and w are the guest's output and input; if they are io.Closers, Close closes
// them. When ctx ends before the guest answers, its error is returned and r and w
// are closed too, since they may hold half of a frame.
func Attach(ctx context.Context, r io.Reader, w io.Writer, opts Options) (*Conn, error) {
	marker, err := wire.NewMarker()
	if err != nil {
		return nil, err
	}
	if opts.AttachID == 0 {
		opts.AttachID = rand.Uint64()
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	c := &Conn{
		r: r, w: w, in: wire.NewReader(r), log: opts.Log,
		sync: wire.Sync{Marker: marker, AttachID: opts.AttachID},
		out:  make(chan []byte, 64), done: make(chan struct{}),
		streams: map[uint32]receiver{}, stdins: map[string]*stdinStream{},
	}
	hello, err := json.Marshal(wire.Hello{Min: wire.MinVersion, Max: wire.MaxVersion})
	if err != nil {
		return nil, fmt.Errorf("attach to guest: hello: %w", err)
	}
	first, err := wire.AppendFrame(wire.AppendSync(nil, c.sync), wire.Frame{Type: wire.TypeHello, Payload: hello})
	if err != nil {
		return nil, fmt.Errorf("attach to guest: hello: %w", err)
	}
	c.out <- first
	ready := make(chan struct{})
	c.ended.Add(2)
	go c.writeLoop()
	go c.readLoop(ready)
	select {
	case <-ready:
		return c, nil
	case <-c.done:
		err = c.Err()
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.fail(err)
	c.closeStreams()
	return nil, fmt.Errorf("attach to guest: %w", err)
}

// Guest returns what the guest said in the hello.
func (c *Conn) Guest() Guest { return c.guest }

// Done is closed when the Conn has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err is nil while the Conn lives, and matches ErrChannelLost afterwards.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the Conn: all calls return ErrChannelLost, what runs in the guest
// goes on, held execs stay held. It closes both streams if they can be closed,
// and then returns only after the last read and write.
func (c *Conn) Close() error {
	c.fail(ErrClosed)
	if c.closeStreams() {
		c.ended.Wait()
	}
	return nil
}

// closeStreams reports whether both streams could be closed.
func (c *Conn) closeStreams() bool {
	r, rok := c.r.(io.Closer)
	w, wok := c.w.(io.Closer)
	if rok {
		_ = r.Close()
	}
	if wok {
		_ = w.Close()
	}
	return rok && wok
}

// fail ends the Conn; the first cause wins.
func (c *Conn) fail(cause error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = fmt.Errorf("%w: %w", ErrChannelLost, cause)
	streams := c.streams
	c.streams = nil
	close(c.done)
	c.mu.Unlock()
	for _, s := range streams {
		s.lost(c.err)
	}
}

// writeLoop writes frames, several at once when they have queued up.
func (c *Conn) writeLoop() {
	defer c.ended.Done()
	var batch []byte
	for {
		select {
		case b := <-c.out:
			batch = append(batch[:0], b...)
		case <-c.done:
			return
		}
		for more := true; more && len(batch) < 4*wire.MaxPayload; {
			select {
			case b := <-c.out:
				batch = append(batch, b...)
			default:
				more = false
			}
		}
		if _, err := c.w.Write(batch); err != nil {
			c.fail(fmt.Errorf("write: %w", err))
			return
		}
	}
}

// readLoop waits for the guest's echo and hello, then hands frames to streams.
func (c *Conn) readLoop(ready chan<- struct{}) {
	defer c.ended.Done()
	if err := c.handshake(); err != nil {
		c.fail(err)
		return
	}
	close(ready)
	for {
		item, err := c.in.Next()
		switch {
		case errors.Is(err, wire.ErrCorrupt):
			err = fmt.Errorf("%w: %w", ErrProtocol, err)
		case err != nil:
			err = fmt.Errorf("read: %w", err)
		case item.Sync != nil:
			err = ErrTaken
		default:
			err = c.deliver(item.Frame)
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

// handshake discards everything up to the echo of our own sync record.
func (c *Conn) handshake() error {
	for {
		item, err := c.in.Next()
		if err != nil && !errors.Is(err, wire.ErrCorrupt) {
			return fmt.Errorf("wait for the guest's answer: %w", err)
		}
		if err == nil && item.Sync != nil && *item.Sync == c.sync {
			break
		}
	}
	item, err := c.in.Next()
	switch {
	case err != nil:
		return fmt.Errorf("wait for the guest's hello: %w", err)
	case item.Sync != nil:
		return ErrTaken
	case item.Frame.Type == wire.TypeError:
		return guestError("hello", item.Frame.Payload)
	case item.Frame.Type != wire.TypeHello:
		return fmt.Errorf("%w: frame type %d before the hello", ErrProtocol, item.Frame.Type)
	}
	var h wire.Hello
	if err := decode(item.Frame.Payload, &h); err != nil {
		return err
	}
	if h.Version < wire.MinVersion || h.Version > wire.MaxVersion {
		return fmt.Errorf("%w: guest chose version %d", ErrProtocol, h.Version)
	}
	c.guest = Guest{Version: h.Version, Capabilities: h.Capabilities, Instance: h.Instance, Software: h.Software}
	return nil
}

// deliver hands a frame to its stream. Frames of calls that are over are normal.
func (c *Conn) deliver(f wire.Frame) error {
	if f.Type == wire.TypeDesync {
		return errors.New("the guest lost the frame boundary")
	}
	c.mu.Lock()
	s := c.streams[f.Stream]
	c.mu.Unlock()
	if s == nil {
		c.stray()
		return nil
	}
	return s.frame(f)
}

const (
	// freeStrays is more than is under way when a call is given up; strayPause gives one of them back.
	freeStrays = 4096
	strayPause = 5 * time.Millisecond
)

// strays counts frames that nobody waits for.
type strays struct {
	n     int
	since time.Time
}

// stray has a guest wait that goes on and on with what nobody asked for: it cannot keep the host busy
// with reading.
func (c *Conn) stray() {
	if c.strays.n == 0 {
		c.strays.since = time.Now()
	}
	back := int(time.Since(c.strays.since) / strayPause)
	c.strays.n, c.strays.since = max(c.strays.n-back, 0)+1, c.strays.since.Add(time.Duration(back)*strayPause)
	if c.strays.n <= freeStrays {
		return
	}
	select {
	case <-time.After(strayPause):
	case <-c.done:
	}
}

// open registers a stream and sends its request.
func (c *Conn) open(ctx context.Context, method string, params any, s receiver) (uint32, error) {
	p, err := json.Marshal(params)
	if err != nil {
		return 0, fmt.Errorf("encode parameters: %w", err)
	}
	body, err := json.Marshal(wire.Request{Method: method, Params: p})
	if err != nil {
		return 0, fmt.Errorf("encode request: %w", err)
	}
	if len(body) > wire.MaxMessage {
		return 0, &Error{Op: method, Kind: wire.KindTooLarge, Message: "request above 1 MiB"}
	}
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return 0, c.err
	}
	c.next++
	for c.next == 0 || c.streams[c.next] != nil {
		c.next++
	}
	id := c.next
	c.streams[id] = s
	c.mu.Unlock()
	frames, err := requestFrames(id, body)
	if err == nil {
		err = c.enqueue(ctx, frames)
	}
	if err != nil {
		c.forget(id)
	}
	return id, err
}

// requestFrames encodes a request, over several frames if it is long.
func requestFrames(id uint32, body []byte) (frames []byte, err error) {
	for len(body) > wire.MaxPayload {
		part := wire.Frame{Type: wire.TypeRequest, Flags: wire.FlagMore, Stream: id, Payload: body[:wire.MaxPayload]}
		if frames, err = wire.AppendFrame(frames, part); err != nil {
			return nil, err
		}
		body = body[wire.MaxPayload:]
	}
	return wire.AppendFrame(frames, wire.Frame{Type: wire.TypeRequest, Stream: id, Payload: body})
}

// forget ends the interest in a stream; what comes for it is dropped.
func (c *Conn) forget(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.streams, id)
}

// cancel asks the guest to stop a call and forgets it.
func (c *Conn) cancel(id uint32) {
	c.forget(id)
	go func() { _ = c.send(context.Background(), wire.Frame{Type: wire.TypeCancel, Stream: id}) }()
}

// send queues a frame; its payload is copied.
func (c *Conn) send(ctx context.Context, f wire.Frame) error {
	b, err := wire.AppendFrame(make([]byte, 0, wire.HeaderSize+len(f.Payload)), f)
	if err != nil {
		return err
	}
	return c.enqueue(ctx, b)
}

func (c *Conn) enqueue(ctx context.Context, b []byte) error {
	select {
	case c.out <- b:
		return nil
	case <-c.done:
		return c.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func decode(payload []byte, v any) error {
	if err := json.Unmarshal(payload, v); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return nil
}
