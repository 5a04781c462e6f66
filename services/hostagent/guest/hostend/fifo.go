package hostend

import (
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// pipeSize is asked for; the kernel may refuse it, which only costs throughput.
const pipeSize = 1 << 20

// Channel is a pair of FIFOs to a guest. Reads and writes wait without a thread
// and end with os.ErrClosed on Close.
type Channel struct {
	in  *os.File
	out *os.File
	// heard is set once a writer of the guest's side was there.
	heard  atomic.Bool
	closed atomic.Bool
}

// OpenFIFOs opens the FIFOs that a guest has as stdin and stdout, without
// waiting for the guest's side. The input is opened for reading too, so it has
// no end while this process lives; keeping it open beyond that is the business
// of whoever made the FIFOs. The output ends when its last writer is gone.
func OpenFIFOs(stdin, stdout string) (*Channel, error) {
	in, err := openFIFO(stdin, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	out, err := openFIFO(stdout, os.O_RDONLY)
	if err != nil {
		_ = in.Close()
		return nil, err
	}
	return &Channel{in: in, out: out}, nil
}

func openFIFO(path string, mode int) (*os.File, error) {
	f, err := os.OpenFile(path, mode|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	st, err := f.Stat()
	if err == nil && st.Mode()&os.ModeNamedPipe == 0 {
		err = fmt.Errorf("%s is not a FIFO", path)
	}
	var raw syscall.RawConn
	if err == nil {
		raw, err = f.SyscallConn()
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	_ = raw.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
	return f, nil
}

// Read implements io.Reader. Before the guest has opened its side there is no
// end of file: it waits.
func (c *Channel) Read(p []byte) (int, error) {
	if c.heard.Load() {
		return c.out.Read(p)
	}
	raw, err := c.out.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("read guest channel: %w", err)
	}
	var n int
	looked := false
	waitErr := raw.Read(func(fd uintptr) bool {
		for {
			if n, err = unix.Read(int(fd), p); err != unix.EINTR {
				break
			}
		}
		again := err == unix.EAGAIN || err == nil && n == 0 && !looked
		looked = true
		return !again
	})
	switch {
	case waitErr != nil && c.closed.Load():
		return 0, fmt.Errorf("read guest channel: %w", os.ErrClosed)
	case waitErr != nil:
		return 0, fmt.Errorf("read guest channel: %w", waitErr)
	case err != nil:
		return 0, fmt.Errorf("read guest channel: %w", err)
	}
	c.heard.Store(true)
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Write implements io.Writer. It waits while the guest does not read.
func (c *Channel) Write(p []byte) (int, error) { return c.in.Write(p) }

// Close closes both FIFOs. What was written stays in them.
func (c *Channel) Close() error {
	c.closed.Store(true)
	err := c.in.Close()
	if outErr := c.out.Close(); err == nil {
		err = outErr
	}
	return err
}
