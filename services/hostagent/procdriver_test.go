package hostagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/svc"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/agent"
)

// The test binary plays other parts too: a hostagent that gets killed, and the guest: with BERTH_TEST_ROLE=guest it is the real agent as PID 1 of a
// pid namespace, which sees the test machine's files.
func TestMain(m *testing.M) {
	switch os.Getenv("BERTH_TEST_ROLE") {
	case "guest":
		os.Exit(guestMain())
	case "hostagent":
		os.Exit(hostMain(os.Getenv("BERTH_TEST_DIR")))
	}
	os.Exit(m.Run())
}

func guestMain() int {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount("proc", "/proc", "proc", 0, "")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		return 98
	}
	if dir := os.Getenv("BERTH_TEST_UPPER"); dir != "" { // as in a machine
		upper, err := os.Open(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			return 97
		}
		return agent.MainOn(os.Stdin, os.Stdout, agent.Options{Upper: upper})
	}
	return agent.Main(nil)
}

func hostMain(dir string) int {
	cfg := NewConfig()
	var login bus.Login
	ctx, stop := svc.SignalContext(context.Background())
	defer stop()
	err := svc.LoadConfig(filepath.Join(dir, "config.yaml"), &cfg)
	if err == nil {
		var b []byte
		if b, err = os.ReadFile(filepath.Join(dir, "login.yaml")); err == nil {
			err = yaml.Unmarshal(b, &login)
		}
	}
	var conn *bus.Conn
	if err == nil {
		conn, err = bus.Connect(ctx, login)
	}
	if err == nil {
		err = Run(ctx, cfg, conn, loadLayout, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo})), nil)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hostagent:", err)
		return 1
	}
	return 0
}

// procs is a driver whose sandboxes are bare processes. It survives a hostagent as a runtime would:
// the same value is given to the next one.
type procs struct {
	t   *testing.T
	dir string
	mu  sync.Mutex
	all map[ids.SandboxID]*proc
	// stopFails makes the next calls of Stop fail.
	stopFails int
	// listFails makes List fail.
	listFails bool
	// slow delays Create until it is closed.
	slow chan struct{}
	ev   chan driver.Event
	env  func(driver.Spec) []string
	caps map[driver.Tier]driver.Capabilities // nil: of tier null alone
}

type proc struct {
	driver.Sandbox
	cmd  *exec.Cmd
	held [2]*os.File
	done chan struct{}
}

func newProcs(t *testing.T) *procs {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for pid namespaces")
	}
	p := &procs{t: t, dir: t.TempDir(), all: map[ids.SandboxID]*proc{}, ev: make(chan driver.Event, 64)}
	t.Cleanup(func() {
		for id := range p.all {
			_ = p.kill(id)
		}
	})
	return p
}

func (p *procs) Capabilities() map[driver.Tier]driver.Capabilities {
	if p.caps != nil {
		return p.caps
	}
	return map[driver.Tier]driver.Capabilities{driver.Null: {Native: true, Adopts: true, Holds: true}}
}

func (p *procs) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	p.mu.Lock()
	slow := p.slow
	p.mu.Unlock()
	if slow != nil {
		select {
		case <-slow:
		case <-ctx.Done():
			return driver.Sandbox{}, ctx.Err()
		}
	}
	if err := spec.Check(p.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.all[spec.ID()]; q != nil {
		return q.Sandbox, nil
	}
	for _, q := range p.all {
		if q.Session == spec.Session {
			return driver.Sandbox{}, errs.E("create sandbox", errkind.Busy, "", "another epoch has compute here")
		}
	}
	q, err := p.spawn(spec.ID(), spec)
	if err != nil {
		return driver.Sandbox{}, err
	}
	p.all[spec.ID()] = q
	return q.Sandbox, nil
}

func (p *procs) spawn(id ids.SandboxID, spec driver.Spec) (*proc, error) {
	base := filepath.Join(p.dir, string(id))
	q := &proc{done: make(chan struct{}), Sandbox: driver.Sandbox{
		ID: id, Session: spec.Session, Generation: spec.Generation, Epoch: spec.Epoch, Tier: spec.Tier,
		Channel: driver.Channel{Stdin: base + ".in", Stdout: base + ".out"},
	}}
	for i, path := range []string{q.Channel.Stdin, q.Channel.Stdout} {
		if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, err
		}
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		q.held[i] = os.NewFile(uintptr(fd), path)
	}
	q.cmd = exec.Command("/proc/self/exe")
	q.cmd.Env = append(os.Environ(), "BERTH_TEST_ROLE=guest")
	if p.env != nil {
		q.cmd.Env = append(q.cmd.Env, p.env(spec)...)
	}
	q.cmd.Stdin, q.cmd.Stdout = q.held[0], q.held[1]
	q.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	if err := q.cmd.Start(); err != nil {
		return nil, err
	}
	q.PID = q.cmd.Process.Pid
	go func() {
		_ = q.cmd.Wait()
		close(q.done)
		select {
		case p.ev <- driver.Event{ID: q.ID, Kind: driver.EventExited, ExitStatus: 137, At: time.Now()}:
		default:
		}
	}()
	return q, nil
}

func (p *procs) kill(id ids.SandboxID) error {
	p.mu.Lock()
	q := p.all[id]
	delete(p.all, id)
	p.mu.Unlock()
	if q == nil {
		return nil
	}
	_ = q.cmd.Process.Kill()
	<-q.done
	return errors.Join(q.held[0].Close(), q.held[1].Close(), os.Remove(q.Channel.Stdin), os.Remove(q.Channel.Stdout))
}

func (p *procs) Stop(_ context.Context, id ids.SandboxID) error {
	p.mu.Lock()
	fail := p.stopFails > 0
	if fail {
		p.stopFails--
	}
	p.mu.Unlock()
	if fail {
		return errs.E("stop sandbox", errkind.Internal, string(id), "it was asked to fail")
	}
	return p.kill(id)
}

func (p *procs) List(context.Context) ([]driver.Found, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listFails {
		return nil, errs.E("list sandboxes", errkind.Unavailable, "", "it was asked to fail")
	}
	var out []driver.Found
	for _, q := range p.all {
		f := driver.Found{Sandbox: q.Sandbox, State: driver.Running, Parts: []string{"process"}}
		select {
		case <-q.done:
			f.State = driver.Exited
		default:
		}
		out = append(out, f)
	}
	return out, nil
}

func (p *procs) Close() error { return nil }

// Watch implements driver.Watcher unless the test took the events away.
func (p *procs) Watch(ctx context.Context) (<-chan driver.Event, error) {
	if p.ev == nil {
		return nil, errs.E("watch", errkind.Unavailable, "", "there are no events")
	}
	out := make(chan driver.Event)
	go func() {
		defer close(out)
		for {
			select {
			case e := <-p.ev:
				select {
				case out <- e:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (p *procs) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.all)
}

// murder kills a sandbox's first process from outside.
func (p *procs) murder(id ids.SandboxID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.all[id].cmd.Process.Kill()
}
