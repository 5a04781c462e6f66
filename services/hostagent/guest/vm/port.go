package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const portPatience = 20 * time.Second

// port is one virtio-serial port. Read waits while the host is away, for data or for the next host: it
// never gives an end. Write waits as well.
type port struct {
	file *os.File
	raw  syscall.RawConn
}

// findPort returns the device of the port called name, once it is there.
func findPort(name string) (dev string, err error) {
	err = waitFor("port "+name, portPatience, func() bool {
		dev = portDevice(name)
		return dev != ""
	})
	return dev, err
}

// portDevice is the device of a port that is there now, or empty.
func portDevice(name string) string {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, f := range names {
		if b, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(b)) == name {
			dev := "/dev/" + filepath.Base(filepath.Dir(f))
			if _, err := os.Stat(dev); err == nil {
				return dev
			}
		}
	}
	return ""
}

func openPort(dev string) (*port, error) {
	f, err := os.OpenFile(dev, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open port: %w", err)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open port: %w", err)
	}
	return &port{file: f, raw: raw}, nil
}

// Read implements io.Reader. The kernel wakes a reader whenever the host comes, goes or writes; a read
// of no bytes, which says that nobody is there, is a reason to wait for that.
func (p *port) Read(b []byte) (n int, err error) {
	waited := p.raw.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		return n > 0 || (err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR))
	})
	if err == nil || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		err = waited
	}
	return max(n, 0), err
}

// Write implements io.Writer.
func (p *port) Write(b []byte) (int, error) { return p.file.Write(b) }

// flush waits until the host's side has taken what was written, at most for limit: what the machine
// says last would otherwise go with it.
func (p *port) flush(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.raw.Control(func(fd uintptr) {
			// A write that blocks comes back when it was taken, and all before it. A line without
			// anything is no message.
			if unix.SetNonblock(int(fd), false) == nil {
				_, _ = unix.Write(int(fd), []byte("\n"))
			}
		})
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}

func (p *port) Close() error { return p.file.Close() }
