package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// upProcess is a running `berth up`.
type upProcess struct {
	cmd  *exec.Cmd
	bin  string
	dir  string
	done chan error
	log  string
}

// startUp starts berth up and waits for its ready file.
func startUp(ctx context.Context, dir string, idle time.Duration) (*upProcess, error) {
	p := &upProcess{bin: "bin/berth", dir: dir, done: make(chan error, 1), log: filepath.Join(dir, "up.log")}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd = exec.Command(p.bin, "up", "--dir", dir, "--listen", "127.0.0.1:0", "--idle", idle.String())
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start berth up: %w", err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	for {
		if _, err := os.Stat(filepath.Join(dir, "up.json")); err == nil {
			return p, nil
		}
		select {
		case err := <-p.done:
			return nil, fmt.Errorf("berth up ended before it was ready (%v):\n%s", err, tailOf(p.log))
		case <-ctx.Done():
			_ = p.stop()
			return nil, fmt.Errorf("berth up was not ready in time:\n%s", tailOf(p.log))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func tailOf(path string) string {
	raw, _ := os.ReadFile(path)
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

func (p *upProcess) token(ctx context.Context, tenant, user string) (string, error) {
	out, err := exec.CommandContext(ctx, p.bin, "dev", "token", "--dir", p.dir, "--tenant", tenant, "--user", user).Output()
	if err != nil {
		return "", fmt.Errorf("mint a token for %s: %w", user, err)
	}
	return strings.TrimSpace(string(out)), nil
}

func (p *upProcess) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-p.done:
		return err
	case <-time.After(60 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
		return errors.New("it did not stop within 60 s and was killed")
	}
}

// residue is what runs or is mounted on the host for sandboxes.
type residue struct {
	processes, mounts, cgroups, loops map[string]bool
}

// ours are the programs whose processes count.
var ours = []string{"containerd-shim", "runsc", "runc", "berth-guest", "/run/berth/guest", "containerd"}

// takeResidue looks at the whole host; dir narrows nothing, it only names
// mounts and loop devices of this installation beside those of any other.
func takeResidue(dir string) residue {
	r := residue{map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}}
	pids, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range pids {
		raw, err := os.ReadFile(p + "/cmdline")
		cmd := strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
		cg, _ := os.ReadFile(p + "/cgroup")
		if err == nil && (slices.ContainsFunc(ours, func(o string) bool { return strings.Contains(cmd, o) }) || strings.Contains(string(cg), "berth")) {
			r.processes[fmt.Sprintf("%s %.60s", filepath.Base(p), cmd)] = true
		}
	}
	if f, err := os.Open("/proc/self/mountinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if fields := strings.Fields(lines.Text()); len(fields) > 4 {
				r.mounts[fields[4]] = true
			}
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(path, "berth") {
			r.cgroups[path] = true
		}
		return nil
	})
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		raw, _ := os.ReadFile(l)
		r.loops[strings.TrimSpace(string(raw))] = true
	}
	return r
}

func (r residue) minus(o residue) residue {
	sub := func(a, b map[string]bool) map[string]bool {
		out := map[string]bool{}
		for k := range a {
			if !b[k] {
				out[k] = true
			}
		}
		return out
	}
	return residue{sub(r.processes, o.processes), sub(r.mounts, o.mounts), sub(r.cgroups, o.cgroups), sub(r.loops, o.loops)}
}

func (r residue) empty() bool {
	return len(r.processes)+len(r.mounts)+len(r.cgroups)+len(r.loops) == 0
}

func (r residue) text() string {
	s := fmt.Sprintf("%d processes, %d mounts, %d cgroups, %d loop devices", len(r.processes), len(r.mounts), len(r.cgroups), len(r.loops))
	for _, m := range []map[string]bool{r.processes, r.mounts, r.cgroups, r.loops} {
		for k := range m {
			if len(s) < 400 {
				s += "; " + k
			}
		}
	}
	return s
}

// filesNaming lists the files below dir whose name holds word.
func filesNaming(dir, word string) (found []string, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && strings.Contains(e.Name(), word) {
			found = append(found, path)
		}
		return nil
	})
	return found, err
}

// eventLog follows every event as the operator.
type eventLog struct {
	client *sdk.Client
	cancel context.CancelFunc
	mu     sync.Mutex
	all    []sdk.Event
	done   chan struct{}
}

func followEvents(ctx context.Context, clientFile string) (*eventLog, error) {
	client, err := sdk.Connect(ctx, sdk.Config{ClientFile: clientFile})
	if err != nil {
		return nil, fmt.Errorf("connect as operator: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &eventLog{client: client, cancel: cancel, done: make(chan struct{})}
	seq, err := client.Events(ctx, sdk.EventFilter{})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("follow events: %w", err)
	}
	go func() {
		defer close(l.done)
		for ev, err := range seq {
			if err != nil {
				return
			}
			l.mu.Lock()
			l.all = append(l.all, ev)
			l.mu.Unlock()
		}
	}()
	return l, nil
}

// waitAsleep waits for the session's asleep event and returns its time and how
// long the way from the idle event took.
func (l *eventLog) waitAsleep(ctx context.Context, key string) (at time.Time, took time.Duration, err error) {
	deadline := time.After(2 * time.Minute)
	for {
		var idle time.Time
		l.mu.Lock()
		for _, ev := range l.all {
			switch {
			case ev.Session != key:
			case ev.Name == "idle":
				idle = ev.Time
			case ev.Name == "asleep":
				at = ev.Time
			}
		}
		l.mu.Unlock()
		if !at.IsZero() && !idle.IsZero() {
			return at, at.Sub(idle), nil
		}
		select {
		case <-ctx.Done():
			return at, 0, ctx.Err()
		case <-deadline:
			return at, 0, errors.New("it did not fall asleep within 2 minutes")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stop ends the log and renders it for people.
func (l *eventLog) stop() []string {
	l.cancel()
	<-l.done
	l.client.Close()
	var out []string
	for _, ev := range l.all {
		state := ""
		if ev.State != "" {
			state = "→ " + string(ev.State)
		}
		out = append(out, fmt.Sprintf("%s  %-7s %.12s…  %-9s %s", ev.Time.Local().Format("15:04:05.000"), ev.Tenant, ev.Session, ev.Name, state))
	}
	return out
}
