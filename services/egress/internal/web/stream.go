package web

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
)

// errBroken ends the body of a request that breaks the grammar.
var errBroken = errors.New("the body of the request is malformed")

// substitute stands in the stream for a head that was refused, so that the refusal is answered in its turn.
const substitute = "GET / HTTP/1.1\r\nHost: refused.invalid\r\nConnection: close\r\n\r\n"

// stage of a strict reader: what the next bytes are.
type stage int

const (
	inHead stage = iota
	inBody
	inChunkSize
	inChunk
	inChunkEnd
	inTrailers
	inRaw
	inRefusal
	ended
)

// strict is a connection that hands on only bytes of well-formed requests of HTTP/1, unchanged. A head that
// is refused is replaced by the substitute and nothing follows it. Read resumes after a deadline.
type strict struct {
	net.Conn
	buf     []byte
	r, v, w int // handed on, verified, filled
	looked  int // how far the end of what is read now was looked for
	stage   stage
	left    int64 // of the body or the chunk
	refusal string

	mu     sync.Mutex
	heads  int // heads that came
	bad    int // which of them was refused; 0: none
	reason error
	broken bool // a body
	once   sync.Once
	gone   chan struct{}
}

func newStrict(c net.Conn) *strict {
	return &strict{Conn: c, buf: make([]byte, 4<<10), gone: make(chan struct{})}
}

// Close implements net.Conn.
func (s *strict) Close() error {
	defer s.once.Do(func() { close(s.gone) })
	return s.Conn.Close()
}

// refused is why the nth head was, if it was.
func (s *strict) refused(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad == n {
		return s.reason
	}
	return nil
}

// count is how many heads came.
func (s *strict) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heads
}

func (s *strict) bodyBroken() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken {
		return s.reason
	}
	return nil
}

// Read implements net.Conn.
func (s *strict) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		switch {
		case s.stage == inRefusal:
			n := copy(p, s.refusal)
			if s.refusal = s.refusal[n:]; s.refusal == "" {
				s.stage = ended
			}
			return n, nil
		case s.v > s.r:
			n := copy(p, s.buf[s.r:s.v])
			s.r += n
			return n, nil
		case s.stage == ended && s.bodyBroken() != nil:
			return 0, errBroken
		case s.stage == ended:
			return 0, io.EOF
		case s.r == s.w && (s.stage == inRaw || s.left > 0 && (s.stage == inBody || s.stage == inChunk)):
			return s.through(p)
		}
		more, err := s.step()
		if err != nil {
			s.refuse(err)
			continue
		}
		if more {
			if err := s.fill(); err != nil {
				return 0, err
			}
		}
	}
}

// through reads bytes of a body without a copy of them.
func (s *strict) through(p []byte) (int, error) {
	if s.stage != inRaw && int64(len(p)) > s.left {
		p = p[:s.left]
	}
	n, err := s.Conn.Read(p)
	if s.stage != inRaw {
		s.left -= int64(n)
		s.bodyDone()
	}
	return n, err
}

// bodyDone goes on to what follows a body or a chunk that is complete.
func (s *strict) bodyDone() {
	switch {
	case s.left > 0:
	case s.stage == inBody:
		s.stage = inHead
	case s.stage == inChunk:
		s.stage = inChunkEnd
	}
}

// fill reads more behind what is not verified yet.
func (s *strict) fill() error {
	if s.r > 0 {
		copy(s.buf, s.buf[s.r:s.w])
		s.v, s.w, s.r = s.v-s.r, s.w-s.r, 0
	}
	if s.w == len(s.buf) {
		s.buf = append(s.buf, make([]byte, len(s.buf))...)
	}
	n, err := s.Conn.Read(s.buf[s.w:])
	s.w += n
	if n > 0 {
		return nil
	}
	if errors.Is(err, io.EOF) && s.stage != inHead && s.stage != inRaw {
		return io.ErrUnexpectedEOF
	}
	return err
}

