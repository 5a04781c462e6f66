package sdk

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Cmd is a process to start. Only Args is needed.
type Cmd struct {
	Args    []string // program and arguments; there is no shell unless you name one
	Env     map[string]string
	Dir     string        // working directory; empty: the image's
	User    string        // name, uid or uid:gid; empty: the image's
	Timeout time.Duration // the process is killed after it; 0: never
	// Stdin is read until its end and closed in the process then. nil: none. A
	// Read that blocks for ever does not keep Wait from returning.
	Stdin io.Reader
	// Stdout and Stderr get the output as it comes; nil discards. A slow
	// Writer slows the process down. They are called from one goroutine.
	Stdout, Stderr io.Writer
	// PTY runs it on a terminal of this size; all output comes on Stdout.
	PTY *Size
	// Key makes the start idempotent: the same key never starts a second
	// process in the session. Empty: random.
	Key string
}

// Size of a terminal in characters.
type Size struct{ Rows, Cols uint32 }

// Command makes a Cmd of a program and its arguments.
func Command(name string, args ...string) Cmd { return Cmd{Args: append([]string{name}, args...)} }

// Process is a started process. Its methods are safe for concurrent use.
type Process struct {
	s      *Session
	key    string
	stdout io.Writer
	stderr io.Writer
	in     *input // nil without stdin

	ctx      context.Context // the caller's; when it ends, the process is killed
	detached context.Context
	detach   context.CancelFunc
	done     chan struct{}

	out, err uint64 // offsets; of the pump alone
	gaps     []Gap  // of the pump alone until done

	mu     sync.Mutex
	st     *stream
	result error
}

// ErrDetached is what Wait returns after Detach.
var ErrDetached = errors.New("process: detached; it goes on")

