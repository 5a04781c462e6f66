package agent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// openPTY opens a terminal of the given size that belongs to the user.
func (s *stdio) openPTY(x *execution, size wire.Size, user *account) error {
	master, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open /dev/ptmx: %w", err)
	}
	fail := func(what string, err error) error {
		_ = unix.Close(master)
		return fmt.Errorf("terminal: %s: %w", what, err)
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return fail("unlock", err)
	}
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	if err != nil {
		return fail("number", err)
	}
	if err := setSize(master, size); err != nil {
		return fail("size", err)
	}
	name := fmt.Sprintf("/dev/pts/%d", n)
	slave, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail("open "+name, err)
	}
	_ = unix.Fchown(slave, int(user.uid), -1) // a convenience: the open descriptor is what counts
	s.owned = append(s.owned, slave)
	s.child = [3]uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
	s.pty = os.NewFile(uintptr(master), "ptmx")
	s.stdin = newStdin(s.pty, true)
	s.outs = []*output{newOutput(x, wire.Stdout, s.pty, true)}
	return nil
}

func setSize(fd int, size wire.Size) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
}

// execResize sets the size of a terminal; the kernel sends SIGWINCH.
func (c *call) execResize() (any, error) {
	var req wire.ExecResize
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	x, err := c.agent.find(req.Key)
	if err != nil {
		return nil, err
	}
	if x.pty == nil {
		return nil, wire.Failf(wire.KindInvalid, "exec %s has no terminal", req.Key)
	}
	raw, err := x.pty.SyscallConn()
	if err == nil {
		ctlErr := raw.Control(func(fd uintptr) { err = setSize(int(fd), req.Size) })
		if ctlErr != nil {
			err = wire.Failf(wire.KindExited, "exec %s: the terminal is closed", req.Key)
		}
	}
	return struct{}{}, err
}
