package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

// What a member writes on the file descriptor that it was given, a line each.
const (
	Runs   = "runs"   // it does its part; a scheduler that follows does no more
	Serves = "serves" // it answers requests
)

const (
	minPause  = 100 * time.Millisecond
	maxPause  = 10 * time.Second
	stopAfter = 40 * time.Second // for one member to end in order
	// firstTries is how often a member may fail before it was ready once.
	firstTries = 3
	maxLog     = 16 << 20
	readyFD    = 3
)

// member keeps one process running.
type member struct {
	name, service string
	ns            *wire.Namespace
	args          []string
	logFile       string
	info          control.Member // what stays the same
	log           *slog.Logger
	changed       func()

	done chan struct{}
	// started is closed when it was ready for the first time; failed gets why it never was. served is
	// closed when it first said that it serves: of several schedulers one does.
	started, served chan struct{}
	failed          chan error
	once, serveOnce sync.Once

	acting sync.Mutex // one act at a time
	before string     // the state that pause found

	mu       sync.Mutex
	cancel   context.CancelFunc
	state    string
	cmd      *exec.Cmd
	exited   chan struct{} // closed when cmd has ended
	restarts int
	lastErr  string
	held     bool
	orderly  bool          // the process is ended by restart: that is no failure
	poke     chan struct{} // ends a wait before the next start
}

// ready makes a member that does not run yet.
func (m *member) ready() *member {
	m.done, m.started, m.served, m.failed = make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan error, 1)
	m.poke, m.state = make(chan struct{}, 1), control.Stopped
	return m
}

func (m *member) begin(ctx context.Context) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m.mu.Lock()
	m.cancel = cancel
	m.mu.Unlock()
	go m.keep(ctx)
}

// begun reports whether it is to run.
func (m *member) begun() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cancel != nil
}

// keep runs the process again and again until ctx ends.
func (m *member) keep(ctx context.Context) {
	defer close(m.done)
	defer m.set(control.Stopped)
	pause, fails := minPause, 0
	for ctx.Err() == nil {
		if m.isHeld() {
			m.set(control.Held)
			m.wait(ctx, 0)
			continue
		}
		began := time.Now()
		err := m.runOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil || m.isHeld() {
			pause = minPause
			continue
		}
		if fails++; fails >= firstTries {
			select {
			case m.failed <- err:
			default:
			}
		}
		if time.Since(began) > maxPause {
			pause = minPause
		}
		m.log.Warn("member ended and starts again", "member", m.name, "error", err, "after", pause)
		m.fail(err)
		m.wait(ctx, pause)
		pause = min(2*pause, maxPause)
	}
}

// wait lets time pass, or waits for a poke alone when d is 0.
func (m *member) wait(ctx context.Context, d time.Duration) {
	var after <-chan time.Time
	if d > 0 {
		after = time.After(d)
	}
	select {
	case <-ctx.Done():
	case <-after:
	case <-m.poke:
	}
}

// runOnce starts the process and returns when it has ended; nil if restart ended it.
func (m *member) runOnce(ctx context.Context) error {
	m.set(control.Starting)
	cmd, word, err := m.start()
	if err != nil {
		return err
	}
	defer word.Close()
	exited := make(chan struct{})
	var ended error
	go func() { ended = cmd.Wait(); close(exited) }()
	m.mu.Lock()
	m.cmd, m.exited, m.orderly = cmd, exited, false
	if m.held {
		_ = cmd.Process.Kill() // it was told to stay away while the process began
	}
	m.mu.Unlock()
	m.changed()
	go m.listen(word)
	select {
	case <-exited:
	case <-ctx.Done():
		m.end(cmd, exited)
	}
	m.mu.Lock()
	m.cmd = nil
	orderly := m.orderly
	m.mu.Unlock()
	if orderly {
		return nil
	}
	if ended == nil {
		ended = errors.New("it returned although nobody stopped it")
	}
	if cmd.ProcessState.ExitCode() < 0 {
		return ended // by a signal: what it said last is no reason
	}
	return fmt.Errorf("%w%s", ended, m.lastLine())
}

