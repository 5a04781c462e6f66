package containerd

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"text/template"
	"time"

	"golang.org/x/sys/unix"
)

const (
	stopTime     = 5 * time.Second
	restartFirst = 20 * time.Millisecond
	restartLast  = 5 * time.Second
	maxLog       = 8 << 20
)

// configText is a containerd with what containers need and nothing else; ctr works on it too.
var configText = template.Must(template.New("config").Parse(`version = 4
root = {{printf "%q" .Root}}
state = {{printf "%q" .State}}
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.internal.v1.opt", "io.containerd.monitor.container.v1.restart", "io.containerd.monitor.task.v1.cgroups",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs", "io.containerd.differ.v1.erofs",
  "io.containerd.mount-handler.v1.erofs", "io.containerd.http.v1.pprof", "io.containerd.metrics.v1.grpc-otel",
  "io.containerd.metrics.v1.grpc-prometheus",
]

[plugins.'io.containerd.server.v1.grpc']
  address = {{printf "%q" .Socket}}
[plugins.'io.containerd.server.v1.ttrpc']
  address = {{printf "%q" .TTRPC}}
[plugins.'io.containerd.shim.v1.manager']
  socket_dir = {{printf "%q" .Shims}}
[plugins.'io.containerd.image-verifier.v1.bindir']
  bin_dir = {{printf "%q" .None}}
`))

// daemon is a private containerd under supervision: it is started again when it dies, and it dies
// with this process.
type daemon struct {
	dir, run, binary string
	log              *slog.Logger
	quit             chan struct{}
	done             chan struct{}
}

// startDaemon ends what an earlier process left and starts a new one.
func startDaemon(ctx context.Context, cfg Config, log *slog.Logger) (*daemon, error) {
	d := &daemon{
		dir: filepath.Join(cfg.State, "containerd"), run: cfg.Run, binary: filepath.Join(cfg.Runtimes, binContainerd),
		log: log, quit: make(chan struct{}), done: make(chan struct{}),
	}
	if err := os.MkdirAll(d.dir, 0o711); err != nil {
		return nil, err
	}
	if err := d.writeConfig(); err != nil {
		return nil, err
	}
	if err := d.endStale(ctx); err != nil {
		return nil, err
	}
	started := make(chan error, 1)
	go d.supervise(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	return d, nil
}

func (d *daemon) socket() string  { return filepath.Join(d.run, "containerd.sock") }
func (d *daemon) config() string  { return filepath.Join(d.dir, "config.toml") }
func (d *daemon) pidFile() string { return filepath.Join(d.dir, "containerd.pid") }

func (d *daemon) writeConfig() error {
	f, err := os.Create(d.config())
	if err != nil {
		return err
	}
	err = configText.Execute(f, map[string]string{
		"Root": filepath.Join(d.dir, "root"), "State": filepath.Join(d.dir, "state"), "Socket": d.socket(),
		"TTRPC": d.socket() + ".ttrpc", "Shims": filepath.Join(d.run, "s"), "None": filepath.Join(d.dir, "none"),
	})
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// endStale ends a containerd on the same data that outlived its host agent: two would fight.
func (d *daemon) endStale(ctx context.Context) error {
	b, err := os.ReadFile(d.pidFile())
	if err != nil {
		return nil
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return nil
	}
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if !strings.Contains(string(cmdline), d.config()) {
		return nil // another process has the number by now
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return fmt.Errorf("end the earlier containerd: %w", err)
	}
	for ctx.Err() == nil {
		if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100); n == 1 {
			return nil
		}
	}
	return ctx.Err()
}

// supervise keeps containerd running. Its thread is the parent whose death takes containerd along.
func (d *daemon) supervise(started chan<- error) {
	defer close(d.done)
	runtime.LockOSThread()
	backoff := restartFirst
	for first := true; ; first = false {
		cmd, err := d.spawn()
		if first {
			started <- err
			if err != nil {
				return
			}
		}
		began := time.Now()
		if err == nil {
			if d.wait(cmd) {
				return
			}
			d.log.Error("containerd ended; starting it again", "state", cmd.ProcessState.String())
		} else {
			d.log.Error("cannot start containerd", "err", err)
		}
		if time.Since(began) > restartLast {
			backoff = restartFirst
		}
		select {
		case <-d.quit:
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, restartLast)
	}
}

func (d *daemon) spawn() (*exec.Cmd, error) {
	name := filepath.Join(d.dir, "containerd.log")
	if st, err := os.Stat(name); err == nil && st.Size() > maxLog {
		_ = os.Rename(name, name+".1")
	}
	log, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(d.binary, "--config", d.config())
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(d.binary)+":"+os.Getenv("PATH"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return cmd, os.WriteFile(d.pidFile(), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

// wait returns when containerd ended; true if it was asked to.
func (d *daemon) wait(cmd *exec.Cmd) bool {
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	select {
	case <-ended:
		return false
	case <-d.quit:
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
	case <-time.After(stopTime):
		_ = cmd.Process.Kill()
		<-ended
	}
	_ = os.Remove(d.pidFile())
	return true
}

func (d *daemon) stop() {
	select {
	case <-d.quit:
	default:
		close(d.quit)
	}
	<-d.done
}
