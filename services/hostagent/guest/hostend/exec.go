package hostend

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Re-exported parts of the protocol. All of it comes from the guest: offsets,
// times and pids are claims.
type (
	// Offsets are byte counts of stdout and stderr.
	Offsets = wire.Offsets
	// Size is a terminal size in cells.
	Size = wire.Size
	// Exit is how a process ended: Code, or Signal, or Unknown with the reason.
	Exit = wire.Exit
	// ExecInfo is the state of an exec.
	ExecInfo = wire.ExecInfo
)

// ExecSpec says what to run.
type ExecSpec struct {
	// Key names the exec, 1 to 200 bytes; it is the idempotency key of the start.
	Key string
	// Argv is the program and its arguments. A name without a slash is looked up
	// in the PATH of the exec.
	Argv []string
	// Env is added to PATH, HOME, USER, LOGNAME and LANG=C.UTF-8 (and TERM).
	Env []string
	// Cwd is absolute or below the user's home, which is also the default.
	Cwd string
	// User is "name", "uid", "name:group" or "uid:gid"; the sandbox's default if empty.
	User string
	// PTY gives the process a terminal: its output is all Stdout, CloseStdin
	// types the end-of-file character.
	PTY *Size
	// Stdin opens a pipe; without it the process reads /dev/null.
	Stdin bool
	// Timeout kills the process group with SIGKILL; 0 for none.
	Timeout time.Duration
	// Detached starts without a reader, so that a full ring drops its oldest
	// bytes instead of blocking the process. StartExec then returns no stream.
	Detached bool
	// From is where reading begins if the key was started before.
	From Offsets
}

// StartExec starts a process and returns its output; the exec is held by the
// returned stream until Detach. If the key was started before, nothing is
// started: the stream is that of the existing exec and its info says Existing.
// Errors: ErrStartFailed (with the errno), ErrConflict (same key, other spec),
// ErrInvalid, ErrQuiesced, ErrTooMany, ErrBadOffset, ErrChannelLost.
func (c *Conn) StartExec(ctx context.Context, spec ExecSpec) (*ExecStream, error) {
	req := wire.ExecStart{
		Key: wire.Text(spec.Key), Argv: wire.Texts(spec.Argv), Env: wire.Texts(spec.Env),
		Cwd: wire.Text(spec.Cwd), User: wire.Text(spec.User), PTY: spec.PTY, Stdin: spec.Stdin,
		Timeout: int64(spec.Timeout), Detached: spec.Detached, From: spec.From,
	}
	op := "start exec " + spec.Key
	if spec.Detached {
		var info ExecInfo
		if err := c.call(ctx, op, wire.MethodStart, req, &info); err != nil {
			return nil, err
		}
		return &ExecStream{conn: c, key: spec.Key, info: info, closed: true}, nil
	}
	return c.follow(ctx, op, spec.Key, wire.MethodStart, req, spec.From)
}

// AttachExec becomes the reader of an exec from the given offsets on; a reader
// before it gets ErrReplaced. Everything before the offsets counts as
// acknowledged, everything after them is held from now on. Bytes that are gone
// are reported as a Gap. Errors: ErrNoSuchExec (its exit is unknown then),
// ErrBadOffset (beyond what the exec wrote), ErrChannelLost.
func (c *Conn) AttachExec(ctx context.Context, key string, from Offsets) (*ExecStream, error) {
	req := wire.ExecAttach{Key: wire.Text(key), From: from}
	return c.follow(ctx, "attach to exec "+key, key, wire.MethodAttach, req, from)
}

// DetachExec gives up the reader of an exec: its stream ends with ErrCancelled
// and a full ring drops its oldest bytes from now on.
func (c *Conn) DetachExec(ctx context.Context, key string) error {
	return c.call(ctx, "detach exec "+key, wire.MethodDetach, wire.ExecRef{Key: wire.Text(key)}, nil)
}

// ListExecs returns all execs that the guest remembers, in the order of their
// keys: running ones and those that ended up to 10 minutes ago. A host that
// attached anew attaches to or detaches each that is held.
func (c *Conn) ListExecs(ctx context.Context) ([]ExecInfo, error) {
	const most = 100_000 // far above what an honest guest remembers
	var all []ExecInfo
	var after wire.Text
	for {
		var page wire.ExecPage
		if err := c.call(ctx, "list execs", wire.MethodExecs, wire.ExecList{After: after}, &page); err != nil {
			return nil, err
		}
		for _, x := range page.Execs {
			if x.Key <= after {
				return nil, fmt.Errorf("list execs: %w: keys out of order", ErrProtocol)
			}
			after = x.Key
		}
		all = append(all, page.Execs...)
		if !page.More || len(page.Execs) == 0 {
			return all, nil
		}
		if len(all) > most {
			return nil, fmt.Errorf("list execs: %w: more than %d", ErrProtocol, most)
		}
	}
}

// Signal sends a signal to the process group of an exec. ErrExited if its main
// process has ended.
func (c *Conn) Signal(ctx context.Context, key string, sig syscall.Signal) error {
	req := wire.ExecSignal{Key: wire.Text(key), Signal: int(sig)}
	return c.call(ctx, "signal exec "+key, wire.MethodSignal, req, nil)
}

// Resize sets the terminal size of an exec that has one.
func (c *Conn) Resize(ctx context.Context, key string, size Size) error {
	return c.call(ctx, "resize exec "+key, wire.MethodResize, wire.ExecResize{Key: wire.Text(key), Size: size}, nil)
}
