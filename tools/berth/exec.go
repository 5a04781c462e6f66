package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/sdk"
)

type execCmd struct {
	userFlags
	Interactive bool          `short:"i" help:"Pass standard input on."`
	TTY         bool          `short:"t" name:"tty" help:"Run it on a terminal."`
	Env         []string      `short:"e" help:"Set a variable: NAME=VALUE." placeholder:"NAME=VALUE" sep:"none"`
	Workdir     string        `short:"w" help:"Working directory." placeholder:"DIR"`
	As          string        `help:"User inside: name, uid or uid:gid." placeholder:"USER"`
	Timeout     time.Duration `help:"Kill it after so long." placeholder:"DURATION"`
	Key         string        `help:"Idempotency key: the same key never starts a second process." placeholder:"KEY"`
	Args        []string      `arg:"" optional:"" passthrough:"" name:"args" help:"[SESSION] -- COMMAND [ARG...]. The session is a name or a key; default: default."`

	size sdk.Size // of the terminal, as the process knows it
}

// split takes the session and the command apart: [SESSION] -- COMMAND... raw
// are the program's arguments as they were typed: kong takes a -- away that
// comes first. Without -- there is no command: a word that was meant as one must
// not open a session of that name.
func (c *execCmd) split(raw []string) (session string, argv []string) {
	before := len(raw) - len(c.Args) - 1
	switch {
	case before >= 0 && raw[before] == "--":
		return string(ids.DefaultSession), c.Args
	case len(c.Args) == 0:
		return "", nil
	case c.Args[0] == "--":
		return string(ids.DefaultSession), c.Args[1:]
	case len(c.Args) > 1 && c.Args[1] == "--":
		return c.Args[0], c.Args[2:]
	}
	return "", nil
}

func (c *execCmd) Run(a *app) error {
	session, argv := c.split(a.args)
	cmd, err := c.command(a, argv)
	if err != nil {
		return err
	}
	cl, name, err := c.named(a, session)
	if err != nil {
		return err
	}
	defer cl.Close()
	s, err := a.open(cl, sdk.OpenOptions{Name: name})
	if err != nil {
		return err
	}
	defer s.Detach()
	a.sayRestored(s)
	if c.TTY {
		restore, err := raw(a.stdin)
		if err != nil {
			return err
		}
		defer restore()
	}
	return c.follow(a, s, cmd, cl.NATS().IsConnected)
}

// lastWord is how long a command may take to learn that it is given up.
const lastWord = time.Second

// follow runs the command until it has ended, or a signal ends the program first.
func (c *execCmd) follow(a *app, s *sdk.Session, cmd sdk.Cmd, connected func() bool) error {
	ctx, cancel := context.WithCancel(a.ctx)
	defer cancel()
	started, quit, stop := c.signals(a, connected)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		p, err := s.Exec(ctx, cmd)
		if err == nil {
			select {
			case started <- p:
			case <-ctx.Done():
			}
			err = exitOf(p.Wait())
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case sig := <-quit:
		cancel()
		select {
		case <-ended:
		case <-time.After(lastWord):
		}
		return exitCode{128 + int(sig), "given up by " + unix.SignalName(sig) + "; whether the command goes on cannot be known"}
	}
}

// command checks the flags before anything is opened.
func (c *execCmd) command(a *app, argv []string) (sdk.Cmd, error) {
	if len(argv) == 0 {
		return sdk.Cmd{}, usage("there is no command to run; flags come first, then the session, then -- and the command")
	}
	cmd := sdk.Cmd{Args: argv, Dir: c.Workdir, User: c.As, Timeout: c.Timeout, Key: c.Key, Stdout: a.stdout, Stderr: a.stderr, Env: map[string]string{}}
	for _, e := range c.Env {
		k, v, ok := strings.Cut(e, "=")
		if !ok || k == "" {
			return cmd, usage("the variable %q is not NAME=VALUE", e)
		}
		cmd.Env[k] = v
	}
	if c.Interactive && c.Token == "-" {
		return cmd, usage("standard input can be the token or go to the command; with -i give the token as @FILE")
	}
	if c.Interactive {
		cmd.Stdin = a.stdin
	}
	if c.TTY {
		if !isTerminal(a.stdin) {
			return cmd, usage("-t needs a terminal as standard input")
		}
		cmd.PTY = terminalSize(a.stdin)
		c.size = *cmd.PTY
		if _, set := cmd.Env["TERM"]; !set && os.Getenv("TERM") != "" {
			cmd.Env["TERM"] = os.Getenv("TERM")
		}
	}
	return cmd, nil
}

// signals passes signals and the terminal's size on to the process that is
// handed to it. A signal that ends programs, and cannot be passed on since
// nothing was started yet or the stream is lost, or came before, is for the
// program itself: it comes out of quit.
func (c *execCmd) signals(a *app, connected func() bool) (started chan<- *sdk.Process, quit <-chan syscall.Signal, stop func()) {
	ch, procs, out := make(chan os.Signal, 8), make(chan *sdk.Process), make(chan syscall.Signal, 1)
	done, ended := make(chan struct{}), make(chan struct{})
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGWINCH)
	go func() {
		defer close(ended)
		var p *sdk.Process
		came := map[os.Signal]bool{}
		for {
			select {
			case <-done:
				return
			case p = <-procs:
				c.resize(a, p) // it may have changed meanwhile
			case sig := <-ch:
				if sig == syscall.SIGWINCH {
					c.resize(a, p)
					continue
				}
				n := sig.(syscall.Signal)
				if p == nil || came[sig] || !connected() || errors.Is(p.Signal(unix.SignalName(n)), sdk.ErrUnavailable) {
					out <- n
					return
				}
				came[sig] = true
			}
		}
	}()
	return procs, out, func() { signal.Stop(ch); close(done); <-ended }
}

func (c *execCmd) resize(a *app, p *sdk.Process) {
	if size := terminalSize(a.stdin); c.TTY && p != nil && size != nil && *size != c.size {
		c.size = *size
		_ = p.Resize(*size)
	}
}

// exitOf makes the process's end the program's.
func exitOf(err error) error {
	exit, unknown := (*sdk.ExitError)(nil), (*sdk.UnknownExitError)(nil)
	lost := (*sdk.LostOutputError)(nil)
	switch {
	case errors.As(err, &unknown):
		return exitCode{255, "how the command ended cannot be known: " + unknown.Reason}
	case errors.As(err, &exit):
		out := exitCode{code: exit.Code}
		if exit.Signal != "" {
			out = exitCode{128 + int(unix.SignalNum(exit.Signal)), "the command was ended by " + exit.Signal}
		}
		if exit.TimedOut {
			out.text = "the command was killed after its time-out"
		}
		if exit.OOM {
			out.text = "the command was killed: the session ran out of memory"
		}
		if errors.As(err, &lost) {
			out.text = lost.Error()
		}
		return out
	}
	return err
}

// raw puts the terminal into raw mode; keys go to the process as they are.
func raw(in io.Reader) (restore func(), err error) {
	f := in.(interface{ Fd() uintptr })
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	return func() { _ = term.Restore(int(f.Fd()), old) }, nil
}

func terminalSize(in io.Reader) *sdk.Size {
	f, ok := in.(interface{ Fd() uintptr })
	if !ok {
		return nil
	}
	w, h, err := term.GetSize(int(f.Fd()))
	if err != nil || w <= 0 || h <= 0 {
		return &sdk.Size{Rows: 24, Cols: 80}
	}
	return &sdk.Size{Rows: uint32(h), Cols: uint32(w)}
}