// refuse ends the stream: a head's refusal is answered in its turn, a body's ends the body.
func (s *strict) refuse(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reason = err
	if s.stage == inHead {
		s.heads++
		s.bad, s.refusal, s.stage = s.heads, substitute, inRefusal
	} else {
		s.broken, s.stage = true, ended
	}
	s.r, s.v, s.w = 0, 0, 0
}

// step verifies what it can of what is there; more: it needs to see more.
func (s *strict) step() (more bool, err error) {
	in := s.buf[s.v:s.w]
	switch s.stage {
	case inHead:
		return s.head(in)
	case inBody, inChunk:
		n := min(int64(len(in)), s.left)
		s.v += int(n)
		s.left -= n
		s.bodyDone()
		return n == 0 && s.left > 0, nil
	case inChunkSize:
		return s.chunkSize(in)
	case inChunkEnd:
		if len(in) < 2 && (len(in) == 0 || in[0] == '\r') {
			return true, nil
		}
		if !bytes.HasPrefix(in, crlf) {
			return false, errors.New("a chunk of the body has another size than it says")
		}
		s.v += 2
		s.stage = inChunkSize
	case inTrailers:
		return s.trailers(in)
	case inRaw:
		s.v = s.w
		return len(in) == 0, nil
	}
	return false, nil
}

func (s *strict) head(in []byte) (more bool, err error) {
	if len(in) > 0 && (in[0] == '\r' || in[0] == '\n') {
		return false, errors.New("the request begins with an empty line")
	}
	end, err := s.end(in, maxHead)
	if err != nil || end < 0 {
		return true, err
	}
	f, err := checkHead(in[:end])
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	s.heads++
	s.mu.Unlock()
	s.v += end
	switch {
	case f.upgrade:
		s.stage = inRaw
	case f.chunked:
		s.stage = inChunkSize
	case f.length > 0:
		s.stage, s.left = inBody, f.length
	}
	return false, nil
}

// end finds the end of the empty line, -1 if there is none yet. A bare LF ends the search early: some
// servers would end the head there.
func (s *strict) end(in []byte, most int) (int, error) {
	from := max(0, s.looked-3)
	if i := bytes.Index(in[from:], []byte("\r\n\r\n")); i >= 0 {
		s.looked = 0
		if from+i+4 > most {
			return -1, errors.New("the head of the request is too long")
		}
		return from + i + 4, nil
	}
	for i := from; i < len(in); i++ {
		if in[i] == '\n' && (i == 0 || in[i-1] != '\r') {
			return -1, errors.New("a line of the request ends with a bare CR or LF")
		}
	}
	s.looked = len(in)
	if len(in) >= most {
		return -1, errors.New("the head of the request is too long")
	}
	return -1, nil
}

func (s *strict) chunkSize(in []byte) (more bool, err error) {
	i := bytes.IndexByte(in, '\n')
	switch {
	case i < 0 && len(in) > maxChunk+2:
		return false, errors.New("the size of a chunk is none, or has an extension")
	case i < 0:
		return true, nil
	case i == 0 || in[i-1] != '\r':
		return false, errors.New("a line of the request ends with a bare CR or LF")
	}
	n, err := chunkSize(in[:i-1])
	if err != nil {
		return false, err
	}
	s.v += i + 1
	if s.stage, s.left = inChunk, n; n == 0 {
		s.stage = inTrailers
	}
	return false, nil
}

func (s *strict) trailers(in []byte) (more bool, err error) {
	if len(in) > 0 && in[0] == '\n' {
		return false, errors.New("a line of the request ends with a bare CR or LF")
	}
	if len(in) < 2 {
		return true, nil
	}
	end := 2
	if !bytes.HasPrefix(in, crlf) {
		if end, err = s.end(in, maxTrailers); err != nil || end < 0 {
			return true, err
		}
	}
	if err := checkTrailers(in[:end]); err != nil {
		return false, err
	}
	s.v += end
	s.stage = inHead
	return false, nil
}
