// Package answer is the guest's half of the driver suite: it serves requests of one line of JSON each
// on a byte stream, and raw bytes where a request says so. It needs nothing of an operating system, so
// that a program of any kind, also a WebAssembly module, can be a probe. It guarantees that a line that
// is no request, as a writer that died leaves it, costs that line only.
package answer

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// Request asks a probe for one operation.
type Request struct {
	N    int      `json:"n"`
	Op   string   `json:"op"`
	Args []string `json:"args"`
}

// Reply is its answer.
type Reply struct {
	N   int    `json:"n"`
	Out string `json:"out"`
	Err string `json:"err"`
}

// Serve answers each line of in on out until in ends. Every probe knows echo, clock, random, busy,
// and the raw ones: bulkout, bulkin, mirror and last; do serves the rest, of which exit must be one. An
// io.EOF of do ends the serving without an answer.
func Serve(in io.Reader, out io.Writer, do func(op string, args []string) (string, error)) {
	s := &server{in: bufio.NewReaderSize(in, 64<<10), out: out, do: do}
	for {
		line, err := s.in.ReadBytes('\n')
		if err != nil {
			return
		}
		var q Request
		if json.Unmarshal(line, &q) != nil || q.Op == "" {
			continue
		}
		if err := s.serve(q); err != nil {
			return
		}
	}
}

type server struct {
	in  *bufio.Reader
	out io.Writer
	do  func(op string, args []string) (string, error)
}

func (s *server) serve(q Request) error {
	n := number(q.Args, 0)
	switch q.Op {
	case "bulkout":
		if err := s.reply(q, "", nil); err != nil {
			return err
		}
		return Write(s.out, n)
	case "bulkin":
		err := Expect(s.in, n)
		return s.reply(q, strconv.FormatInt(n, 10), err)
	case "mirror":
		if err := s.reply(q, "", nil); err != nil {
			return err
		}
		_, err := io.Copy(s.out, io.LimitReader(s.in, n))
		return err
	case "last": // the last words, then the end
		if err := s.reply(q, "", nil); err != nil {
			return err
		}
		if err := Write(s.out, n); err != nil {
			return err
		}
		_, err := s.do("exit", q.Args[1:])
		return errors.Join(err, io.EOF)
	}
	text, err := s.small(q)
	if errors.Is(err, io.EOF) {
		return err
	}
	return s.reply(q, text, err)
}

// small operations answer with one line.
func (s *server) small(q Request) (string, error) {
	switch q.Op {
	case "echo":
		return strings.Join(q.Args, " "), nil
	case "clock":
		return strconv.FormatInt(time.Now().UnixMilli(), 10), nil
	case "random":
		b := make([]byte, 32)
		_, err := rand.Read(b)
		return hex.EncodeToString(b), err
	case "busy": // milliseconds
		return busy(time.Duration(number(q.Args, 0)) * time.Millisecond), nil
	}
	return s.do(q.Op, q.Args)
}

func busy(d time.Duration) string {
	x := uint64(1)
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range 10_000 {
			x = x*6364136223846793005 + 1442695040888963407
		}
	}
	return strconv.FormatUint(x, 16)
}

func (s *server) reply(q Request, text string, err error) error {
	a := Reply{N: q.N, Out: text}
	if err != nil {
		a.Err = err.Error()
	}
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	_, err = s.out.Write(append(b, '\n'))
	return err
}

func number(args []string, i int) int64 {
	if i >= len(args) {
		return 0
	}
	n, _ := strconv.ParseInt(args[i], 10, 64)
	return n
}

// block of the byte stream that both ends know: every value of a byte is in it, and no part of it is
// like another.
const block = 32 << 10

func fill(b []byte, at uint64) {
	for i := 0; i < len(b); i += 8 {
		x := (at + uint64(i)) * 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		binary.LittleEndian.PutUint64(b[i:], x^x>>27)
	}
}

// Write writes the first n bytes of the stream.
func Write(w io.Writer, n int64) error {
	b := make([]byte, block)
	for at := int64(0); at < n; at += block {
		fill(b, uint64(at))
		if _, err := w.Write(b[:min(block, n-at)]); err != nil {
			return err
		}
	}
	return nil
}

// Expect reads n bytes and fails at the first block that differs from the stream.
func Expect(r io.Reader, n int64) error {
	want, got := make([]byte, block), make([]byte, block)
	var wrong error
	for at := int64(0); at < n; at += block {
		part := min(block, n-at)
		if k, err := io.ReadFull(r, got[:part]); err != nil {
			return fmt.Errorf("the stream ends after %d of %d bytes: %w", at+int64(k), n, err)
		}
		fill(want, uint64(at))
		if wrong == nil && !bytes.Equal(got[:part], want[:part]) {
			wrong = fmt.Errorf("the stream differs in the %d bytes after %d", part, at)
		}
	}
	return wrong
}
