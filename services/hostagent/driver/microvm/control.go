//go:build linux

package microvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// floodPause is what a machine waits for each message that nobody asked for: it cannot keep the host
// busy with reading.
const floodPause = 20 * time.Millisecond

// floodBytes is what a machine may say before it waits as well, whatever it says: lines without an end
// and empty ones are no messages. A read counts as floodRead at least.
const (
	floodBytes = 64 << 10
	floodRead  = 1 << 10
)

// paced reads from a machine no faster than floodBytes in a floodPause.
type paced struct {
	in   io.Reader
	quit <-chan struct{}
	read int
}

func (p *paced) Read(b []byte) (int, error) {
	if p.read >= floodBytes {
		p.read = 0
		select {
		case <-time.After(floodPause):
		case <-p.quit:
		}
	}
	n, err := p.in.Read(b)
	p.read += max(n, floodRead)
	return n, err
}

// errNoAnswer says that the connection ended before the machine answered.
var errNoAnswer = errors.New("the machine did not answer")

// control is one connection to a machine's control port. What comes over it is the word of a guest:
// it can claim only things about itself.
type control struct {
	conn  net.Conn
	event func(vmwire.Event)
	done  chan struct{}
	quit  context.Context // ends with close
	end   context.CancelFunc

	mu      sync.Mutex
	version int                            // that the guest speaks; 0 until it has answered
	wait    map[string]chan vmwire.Message // by nonce or id
}

// dialControl connects to the port. event is called for each event, in order.
func dialControl(ctx context.Context, room string, event func(vmwire.Event)) (*control, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(room, sockControl))
	if err != nil {
		return nil, fmt.Errorf("connect to the machine: %w", err)
	}
	c := &control{conn: conn, event: event, done: make(chan struct{}), wait: map[string]chan vmwire.Message{}}
	c.quit, c.end = context.WithCancel(context.Background())
	go c.read()
	return c, nil
}

func (c *control) close() {
	c.end()
	_ = c.conn.Close()
}

func (c *control) read() {
	defer close(c.done)
	defer c.close()
	in := vmwire.NewReader(&paced{in: c.conn, quit: c.quit.Done()})
	for {
		m, err := in.Next()
		if err != nil && !errors.Is(err, vmwire.ErrMessage) && !errors.Is(err, vmwire.ErrTooLong) {
			return
		}
		if err == nil && c.take(m) {
			continue
		}
		select {
		case <-time.After(floodPause):
		case <-c.quit.Done():
			return
		}
	}
}

// take hands a message to who waits for it; false if nobody does.
func (c *control) take(m vmwire.Message) bool {
	var key string
	switch m.Type {
	case vmwire.TypeReady:
		key = m.Ready.Nonce
	case vmwire.TypeAnswer:
		key = m.Answer.ID
	case vmwire.TypeDone:
		key = m.Done.ID
	case vmwire.TypeEvent:
		if c.event != nil {
			c.event(*m.Event)
		}
		return false
	}
	c.mu.Lock()
	ch := c.wait[key]
	delete(c.wait, key)
	c.mu.Unlock()
	if ch == nil {
		return false
	}
	ch <- m
	return true
}

// ask sends a message and waits for the one that bears its key.
func (c *control) ask(ctx context.Context, key string, m vmwire.Message, want vmwire.Type) (vmwire.Message, error) {
	line, err := vmwire.Encode(m)
	if err != nil {
		return vmwire.Message{}, err
	}
	ch := make(chan vmwire.Message, 1)
	c.mu.Lock()
	c.wait[key] = ch
	deadline, _ := ctx.Deadline()
	_ = c.conn.SetWriteDeadline(deadline)
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.wait, key)
		c.mu.Unlock()
	}()
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetWriteDeadline(time.Unix(1, 0)) })
	if _, err = c.conn.Write(line); err != nil {
		c.close() // half a line may be out
	}
	if !stop() {
		return vmwire.Message{}, fmt.Errorf("%w: %w", errNoAnswer, ctx.Err())
	}
	if err != nil {
		return vmwire.Message{}, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	select {
	case got := <-ch:
		if got.Type != want {
			return got, fmt.Errorf("the machine answers %s with %s", m.Type, got.Type)
		}
		return got, nil
	case <-c.done:
		return vmwire.Message{}, errNoAnswer
	case <-ctx.Done():
		return vmwire.Message{}, fmt.Errorf("%w: %w", errNoAnswer, ctx.Err())
	}
}

// hello waits until the machine's first process is ready. It asks again and again: what was said
// before the guest opened its port is gone.
func (c *control) hello(ctx context.Context) (vmwire.Ready, error) {
	for {
		nonce := newID()
		one, cancel := context.WithTimeout(ctx, helloEvery)
		m, err := c.ask(one, nonce, vmwire.Message{Type: vmwire.TypeHello,
			Hello: &vmwire.Hello{Min: vmwire.MinVersion, Max: vmwire.MaxVersion, Nonce: nonce}}, vmwire.TypeReady)
		cancel()
		if err == nil {
			return *m.Ready, nil
		}
		select {
		case <-ctx.Done():
			return vmwire.Ready{}, err
		case <-c.done:
			return vmwire.Ready{}, err
		default:
		}
	}
}

// meet returns the version that this side and the guest speak; over one connection it is asked for once.
func (c *control) meet(ctx context.Context) (int, error) {
	c.mu.Lock()
	version := c.version
	c.mu.Unlock()
	if version > 0 {
		return version, nil
	}
	ready, err := c.hello(ctx)
	if err != nil {
		return 0, err
	}
	if version, err = vmwire.Negotiate(ready.Min, ready.Max); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version = version
	return version, nil
}

const helloEvery = 2 * time.Second

// newID names a request.
func newID() string {
	b := make([]byte, 12)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