// Exec starts a process and returns once it runs. When ctx ends, the process
// is killed; to let it go on, call Detach first.
//
// Errors: ErrInvalid, ErrNotFound (no such program or directory),
// ErrStaleEpoch (the session slept: Reopen), ErrDenied, ErrQuota,
// ErrUnavailable. After ErrDeadline, whether it runs is unknown: Exec again
// with the same Key, or Attach.
func (s *Session) Exec(ctx context.Context, cmd Cmd) (*Process, error) {
	const op = "exec"
	if len(cmd.Args) == 0 || cmd.Args[0] == "" {
		return nil, invalid(op, "there is no program to run")
	}
	if cmd.Timeout < 0 {
		return nil, invalid(op, "the time-out is negative")
	}
	if cmd.Key == "" {
		cmd.Key = string(ids.NewExecKey())
	} else if _, err := ids.ParseExecKey(cmd.Key); err != nil {
		return nil, wrap(op, err)
	}
	e := &boxv1.Exec{Key: cmd.Key, Argv: cmd.Args, Env: cmd.Env, Cwd: cmd.Dir, User: cmd.User, Stdin: cmd.Stdin != nil}
	if cmd.Timeout > 0 {
		e.Timeout = durationpb.New(cmd.Timeout)
	}
	if cmd.PTY != nil {
		e.Pty = &boxv1.Resize{Rows: cmd.PTY.Rows, Cols: cmd.PTY.Cols}
	}
	st, _, err := s.open(ctx, op, &boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: e}}, true)
	if errors.Is(err, ErrExists) {
		st, err = s.attach(ctx, cmd.Key, 0, 0)
	}
	if err != nil {
		return nil, err
	}
	if st == nil {
		return nil, &Error{Op: op, Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	p := s.process(ctx, cmd.Key, cmd.Stdout, cmd.Stderr)
	if cmd.Stdin != nil {
		p.in = newInput(cmd.Stdin)
	}
	p.start(st)
	return p, nil
}

// AttachOptions say from where on the output of a process is wanted.
type AttachOptions struct {
	Stdout, Stderr             io.Writer
	StdoutOffset, StderrOffset uint64 // bytes that the caller has already
}

// Attach joins a process that is running, or ended less than ten minutes ago,
// by its key; also from another program. ErrNotFound: there is none.
func (s *Session) Attach(ctx context.Context, key string, o AttachOptions) (*Process, error) {
	if _, err := ids.ParseExecKey(key); err != nil {
		return nil, wrap("attach", err)
	}
	st, err := s.attach(ctx, key, o.StdoutOffset, o.StderrOffset)
	if err != nil {
		return nil, err
	}
	p := s.process(ctx, key, o.Stdout, o.Stderr)
	p.out, p.err = o.StdoutOffset, o.StderrOffset
	p.start(st)
	return p, nil
}

func (s *Session) attach(ctx context.Context, key string, out, err uint64) (*stream, error) {
	a := &boxv1.ExecAttach{Key: key, StdoutOffset: out, StderrOffset: err}
	st, _, e := s.open(ctx, "attach", &boxv1.Operation{Op: &boxv1.Operation_ExecAttach{ExecAttach: a}}, true)
	if e == nil && st == nil {
		e = &Error{Op: "attach", Kind: errkind.Internal, Reason: "the host opened no stream"}
	}
	return st, e
}

func (s *Session) process(ctx context.Context, key string, stdout, stderr io.Writer) *Process {
	p := &Process{s: s, key: key, stdout: stdout, stderr: stderr, ctx: ctx, done: make(chan struct{})}
	p.detached, p.detach = context.WithCancel(context.Background())
	return p
}

// Run is Exec and Wait.
func (s *Session) Run(ctx context.Context, cmd Cmd) error {
	p, err := s.Exec(ctx, cmd)
	if err != nil {
		return err
	}
	return p.Wait()
}

// Output runs a program and returns its standard output, also next to an
// [*ExitError].
func (s *Session) Output(ctx context.Context, name string, args ...string) ([]byte, error) {
	var b bytes.Buffer
	cmd := Command(name, args...)
	cmd.Stdout = &b
	err := s.Run(ctx, cmd)
	return b.Bytes(), err
}

// Key is the process's key, for Attach.
func (p *Process) Key() string { return p.key }

// Done is closed when Wait would return at once.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait returns when the process has ended and all of its output was written:
// nil for exit code 0, [*ExitError], [*UnknownExitError], [*LostOutputError],
// the context's error, the error of a Writer, or ErrDetached.
func (p *Process) Wait() error {
	<-p.done
	return p.result
}

// Gaps are the pieces of output that were lost; complete after Wait.
func (p *Process) Gaps() []Gap {
	<-p.done
	return p.gaps
}

// Signal sends a signal, for example "SIGTERM", to the process group. nil
// means that it was sent to the host. ErrUnavailable: the stream is lost just
// now.
func (p *Process) Signal(name string) error {
	return p.tell("signal", &boxv1.Frame{Body: &boxv1.Frame_Signal{Signal: &boxv1.Signal{Name: name}}})
}

// Resize changes the size of the process's terminal.
func (p *Process) Resize(size Size) error {
	return p.tell("resize", &boxv1.Frame{Body: &boxv1.Frame_Resize{Resize: &boxv1.Resize{Rows: size.Rows, Cols: size.Cols}}})
}

func (p *Process) tell(op string, f *boxv1.Frame) error {
	select {
	case <-p.done:
		return &Error{Op: op, Kind: errkind.NotFound, Reason: "the process has ended"}
	default:
	}
	p.mu.Lock()
	st := p.st
	p.mu.Unlock()
	if why := context.Cause(st.ctx); isLost(why) {
		return wrap(op, why)
	}
	return wrap(op, st.send(f))
}

// Detach stops following the process, which goes on. Its output is kept in a
// ring of 4 MiB for a later Attach. Input that was not sent yet is dropped.
func (p *Process) Detach() {
	p.detach()
	<-p.done
}

func (p *Process) start(st *stream) {
	p.st = st
	go func() {
		err := p.follow()
		if p.in != nil {
			p.in.stop()
		}
		p.result = err
		close(p.done)
	}()
}
