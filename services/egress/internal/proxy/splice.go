package proxy

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// A few connections at a time have pipes of bigPipe, which took less of the processor than smallPipe when it
	// was measured; what all of them hold for clients that do not read is bounded so.
	bigPipe   = 1 << 20
	smallPipe = 64 << 10
	bigPipes  = 64
	// keptPipes are kept for the next connection that has something to move.
	keptPipes = 256
	// copySize is the buffer where the kernel cannot move bytes by itself.
	copySize = 32 << 10
)

// pipe is a kernel buffer between two sockets.
type pipe struct {
	r, w int
	size int
}

// pipes are those that nobody uses. A connection has one only while bytes of it move.
type pipes struct {
	mu         sync.Mutex
	big, small []*pipe
	bigs       int // that there are, used or not
	denied     bool
}

func (s *pipes) get() (*pipe, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, free := range []*[]*pipe{&s.big, &s.small} {
		if n := len(*free); n > 0 && (free == &s.big || s.full()) {
			p := (*free)[n-1]
			*free = (*free)[:n-1]
			return p, nil
		}
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	p := &pipe{fds[0], fds[1], smallPipe}
	if !s.full() {
		if _, err := unix.FcntlInt(uintptr(p.r), unix.F_SETPIPE_SZ, bigPipe); err == nil {
			p.size = bigPipe
			s.bigs++
		} else {
			s.denied = true
		}
	}
	return p, nil
}

// full: there will be no more big ones, or the kernel gives none.
func (s *pipes) full() bool { return s.denied || s.bigs >= bigPipes }

// put takes back an empty pipe.
func (s *pipes) put(p *pipe) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case p.size == bigPipe:
		s.big = append(s.big, p)
	case len(s.small) < keptPipes:
		s.small = append(s.small, p)
	default:
		s.close(p)
	}
}

// end closes a pipe with what is in it.
func (s *pipes) end(p *pipe) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.close(p)
}

func (s *pipes) close(p *pipe) {
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
	if p.size == bigPipe {
		s.bigs--
	}
}

// drop closes what nobody uses.
func (s *pipes) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range append(s.big, s.small...) {
		s.close(p)
	}
	s.big, s.small = nil, nil
}

// rawConn is the socket below c, nil if there is none.
func rawConn(c net.Conn) syscall.RawConn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// mover is one direction of a link that the kernel moves.
type mover struct {
	pipes *pipes
	pipe  *pipe
	moved int
	left  int
	err   error
}

// fill is called when src may have bytes; false waits for some, holding no pipe.
func (m *mover) fill(fd uintptr) bool {
	if m.pipe == nil {
		if m.pipe, m.err = m.pipes.get(); m.err != nil {
			return true
		}
	}
	for {
		n, err := unix.Splice(int(fd), nil, m.pipe.w, nil, m.pipe.size, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		switch err {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			m.pipes.put(m.pipe)
			m.pipe = nil
			return false
		}
		m.moved, m.left, m.err = int(n), int(n), err
		return true
	}
}

// drain is called when dst may take bytes; false waits until it does.
func (m *mover) drain(fd uintptr) bool {
	for m.left > 0 {
		n, err := unix.Splice(m.pipe.r, nil, int(fd), nil, m.left, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return false
		case err != nil:
			m.err = err
			return true
		case n == 0:
			m.err = io.ErrShortWrite
			return true
		default:
			m.left -= int(n)
		}
	}
	return true
}

// close gives the pipe back, or ends it with what is in it.
func (m *mover) close() {
	switch {
	case m.pipe == nil:
	case m.left > 0 || m.err != nil:
		m.pipes.end(m.pipe)
	default:
		m.pipes.put(m.pipe)
	}
}

// splice moves bytes from src to dst until src has ended its own.
func (l *link) splice(dst, src net.Conn, to, from syscall.RawConn, count func(int) error) error {
	m := mover{pipes: &l.pipes}
	defer m.close()
	reads, writes := watch{l: l, set: src.SetReadDeadline}, watch{l: l, set: dst.SetWriteDeadline}
	fill, drain := m.fill, m.drain
	for {
		reads.arm()
		if err := from.Read(fill); err != nil {
			if err = reads.still(err); err != nil {
				return err
			}
			continue
		}
		switch {
		case m.err != nil && m.pipe == nil: // no file is left for a pipe
			m.err = nil
			return l.copy(dst, src, count)
		case m.err != nil:
			return m.err
		case m.moved == 0:
			return nil
		}
		writes.arm()
		if err := to.Write(drain); err != nil {
			return err
		}
		if m.err != nil {
			return m.err
		}
		if err := count(m.moved); err != nil {
			return err
		}
	}
}

// buffers of copy.
var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// copy is splice for connections that are no sockets, and for want of pipes.
func (l *link) copy(dst, src net.Conn, count func(int) error) error {
	b := buffers.Get().(*[copySize]byte)
	defer buffers.Put(b)
	reads, writes := watch{l: l, set: src.SetReadDeadline}, watch{l: l, set: dst.SetWriteDeadline}
	for {
		reads.arm()
		n, err := src.Read(b[:])
		if n > 0 {
			writes.arm()
			if _, err := dst.Write(b[:n]); err != nil {
				return err
			}
			if err := count(n); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err = reads.still(err); err != nil {
			return err
		}
	}
}
