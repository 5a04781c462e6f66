package agent

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// ptyGrace is how long a terminal may take to deliver what a process wrote
// before its exit while other processes keep it open: the kernel moves these
// bytes in the background and does not say when it is done.
const ptyGrace = 100 * time.Millisecond

// output moves what a process writes from one pipe or terminal into the ring.
type output struct {
	exec    *execution
	sub     wire.Sub
	file    *os.File
	pty     bool
	drained chan struct{} // closed when all bytes from before the exit are stored
	once    sync.Once
}

var readBuffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// drain is called when the process has ended: it wakes the reading goroutine.
func (o *output) drain() {
	at := time.Now()
	if o.pty {
		at = at.Add(ptyGrace)
	}
	if o.file.SetReadDeadline(at) != nil {
		o.setDrained() // closed: everything was read
	}
}

func (o *output) setDrained() { o.once.Do(func() { close(o.drained) }) }

// copy reads until the last writer is gone.
func (o *output) copy() {
	defer func() {
		x := o.exec
		x.mu.Lock()
		x.open--
		x.cond.Broadcast()
		x.mu.Unlock()
		o.setDrained() // after the end is known, so that exit and end leave in one write
		_ = o.file.Close()
	}()
	raw, err := o.file.SyscallConn()
	if err != nil {
		return
	}
	for {
		_, err := o.read(raw, true)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			_ = o.file.SetReadDeadline(time.Time{})
			err = o.readPending(raw)
			o.setDrained()
		}
		if err != nil {
			return
		}
	}
}

// readPending stores as many bytes as are in the pipe at this moment. Processes
// left behind may write faster than it reads, hence the count.
func (o *output) readPending(raw syscall.RawConn) error {
	pending := 0
	if err := raw.Control(func(fd uintptr) { pending, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil {
		return err
	}
	for pending > 0 {
		n, err := o.read(raw, false)
		if err != nil || n == 0 {
			return err
		}
		pending -= n
	}
	return nil
}

// read stores the next bytes. It waits for them if asked to, and holds no
// buffer while it waits.
func (o *output) read(raw syscall.RawConn, wait bool) (int, error) {
	var buf *[]byte
	var n int
	var err error
	waitErr := raw.Read(func(fd uintptr) bool {
		buf = readBuffers.Get().(*[]byte)
		err = retryEINTR(func() error { n, err = syscall.Read(int(fd), *buf); return err })
		if err == syscall.EAGAIN {
			readBuffers.Put(buf)
			buf, n = nil, 0
			return !wait
		}
		return true
	})
	if buf != nil {
		defer readBuffers.Put(buf)
	}
	switch {
	case waitErr != nil:
		return 0, waitErr
	case err == syscall.EAGAIN:
		return 0, nil
	case err != nil: // EIO: the last holder of the terminal is gone
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	o.exec.store(o.sub, (*buf)[:n])
	return n, nil
}
