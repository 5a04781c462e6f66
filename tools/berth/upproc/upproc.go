// Package upproc starts `berth up` as a process of its own, waits until it
// serves, and stops or kills it. It guarantees that no process outlives a
// Start that failed.
package upproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// stopTime is what sessions, and the members of a cluster, get to end in order.
const stopTime = 3 * time.Minute

// Options of one process.
type Options struct {
	Bin  string   // path of the berth program
	Dir  string   // state folder
	Args []string // further arguments of up
	Env  []string // added to this process's
}

// Process is a running `berth up`.
type Process struct {
	opts Options
	cmd  *exec.Cmd
	done chan struct{}
	err  error
	URL  string // of the bus
	// Metrics is the address of the metrics, empty when they are not served.
	Metrics string
	// Marks tell what runs or is mounted for this installation from another's.
	Marks []string
}

// Start starts it and returns when it serves. Its output is appended to
// <dir>/up.log, whose end is part of the error.
func Start(ctx context.Context, o Options) (*Process, error) {
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	// A file of an earlier process that was killed says nothing of this one.
	if err := os.Remove(filepath.Join(o.Dir, "up.json")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(o.Dir, "up.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &Process{opts: o, done: make(chan struct{})}
	args := []string{"up", "--dir", o.Dir}
	if !Many(o.Args) { // servers of a cluster have addresses of their own
		args = append(args, "--listen", "127.0.0.1:0")
	}
	p.cmd = exec.Command(o.Bin, append(args, o.Args...)...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), o.Env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is for the parent
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start berth up: %w", err)
	}
	go func() { p.err = p.cmd.Wait(); close(p.done) }()
	if err := p.awaitReady(ctx); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Many reports whether the arguments ask for a cluster of processes.
func Many(args []string) bool {
	for i, a := range args {
		flag, n, ok := strings.Cut(a, "=")
		if !ok && i+1 < len(args) {
			n = args[i+1]
		}
		if slices.Contains([]string{"--hosts", "--schedulers", "--nats"}, flag) && n != "1" {
			return true
		}
	}
	return false
}

func (p *Process) awaitReady(ctx context.Context) error {
	for {
		raw, err := os.ReadFile(filepath.Join(p.opts.Dir, "up.json"))
		var info struct {
			PID          int
			URL, Metrics string
			Marks        []string
		}
		if err == nil && json.Unmarshal(raw, &info) == nil && info.PID == p.cmd.Process.Pid {
			p.URL, p.Metrics, p.Marks = info.URL, info.Metrics, info.Marks
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("berth up ended before it was ready (%v):\n%s", p.err, p.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("berth up was not ready in time:\n%s", p.LogTail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// LogTail is the end of its output.
func (p *Process) LogTail() string {
	raw, _ := os.ReadFile(filepath.Join(p.opts.Dir, "up.log"))
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// Done is closed when it has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Stop asks it to stop and waits; sessions are put to sleep first.
func (p *Process) Stop() error {
	select {
	case <-p.done:
		return p.err
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.done:
		return p.err
	case <-time.After(stopTime):
		p.Kill()
		return fmt.Errorf("berth up did not stop within %s and was killed", stopTime)
	}
}

// Kill ends it with SIGKILL and waits; members of a cluster die with it, a moment later.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended by itself
	<-p.done
}

// PID of the process; members of a cluster have their own.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// ClientFile is the path of a client's login: "operator" or "fe-<tenant>-<frontend>".
func (p *Process) ClientFile(name string) string {
	return filepath.Join(p.opts.Dir, "clients", name+".json")
}

// Roots is the file of the roots that the bus's certificate is verified by.
func (p *Process) Roots() string { return filepath.Join(p.opts.Dir, "tls", "ca.pem") }

// Token mints a user's token with the development issuer.
func (p *Process) Token(ctx context.Context, tenant, user string) (string, error) {
	out, err := exec.CommandContext(ctx, p.opts.Bin, "dev", "token", "--dir", p.opts.Dir, "--tenant", tenant, "--user", user).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return "", fmt.Errorf("mint a token for %s of %s: %w", user, tenant, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Connect logs in as the frontend "web" of the user's tenant.
func (p *Process) Connect(ctx context.Context, tenant, user string) (*sdk.Client, error) {
	token, err := p.Token(ctx, tenant, user)
	if err != nil {
		return nil, err
	}
	return sdk.Connect(ctx, sdk.Config{ClientFile: p.ClientFile("fe-" + tenant + "-web"), User: sdk.Token(token)})
}
