//go:build linux

package wasm

import (
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// Shares of the sandbox's memory that files may take: /tmp, and the machine code of its own modules.
const (
	tmpShare   = 4
	cacheShare = 8
)

// supervisor is the first process of a sandbox.
type supervisor struct {
	order  order.Sandbox
	js     *os.File
	cached map[string]*os.File // folders with machine code, by the module's hash
	sizes  map[int64]bool      // of those modules
	own    *os.File            // folder for the machine code of the session's own modules
	null   *os.File
	ahead  ahead
}

// Supervise is the supervisor's life. It returns the exit code of the process. One that waits for its
// order holds nothing of the host's files meanwhile.
func Supervise(waits bool) int {
	_ = unix.Close(order.SupervisorProgram)
	s := &supervisor{}
	var status *os.File
	var err error
	if waits {
		err = wait()
	}
	if err == nil {
		status, err = s.enter()
	}
	if err != nil {
		_ = unix.Sendmsg(order.Socket, []byte(err.Error()), nil, nil, unix.MSG_NOSIGNAL)
		return order.ExitJail
	}
	if err := unix.Sendmsg(order.Socket, []byte(order.Ready), nil, nil, unix.MSG_NOSIGNAL); err != nil {
		return order.ExitJail
	}
	_ = unix.Close(order.Socket)
	var code int
	if len(s.order.Init) > 0 {
		code = s.runInit()
	} else {
		code = agent.MainWith(nil, agent.Options{Program: s.program, MaxTime: s.maxTime()})
	}
	_, _ = status.WriteString(strconv.Itoa(code))
	return code
}

// wait says that the order may come, now or in hours.
func wait() error {
	if err := jail.Shed(); err != nil {
		return err
	}
	return unix.Sendmsg(order.Socket, []byte(order.Waiting), nil, nil, unix.MSG_NOSIGNAL)
}

// enter makes the sandbox around this process and gives up what it took to do so.
func (s *supervisor) enter() (status *os.File, err error) {
	b, files, err := receive(order.Socket, make([]byte, order.MaxMessage), 0)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &s.order); err != nil {
		return nil, fmt.Errorf("read order: %w", err)
	}
	want := order.Files + len(s.order.Compiled)
	if s.order.JS {
		want++
	}
	if len(files) != want {
		return nil, fmt.Errorf("the order came with %d files, not %d", len(files), want)
	}
	status = files[order.Files-1]
	s.keep(files[order.Files:])
	unix.Umask(0o022)
	if s.order.Hostname != "" {
		if err := unix.Sethostname([]byte(s.order.Hostname)); err != nil {
			return nil, fmt.Errorf("set host name: %w", err)
		}
	}
	if err := jail.Enter(jail.Parts{
		Image: files[0], Disk: files[1], Run: files[2], Null: files[3], Binary: files[4],
		TmpBytes: s.order.Limits.MemoryBytes / tmpShare,
	}); err != nil {
		return nil, err
	}
	if s.own, err = memoryFolder(s.order.Limits.MemoryBytes / cacheShare); err != nil {
		return nil, err
	}
	if s.null, err = os.OpenFile("/dev/null", os.O_RDWR, 0); err != nil {
		return nil, err
	}
	if err := jail.Limit(0); err != nil {
		return nil, err
	}
	if err := jail.DropPrivileges(); err != nil {
		return nil, err
	}
	return status, jail.FilterSupervisor()
}

func (s *supervisor) keep(files []*os.File) {
	if s.order.JS {
		s.js, files = files[0], files[1:]
	}
	s.cached, s.sizes = map[string]*os.File{}, map[int64]bool{}
	for i, c := range s.order.Compiled {
		s.cached[c.Hash], s.sizes[c.Size] = files[i], true
	}
}

// memoryFolder is a file system in memory that is mounted nowhere: only who has the descriptor has it.
func memoryFolder(bytes uint64) (*os.File, error) {
	ctx, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make folder in memory: %w", err)
	}
	defer func() { _ = unix.Close(ctx) }()
	if err := unix.FsconfigSetString(ctx, "size", strconv.FormatUint(bytes, 10)); err != nil {
		return nil, fmt.Errorf("make folder in memory: %w", err)
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return nil, fmt.Errorf("make folder in memory: %w", err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make folder in memory: %w", err)
	}
	return os.NewFile(uintptr(fd), "cache"), nil
}

// runInit runs the one module of a sandbox that has no guest agent, on the channel.
func (s *supervisor) runInit() int {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGPIPE, unix.SIGHUP)
	s.order.Limits.Time, s.order.Limits.OutputBytes = 0, 0 // it lives as long as its sandbox
	start, err := s.program(agent.Call{Argv: s.order.Init, Env: s.order.Env, Dir: "/"})
	if err != nil {
		return order.ExitNotModule
	}
	pid, err := start([3]uintptr{0, 1, 2})
	if err != nil {
		_, _ = os.Stderr.WriteString("berth-wasm: start: " + err.Error() + "\n")
		return order.ExitJail
	}
	go func() {
		for sig := range signals {
			if sig != unix.SIGPIPE {
				_ = unix.Kill(pid, sig.(syscall.Signal))
			}
		}
	}()
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR || err == nil && got != pid:
		case err != nil:
			return order.ExitJail
		case ws.Signaled():
			return 128 + int(ws.Signal())
		default:
			return ws.ExitStatus()
		}
	}
}
