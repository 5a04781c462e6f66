// Package peer is a plain containerd of its own, with the same runtimes, shims and image, driven by
// ctr: what a sandbox costs without Berth. It guarantees that nothing of it is left after Stop.
package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// Peer is a running one.
type Peer struct {
	dir, bin string
	daemon   *exec.Cmd
	client   *client.Client
	serial   int
}

const (
	peerImage     = "berth.local/default:bench"
	peerNamespace = "bench"
	peerConfig    = `version = 4
root = '%[1]s/root'
state = '%[1]s/state'
imports = []
disabled_plugins = ['io.containerd.internal.v1.opt']
[plugins.'io.containerd.server.v1.grpc']
  address = '%[1]s/grpc.sock'
[plugins.'io.containerd.server.v1.ttrpc']
  address = '%[1]s/ttrpc.sock'
[plugins.'io.containerd.shim.v1.manager']
  socket_dir = '%[1]s/s'
[plugins.'io.containerd.nri.v1.nri']
  disable = true
`
	peerRunsc = `binary_name = '%[1]s/runsc'
root = '%[2]s/runsc'
[runsc_config]
  platform = 'systrap'
  network = 'none'
`
)

// Start starts one and brings the default image in.
func Start(ctx context.Context) (p *Peer, err error) {
	p = &Peer{}
	if p.bin, err = locate.Dir(); err != nil {
		return nil, err
	}
	layout, err := builder.Built()
	if err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("/tmp", "bp-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.Stop()
		}
	}()
	for name, text := range map[string]string{"config.toml": fmt.Sprintf(peerConfig, p.dir), "runsc.toml": fmt.Sprintf(peerRunsc, p.bin, p.dir)} {
		if err := os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	if err := p.startDaemon(ctx); err != nil {
		return nil, err
	}
	archive := filepath.Join(p.dir, "image.tar")
	if out, err := exec.CommandContext(ctx, "tar", "-C", layout, "-cf", archive, ".").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pack the image: %w: %s", err, out)
	}
	if out, err := p.ctr(ctx, "images", "import", "--index-name", peerImage, archive).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("import the image: %w: %s", err, out)
	}
	return p, os.Remove(archive)
}

func (p *Peer) startDaemon(ctx context.Context) error {
	log, err := os.Create(filepath.Join(p.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	p.daemon = exec.Command(filepath.Join(p.bin, locate.Containerd), "--config", filepath.Join(p.dir, "config.toml"))
	p.daemon.Env = append(os.Environ(), "PATH="+p.bin+":"+os.Getenv("PATH"))
	p.daemon.Stdout, p.daemon.Stderr = log, log
	if err := p.daemon.Start(); err != nil {
		return err
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		p.client, err = client.New(filepath.Join(p.dir, "grpc.sock"), client.WithTimeout(time.Second))
		if err == nil {
			if _, err = p.client.Version(ctx); err == nil {
				return nil
			}
			p.client.Close()
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("the peer's containerd does not answer: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Stop ends it and removes what it made.
func (p *Peer) Stop() {
	if p.client != nil {
		p.client.Close()
	}
	if p.daemon != nil && p.daemon.Process != nil {
		_ = p.daemon.Process.Signal(syscall.SIGTERM)
		_ = p.daemon.Wait()
	}
	_ = syscall.Unmount(filepath.Join(p.dir, "runsc", peerNamespace, "null-netns"), syscall.MNT_DETACH) // runsc leaves it
	if err := os.RemoveAll(p.dir); err != nil {
		fmt.Fprintf(os.Stderr, "bench: remove the peer's folder: %v\n", err)
	}
}

func (p *Peer) ctr(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, filepath.Join(p.bin, locate.Ctr),
		append([]string{"--address", filepath.Join(p.dir, "grpc.sock"), "--namespace", peerNamespace}, args...)...)
}

// runArgs are those of `ctr run` for a tier.
func (p *Peer) runArgs(tier, id string) []string {
	args := []string{"run", "--runtime", locate.HandlerRunc}
	if tier == "gvisor" {
		args = []string{"run", "--runtime", locate.HandlerRunsc, "--runtime-config-path", filepath.Join(p.dir, "runsc.toml")}
	}
	return append(args, "--annotation", locate.AnnotationType+"="+locate.TypeSandbox,
		"--annotation", locate.AnnotationSandboxID+"="+id)
}

// FirstOutput times `ctr run IMAGE echo`, from the start of the ctr process to
// the first byte it prints. Removal comes after the clock.
func (p *Peer) FirstOutput(ctx context.Context, tier string) (time.Duration, error) {
	p.serial++
	id := fmt.Sprintf("cold-%s-%d", tier, p.serial)
	cmd := p.ctr(ctx, append(p.runArgs(tier, id), peerImage, id, "echo", "x")...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	var one [1]byte
	_, readErr := io.ReadFull(out, one[:])
	took := time.Since(began)
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait() // under runsc, ctr loses the exit code of so short a run now and then; the byte is what counts
	err = readErr
	if outb, rmErr := p.ctr(ctx, "containers", "rm", id).CombinedOutput(); rmErr != nil {
		err = errors.Join(err, fmt.Errorf("%w: %s", rmErr, outb))
	}
	if err != nil {
		return 0, fmt.Errorf("ctr run (%s): %w", tier, err)
	}
	return took, nil
}

// Execs starts a container and calls measure with what times one exec of true
// in it, by containerd's client: from the request for the exec to its exit.
func (p *Peer) Execs(ctx context.Context, tier string, measure func(one func() (time.Duration, error)) error) (err error) {
	id := "exec-" + tier
	if out, err := p.ctr(ctx, append(p.runArgs(tier, id), "--detach", peerImage, id, "sleep", "600")...).CombinedOutput(); err != nil {
		return fmt.Errorf("ctr run (%s): %w: %s", tier, err, out)
	}
	ctx = namespaces.WithNamespace(ctx, peerNamespace)
	c, err := p.client.LoadContainer(ctx, id)
	if err != nil {
		return err
	}
	task, err := c.Task(ctx, nil)
	if err != nil {
		return err
	}
	defer func() {
		_, kerr := task.Delete(ctx, client.WithProcessKill)
		err = errors.Join(err, kerr, c.Delete(ctx, client.WithSnapshotCleanup))
	}()
	spec, err := c.Spec(ctx)
	if err != nil {
		return err
	}
	serial := 0
	return measure(func() (time.Duration, error) {
		serial++
		process := *spec.Process
		process.Args = []string{"true"}
		return execOnce(ctx, task, fmt.Sprintf("e%d", serial), &process)
	})
}

func execOnce(ctx context.Context, task client.Task, id string, spec *specs.Process) (time.Duration, error) {
	began := time.Now()
	process, err := task.Exec(ctx, id, spec, cio.NullIO)
	if err != nil {
		return 0, err
	}
	exited, err := process.Wait(ctx)
	if err != nil {
		return 0, err
	}
	if err := process.Start(ctx); err != nil {
		return 0, err
	}
	status := <-exited
	took := time.Since(began)
	_, err = process.Delete(ctx)
	return took, errors.Join(err, status.Error())
}
