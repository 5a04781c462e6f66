//go:build linux

// Package jail starts QEMU where it can harm nobody: as a user of its own, without any capability,
// in network, mount, IPC, UTS and PID namespaces of its own, with a root that holds the folders it
// needs, read-only, and in the sandbox's cgroup before its first instruction. Everything it works
// with are files that were open when it began. Package child does the work inside.
package jail

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver/microvm/jail/child"
)

// FirstFile is the descriptor of the first of Spec.Files in QEMU.
const FirstFile = child.FirstFile

// Spec of one process.
type Spec struct {
	child.Order
	// Files are inherited, from FirstFile on, in order; the tap comes after them.
	Files []*os.File
	// Output takes what QEMU prints; see Output.
	Output *os.File
	// Enter puts the process into its cgroup.
	Enter func(pid int) error
}

// Process is a QEMU that was started, here or by an earlier host agent.
type Process struct {
	PID int `json:"pid"`
	// Start tells it from another process with the same number, in clock ticks since boot.
	Start uint64 `json:"start"`
}

// startTime is long for a machine that is busy; a jail that fails says so at once.
const startTime = 30 * time.Second

// Start starts QEMU and returns when it runs its own program. It outlives this process.
func Start(ctx context.Context, s Spec) (Process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Process{}, fmt.Errorf("make socket: %w", err)
	}
	_ = unix.SetNonblock(fds[0], true) // then it has deadlines
	ours, theirs := os.NewFile(uintptr(fds[0]), "jail"), os.NewFile(uintptr(fds[1]), "jail")
	defer ours.Close()
	s.TapFD = FirstFile + len(s.Files)
	cmd := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{child.Name}, Dir: "/", Env: []string{"GOMAXPROCS=1"},
		Stdout: s.Output, Stderr: s.Output, ExtraFiles: append([]*os.File{theirs}, s.Files...),
		SysProcAttr: &syscall.SysProcAttr{
			Setsid:     true,
			Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		},
	}
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return Process{}, fmt.Errorf("start a process in new namespaces: %w", err)
	}
	go func() { _ = cmd.Wait() }() // only so that it is no zombie
	p := Process{PID: cmd.Process.Pid}
	if p.Start, err = startOf(p.PID); err == nil {
		err = p.order(ctx, s, ours, fds[0])
	}
	if err != nil {
		_ = cmd.Process.Kill()
		return Process{}, err
	}
	return p, nil
}

// order hands over what to do, once the process is in its cgroup, and waits until it is QEMU.
func (p Process) order(ctx context.Context, s Spec, sock *os.File, fd int) error {
	if err := s.Enter(p.PID); err != nil {
		return err
	}
	b, err := json.Marshal(s.Order)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(startTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = sock.SetDeadline(deadline)
	defer context.AfterFunc(ctx, func() { _ = sock.SetDeadline(time.Unix(1, 0)) })()
	if _, err := sock.Write(b); err != nil {
		return fmt.Errorf("hand over to the jail: %w", err)
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return fmt.Errorf("hand over to the jail: %w", err)
	}
	said, err := io.ReadAll(io.LimitReader(sock, 4096))
	if len(said) > 0 {
		return errors.New("jail: " + strings.ToValidUTF8(string(said), "?"))
	}
	if err != nil {
		return fmt.Errorf("wait for the jail: %w", errors.Join(ctx.Err(), err))
	}
	return nil
}

// Lives reports whether this very process runs, also when it is another's child. One that has ended
// and that nobody waited for does not.
func (p Process) Lives() bool {
	if p.PID <= 0 {
		return false
	}
	start, err := startOf(p.PID)
	return err == nil && start == p.Start
}

// startOf reads when a process began; an error if it has ended.
func startOf(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(b), ") ") // the name may hold anything, but QEMU's does not
	if i := strings.LastIndex(string(b), ") "); ok && i >= 0 {
		rest = string(b)[i+2:]
	}
	f := strings.Fields(rest)
	if len(f) < 20 {
		return 0, fmt.Errorf("process %d: strange state", pid)
	}
	if f[0] == "Z" || f[0] == "X" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return strconv.ParseUint(f[19], 10, 64)
}

// outputSize bounds what is kept of what QEMU prints.
const outputSize = 16 << 10

// Output makes a file in memory that takes the first words of a process and refuses more: a machine
// that makes QEMU complain for ever fills nothing.
func Output() (*os.File, error) {
	fd, err := unix.MemfdCreate("qemu-output", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "qemu-output")
	err = f.Truncate(outputSize)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Said returns what a process printed into its Output, for an error's text: one line.
func Said(f *os.File) string {
	b := make([]byte, outputSize)
	n, _ := f.ReadAt(b, 0)
	text := strings.TrimRight(string(b[:n]), "\x00")
	if len(text) > 500 {
		text = text[len(text)-500:]
	}
	return strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
}
