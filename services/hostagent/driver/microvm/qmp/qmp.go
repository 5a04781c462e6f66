// Package qmp speaks to QEMU's monitor. It guarantees that every call ends with its context, that an
// answer is taken for its own request only, and that what QEMU says is bounded: a line above MaxLine
// ends the connection. The machine inside is hostile and may have taken QEMU over: nothing here is
// trusted to be well-formed.
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// MaxLine bounds one line of QEMU's.
const MaxLine = 1 << 20

// callTime bounds a call whose context has no end.
const callTime = 30 * time.Second

// ErrClosed says that the connection, or QEMU, has ended.
var ErrClosed = errors.New("the monitor has ended")

// Error is a refusal of QEMU's.
type Error struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *Error) Error() string { return "qemu: " + e.Desc }

// Event is something that QEMU tells unasked.
type Event struct {
	Name string
	Data json.RawMessage
}

// message is any line of QEMU's.
type message struct {
	Greeting json.RawMessage `json:"QMP"`
	Return   json.RawMessage `json:"return"`
	Error    *Error          `json:"error"`
	ID       string          `json:"id"`
	Event    string          `json:"event"`
	Data     json.RawMessage `json:"data"`
}

// Client is one connection to a monitor, which serves one at a time. It is safe for concurrent use.
type Client struct {
	conn *net.UnixConn
	in   *bufio.Reader
	tell func(Event)
	done chan struct{}

	mu    sync.Mutex
	n     uint64
	wait  map[string]chan message
	ended error
}

// Dial connects to the monitor's socket and waits for its greeting. tell is called for each event, in
// order, and must not wait for a call of this client.
func Dial(ctx context.Context, socket string, tell func(Event)) (*Client, error) {
	any, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("connect to the monitor: %w", err)
	}
	conn := any.(*net.UnixConn)
	c := &Client{conn: conn, in: bufio.NewReaderSize(conn, 4<<10), tell: tell, done: make(chan struct{}), wait: map[string]chan message{}}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	first, err := readMessage(c.in)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	if err == nil && first.Greeting == nil {
		err = errors.New("it does not greet")
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("greeting of the monitor: %w", err)
	}
	go c.read()
	if err := c.Call(ctx, "qmp_capabilities", nil, nil); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// readMessage reads one line; empty ones are skipped.
func readMessage(in *bufio.Reader) (message, error) {
	var line []byte
	for empty := 0; ; {
		part, err := in.ReadSlice('\n')
		if len(line)+len(part) > MaxLine {
			return message{}, fmt.Errorf("a line above %d bytes", MaxLine)
		}
		line = append(line, part...)
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return message{}, err
		}
		if len(line) > 2 {
			break
		}
		line = line[:0]
		if empty++; empty > freeNews {
			return message{}, errors.New("it says nothing, again and again")
		}
	}
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return message{}, fmt.Errorf("a line of the monitor: %w", err)
	}
	return m, nil
}

// A QEMU that says more than freeNews things that nobody asked for has to wait for each more: it cannot
// keep the host busy with reading. It gets one back every newsPause.
const (
	freeNews  = 64
	newsPause = 20 * time.Millisecond
)

// read hands out what comes until the connection ends.
func (c *Client) read() {
	news, since := 0, time.Now()
	for {
		if news > freeNews {
			select {
			case <-time.After(newsPause):
			case <-c.done:
			}
		}
		m, err := readMessage(c.in)
		if err != nil {
			c.end(err)
			return
		}
		if m.Event != "" || m.ID == "" {
			back := int(time.Since(since) / newsPause)
			news, since = max(news-back, 0)+1, since.Add(time.Duration(back)*newsPause)
		}
		switch {
		case m.Event != "":
			if c.tell != nil {
				c.tell(Event{Name: m.Event, Data: m.Data})
			}
		case m.ID != "":
			c.mu.Lock()
			ch := c.wait[m.ID]
			delete(c.wait, m.ID)
			c.mu.Unlock()
			if ch != nil {
				ch <- m
			} else {
				news++
			}
		}
	}
}

func (c *Client) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended == nil {
		c.ended = fmt.Errorf("%w: %w", ErrClosed, err)
		_ = c.conn.Close()
		close(c.done)
	}
}

// Close ends the connection; QEMU goes on.
func (c *Client) Close() { c.end(net.ErrClosed) }

// Done is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Call runs one command. args and out may be nil. A refusal is an *Error; an error that matches
// ErrClosed or the context's leaves open whether it was done.
func (c *Client) Call(ctx context.Context, command string, args, out any) error {
	return c.run(ctx, command, args, out, nil)
}

// Give hands a file to QEMU, which other commands name as "fd:NAME".
func (c *Client) Give(ctx context.Context, name string, f *os.File) error {
	return c.run(ctx, "getfd", map[string]any{"fdname": name}, nil, f)
}

// Add puts a file into a set of QEMU's, which its block layer opens as /dev/fdset/SET.
func (c *Client) Add(ctx context.Context, set int, f *os.File) error {
	return c.run(ctx, "add-fd", map[string]any{"fdset-id": set}, nil, f)
}

func (c *Client) run(ctx context.Context, command string, args, out any, f *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	m, err := c.call(ctx, command, args, f)
	if err == nil && m.Error != nil {
		err = m.Error
	}
	if err == nil && out != nil {
		err = json.Unmarshal(m.Return, out)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	return nil
}

func (c *Client) call(ctx context.Context, command string, args any, f *os.File) (message, error) {
	ch := make(chan message, 1)
	c.mu.Lock()
	if c.ended != nil {
		defer c.mu.Unlock()
		return message{}, c.ended
	}
	c.n++
	id := strconv.FormatUint(c.n, 10)
	c.wait[id] = ch
	req := struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        string `json:"id"`
	}{command, args, id}
	line, err := json.Marshal(req)
	if err == nil {
		deadline, _ := ctx.Deadline()
		_ = c.conn.SetWriteDeadline(deadline)
		var rights []byte
		if f != nil {
			rights = unix.UnixRights(int(f.Fd()))
		}
		_, _, err = c.conn.WriteMsgUnix(append(line, '\n'), rights, nil)
	}
	c.mu.Unlock()
	if err != nil {
		c.end(err) // half a line may be out
		return message{}, err
	}
	select {
	case m := <-ch:
		return m, nil
	case <-c.done:
		return message{}, c.ended
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.wait, id)
		c.mu.Unlock()
		return message{}, ctx.Err()
	}
}
