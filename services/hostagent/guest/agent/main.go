package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/guest/enter"
)

// shutdownGrace is what processes get after a SIGTERM to PID 1.
const shutdownGrace = 5 * time.Second

// Main runs the guest agent until it is told to end, and returns the exit code
// of the process. Its channel is stdin and stdout, or the device given as
// "-channel=PATH" (a virtio-serial port). With enter.Flag it waits for its owner's
// root before it does anything, over which the files of "-over=FILE:PATH" lie then (package cover). Logs go to stderr, at most a few
// hundred lines a minute. It takes stdin and stdout away from the process, so
// that nothing else is ever read from or written to the channel.
func Main(args []string) int { return MainWith(args, Options{}) }

// MainWith is Main for an agent with other options; Init and Log are set here.
func MainWith(args []string, opts Options) int {
	in, out, err := takeChannel(args, &opts)
	if err != nil {
		fmt.Fprintln(os.Stderr, "berth-guest: no channel:", err)
		return 1
	}
	return MainOn(in, out, opts)
}

// MainOn is MainWith on a channel that the process has already.
func MainOn(in io.Reader, out io.Writer, opts Options) int {
	log := slog.New(slog.NewTextHandler(newLogWriter(os.Stderr), nil))
	opts.Init, opts.Log = true, log
	signals := make(chan os.Signal, 16)
	// SIGPIPE and SIGHUP are caught and not ignored: an ignored signal would stay
	// ignored in every exec.
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGPIPE, unix.SIGHUP)
	unix.Umask(0o022)
	// The agent works in turns with the processes that it serves. More threads than one would mostly
	// wake each other, on processors that belong to them.
	runtime.GOMAXPROCS(1)
	spareThreads(spares)
	closeOnExec()
	if opts.Enter {
		if err := enter.Prepare(); err != nil {
			log.Error("cannot wait for an owner", "error", err)
			return 1
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	a := New(opts)
	go a.Run(ctx)
	go func() {
		err := a.Serve(ctx, in, out, channelPatience())
		log.Error("channel ended", "error", err)
	}()
	for sig := range signals {
		if sig == unix.SIGTERM || sig == unix.SIGINT {
			break
		}
	}
	q, err := a.Quiesce(ctx, shutdownGrace)
	log.Info("shut down", "killed", q.Killed, "remaining", q.Remaining, "error", err)
	return 0
}

// takeChannel moves the channel to descriptors that no exec inherits.
func takeChannel(args []string, opts *Options) (in, out *os.File, err error) {
	var over []cover.File
	for _, arg := range args {
		f, isOver, err := cover.Arg(arg)
		switch {
		case err != nil:
			return nil, nil, err
		case isOver:
			over = append(over, f)
		case len(arg) > 9 && arg[:9] == "-channel=":
			f, err := os.OpenFile(arg[9:], os.O_RDWR, 0)
			if err != nil {
				return nil, nil, fmt.Errorf("open channel: %w", err)
			}
			in, out = f, f
		case len(arg) > 6 && arg[:6] == "-user=":
			opts.DefaultUser = arg[6:]
		case arg == enter.Flag:
			opts.Enter = true
		default:
			return nil, nil, fmt.Errorf("unknown argument %q", arg)
		}
	}
	enter.Over(over)
	if in == nil {
		// Without a thread that is blocked in read, what was read is handled by the thread that read it.
		_ = unix.SetNonblock(0, true)
		if in, err = duplicate(0, "channel-in"); err != nil {
			return nil, nil, err
		}
		if out, err = duplicate(1, "channel-out"); err != nil {
			return nil, nil, err
		}
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open /dev/null: %w", err)
	}
	if err := errors.Join(unix.Dup3(null, 0, 0), unix.Dup3(2, 1, 0)); err != nil {
		return nil, nil, fmt.Errorf("replace stdin and stdout: %w", err)
	}
	return in, out, unix.Close(null)
}

func duplicate(fd int, name string) (*os.File, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 10)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
	}
	return os.NewFile(uintptr(n), name), nil
}

// closeOnExec marks whatever the runtime left open.
func closeOnExec() {
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		for fd := 3; fd < 1024; fd++ {
			unix.CloseOnExec(fd)
		}
		return
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	for _, name := range names {
		if fd, err := strconv.Atoi(name); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// channelPatience makes Serve read on after an error: a FIFO or a virtio port
// has an end whenever nobody has the other side open, and gets data again later.
// The pause grows to half a second, since there is nothing to wait on.
func channelPatience() func(error) bool {
	pause := time.Millisecond
	last := time.Now()
	return func(err error) bool {
		if errors.Is(err, os.ErrClosed) || errors.Is(err, syscall.EBADF) {
			return false
		}
		if time.Since(last) > 2*time.Second {
			pause = time.Millisecond
		}
		time.Sleep(pause)
		pause = min(2*pause, 500*time.Millisecond)
		last = time.Now()
		return true
	}
}

// logWriter passes lines on without ever waiting, and drops what is too much:
// nobody may be reading the stderr of PID 1.
type logWriter struct {
	lines chan []byte
}

const (
	maxLogLine  = 2 << 10
	logInterval = 200 * time.Millisecond // per line, once the queue of 64 is full
)

func newLogWriter(w io.Writer) *logWriter {
	l := &logWriter{lines: make(chan []byte, 64)}
	go func() {
		for line := range l.lines {
			_, _ = w.Write(line)
			if len(l.lines) > cap(l.lines)/2 {
				time.Sleep(logInterval)
			}
		}
	}()
	return l
}

// Write implements io.Writer; it always reports success.
func (l *logWriter) Write(p []byte) (int, error) {
	line := append([]byte(nil), p[:min(len(p), maxLogLine)]...)
	select {
	case l.lines <- line:
	default:
	}
	return len(p), nil
}
