package web

import (
	"bufio"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"

	"golang.org/x/net/http/httpguts"

	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// acceptOf is the answer to a key, RFC 6455.
func acceptOf(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// agreed checks that the host agreed to what was asked for and to nothing else.
func (x *exchange) agreed(resp *http.Response) bool {
	h := resp.Header
	if len(h["Upgrade"]) != 1 || !strings.EqualFold(h["Upgrade"][0], "websocket") ||
		!httpguts.HeaderValuesContainsToken(h["Connection"], "upgrade") ||
		len(h["Sec-Websocket-Accept"]) != 1 || h["Sec-Websocket-Accept"][0] != acceptOf(x.r.Header.Get("Sec-Websocket-Key")) {
		return false
	}
	if len(h["Sec-Websocket-Extensions"]) > 0 && len(x.header["Sec-Websocket-Extensions"]) == 0 {
		return false
	}
	if p := h["Sec-Websocket-Protocol"]; len(p) > 1 || len(p) == 1 && !httpguts.HeaderValuesContainsToken(x.header["Sec-Websocket-Protocol"], p[0]) {
		return false
	}
	return true
}

// websocket passes on the switch and then bytes both ways. Where a secret was put in, the frames of the host
// are read and written anew without it; what such a sandbox sends is not looked at.
func (x *exchange) websocket(resp *http.Response) *session.Refusal {
	up, ok := resp.Body.(io.ReadWriteCloser)
	if !ok || !x.agreed(resp) {
		return refuse(policy.Upgrade, "The host did not agree to WebSocket as it was asked to.")
	}
	h := endToEnd(resp.Header)
	if no := x.scrubHeader(h); no != nil {
		return no
	}
	down, buf, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		return refuse(policy.Upgrade, "")
	}
	defer down.Close()
	x.status = http.StatusSwitchingProtocols
	h.Set("Connection", "Upgrade")
	h.Set("Upgrade", "websocket")
	if _, err := io.WriteString(down, "HTTP/1.1 101 Switching Protocols\r\n"); err != nil || h.Write(down) != nil {
		return nil
	}
	if _, err := down.Write(crlf); err != nil {
		return nil
	}
	return x.both(down, buf.Reader, up)
}

func (x *exchange) both(down net.Conn, from io.Reader, up io.ReadWriteCloser) *session.Refusal {
	var wg sync.WaitGroup
	var first *session.Refusal
	var once sync.Once
	end := func(no *session.Refusal) {
		once.Do(func() {
			first = no
			if no != nil {
				x.abort()
			}
			_ = up.Close()
			_ = down.Close()
		})
	}
	wg.Go(func() { end(x.pipe(up, from, func(n int) *session.Refusal { return x.count(n, 0) })) })
	wg.Go(func() {
		count := func(n int) *session.Refusal { return x.count(0, n) }
		if x.scrub == nil {
			end(x.pipe(down, up, count))
			return
		}
		f := &frames{from: bufio.NewReader(up), to: down, count: count, text: scrubStream{scrubber: x.scrub}}
		end(f.run())
	})
	wg.Wait()
	return first
}

func (x *exchange) pipe(to io.Writer, from io.Reader, count func(int) *session.Refusal) *session.Refusal {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		n, err := from.Read(*b)
		if n > 0 {
			if no := count(n); no != nil {
				return no
			}
			if _, err := to.Write((*b)[:n]); err != nil {
				return nil
			}
		}
		if err != nil {
			return nil
		}
	}
}

// frames reads WebSocket frames of a host and writes them anew without secrets. Data is searched over the
// bounds of frames and messages: what has begun like a secret waits for its message to go on.
type frames struct {
	from  *bufio.Reader
	to    io.Writer
	count func(int) *session.Refusal
	text  scrubStream
	first byte // opcode of the message that is not begun yet on the way out; 0: it is
	open  bool // a message is
}

var errFrame = errors.New("the host sent a malformed frame")

func (f *frames) run() *session.Refusal {
	for {
		no, err := f.frame()
		if no != nil {
			return no
		}
		if errors.Is(err, errFrame) {
			return refuse(policy.Echo, "")
		}
		if err != nil {
			return nil
		}
	}
}

// frame passes one on.
func (f *frames) frame() (*session.Refusal, error) {
	var h [8]byte
	if _, err := io.ReadFull(f.from, h[:2]); err != nil {
		return nil, err
	}
	fin, op, size := h[0]&0x80 != 0, h[0]&0x0f, uint64(h[1]&0x7f)
	if h[0]&0x70 != 0 || h[1]&0x80 != 0 { // extensions that nobody agreed on, or masked
		return nil, errFrame
	}
	if op >= 8 {
		if !fin || size > 125 {
			return nil, errFrame
		}
		return f.control(op, int(size))
	}
	if op > 2 || (op == 0) != f.open {
		return nil, errFrame
	}
	if wide := map[uint64]int{126: 2, 127: 8}[size]; wide > 0 {
		if _, err := io.ReadFull(f.from, h[8-wide:]); err != nil {
			return nil, err
		}
		clear(h[:8-wide])
		size = binary.BigEndian.Uint64(h[:])
	}
	if op != 0 {
		f.first, f.open = op, true
	}
	no, err := f.data(size, fin)
	if fin {
		f.open = false
	}
	return no, err
}

func (f *frames) control(op byte, size int) (*session.Refusal, error) {
	b := make([]byte, size)
	if _, err := io.ReadFull(f.from, b); err != nil {
		return nil, err
	}
	if no := f.count(size + 2); no != nil {
		return no, nil
	}
	text, _ := f.text.scrubber.text(string(b))
	return nil, f.write(op, true, []byte(text))
}

// data passes the payload of a frame on, in frames of its own.
func (f *frames) data(size uint64, fin bool) (*session.Refusal, error) {
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	for {
		part := (*b)[:min(uint64(len(*b)), size)]
		n, err := f.from.Read(part)
		if len(part) == 0 {
			n, err = 0, nil
		}
		size -= uint64(n)
		if no := f.count(n + 2); no != nil {
			return no, nil
		}
		out := f.text.feed(part[:n], nil)
		last := size == 0 && fin && err == nil
		if last {
			out = append(out, f.text.rest(nil)...)
		}
		if len(out) > 0 || last {
			if err := f.write(f.first, last, out); err != nil {
				return nil, err
			}
			f.first = 0
		}
		if err != nil || size == 0 {
			return nil, err
		}
	}
}

func (f *frames) write(op byte, fin bool, payload []byte) error {
	h := []byte{op, byte(len(payload))}
	if fin {
		h[0] |= 0x80
	}
	switch n := len(payload); {
	case n > 0xffff:
		h[1] = 127
		h = binary.BigEndian.AppendUint64(h, uint64(n))
	case n > 125:
		h[1] = 126
		h = binary.BigEndian.AppendUint16(h, uint16(n))
	}
	_, err := f.to.Write(append(h, payload...))
	return err
}