// start starts the process on the thread of its namespace; word is where it says that it is ready.
func (m *member) start() (cmd *exec.Cmd, word *os.File, err error) {
	log, err := openLog(m.logFile)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	word, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer w.Close()
	cmd = &exec.Cmd{Path: "/proc/self/exe", Args: append([]string{"berth", "run"}, m.args...), Dir: "/",
		Stdout: log, Stderr: log, ExtraFiles: []*os.File{w},
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	if err := m.ns.Do(cmd.Start); err != nil {
		word.Close()
		return nil, nil, fmt.Errorf("start %s: %w", m.name, err)
	}
	return cmd, word, nil
}

func openLog(path string) (*os.File, error) {
	if st, err := os.Stat(path); err == nil && st.Size() > maxLog {
		_ = os.Rename(path, path+".1")
	}
	return os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// listen hears when the process runs, and when it serves.
func (m *member) listen(word io.Reader) {
	for lines := bufio.NewScanner(word); lines.Scan(); {
		m.mu.Lock()
		if m.state == control.Starting {
			m.state, m.lastErr = control.Ready, ""
		}
		m.mu.Unlock()
		m.once.Do(func() { close(m.started) })
		if lines.Text() == Serves {
			m.serveOnce.Do(func() { close(m.served) })
		}
		m.changed()
	}
}

// end ends the process in order, and by force when that takes too long.
func (m *member) end(cmd *exec.Cmd, exited <-chan struct{}) {
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	_ = cmd.Process.Signal(syscall.SIGCONT)
	select {
	case <-exited:
	case <-time.After(stopAfter):
		m.log.Error("member did not stop in time and is killed", "member", m.name, "time", stopAfter)
		_ = cmd.Process.Kill()
		<-exited
	}
}

// stop ends the member for good.
func (m *member) stop() {
	if !m.begun() {
		return
	}
	m.cancel()
	<-m.done
}

func (m *member) set(state string) {
	m.mu.Lock()
	m.state = state
	m.mu.Unlock()
	m.changed()
}

func (m *member) fail(err error) {
	m.mu.Lock()
	m.state, m.restarts, m.lastErr = control.Waiting, m.restarts+1, err.Error()
	m.mu.Unlock()
	m.changed()
}

func (m *member) isHeld() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held
}

// show is how the member is now.
func (m *member) show() control.Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.info
	out.State, out.Restarts, out.Error = m.state, m.restarts, m.lastErr
	if m.cmd != nil {
		out.PID = m.cmd.Process.Pid
	}
	return out
}

// lastLine is the end of the log, where the reason stands.
func (m *member) lastLine() string {
	f, err := os.Open(m.logFile)
	if err != nil {
		return ""
	}
	defer f.Close()
	const most = 4096
	if st, err := f.Stat(); err == nil && st.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	raw, _ := io.ReadAll(io.LimitReader(f, most))
	line := string(bytes.TrimSpace(raw))
	if i := strings.LastIndexByte(line, '\n'); i >= 0 {
		line = line[i+1:]
	}
	return fmt.Sprintf(": %.500s (%s)", strings.TrimPrefix(line, "berth: "), m.logFile)
}

// act does what a test or a person asks for; when it returns nil it has been done.
func (m *member) act(ctx context.Context, verb string) error {
	m.acting.Lock()
	defer m.acting.Unlock()
	m.mu.Lock()
	cmd, exited, state := m.cmd, m.exited, m.state
	m.mu.Unlock()
	if cmd == nil && verb != control.Restart && verb != control.Hold {
		return fmt.Errorf("%s does not run: it is %s", m.name, state)
	}
	switch verb {
	case control.Kill, control.Hold:
		return m.kill(ctx, cmd, exited, verb == control.Hold)
	case control.Pause:
		if err := pause(ctx, cmd); err != nil {
			return fmt.Errorf("pause %s: %w", m.name, err)
		}
		if state != control.Paused {
			m.before = state // of the process that was stopped; only act reads it
		}
		m.set(control.Paused)
		return nil
	case control.Resume:
		if state != control.Paused {
			return fmt.Errorf("%s is %s, not paused", m.name, state)
		}
		m.set(m.before)
		return cmd.Process.Signal(syscall.SIGCONT)
	case control.Restart:
		return m.restart(ctx, cmd, exited)
	}
	return fmt.Errorf("%.20q is none of kill, hold, pause, resume and restart", verb)
}

func (m *member) kill(ctx context.Context, cmd *exec.Cmd, exited <-chan struct{}, hold bool) error {
	m.mu.Lock()
	m.held = hold
	m.mu.Unlock()
	if cmd == nil {
		m.wakeUp()
		return nil
	}
	_ = cmd.Process.Kill() // it may have ended meanwhile
	select {
	case <-exited:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pause stops every thread of the process: the signal alone is on its way for a while.
func pause(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for ctx.Err() == nil {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "stat"))
		if err != nil {
			return err
		}
		if i := bytes.LastIndexByte(raw, ')'); i > 0 && len(raw) > i+2 && raw[i+2] == 'T' {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return ctx.Err()
}

// restart ends the process in order and returns when the next one is ready, or has ended before that.
func (m *member) restart(ctx context.Context, cmd *exec.Cmd, exited <-chan struct{}) error {
	m.mu.Lock()
	m.held = false
	m.orderly = cmd != nil
	fails := m.restarts
	m.mu.Unlock()
	if cmd != nil {
		m.end(cmd, exited)
	}
	m.wakeUp()
	for ctx.Err() == nil {
		m.mu.Lock()
		again := m.state == control.Ready && m.cmd != nil && m.cmd != cmd
		failed, reason := m.restarts > fails, m.lastErr
		m.mu.Unlock()
		switch {
		case again:
			return nil
		case failed: // it is tried on; who asked is to know why it takes long
			return fmt.Errorf("%s ended before it was ready, and is started again and again: %s", m.name, reason)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("%s is not ready again: %w", m.name, ctx.Err())
}

func (m *member) wakeUp() {
	select {
	case m.poke <- struct{}{}:
	default:
	}
}
