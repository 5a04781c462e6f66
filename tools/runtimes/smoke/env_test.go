package smoke

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/berth-dev/berth/internal/ociimage"
	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

const namespace = "smoke"

// config is the containerd configuration that README.md shows.
const config = `version = 4
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

// runscConfig is what a container's options point to under runsc.
const runscConfig = `binary_name = '%[1]s/runsc'
root = '%[2]s/runsc'
[runsc_config]
  platform = 'systrap'
  overlay2 = 'none'
`

// env is a private containerd with the busybox image.
type env struct {
	ctx    context.Context
	dir    string // short, because socket paths are
	bin    string
	client *client.Client
	image  client.Image
	daemon *exec.Cmd
}

func newEnv(t *testing.T) *env {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	bin, err := locate.Dir()
	if err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("/tmp", "bs-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Cleanup(removeCgroups)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	e := &env{ctx: namespaces.WithNamespace(ctx, namespace), dir: dir, bin: bin}
	e.write(t, "config.toml", fmt.Sprintf(config, dir))
	e.write(t, "runsc.toml", fmt.Sprintf(runscConfig, bin, dir))
	e.startDaemon(t)
	t.Cleanup(func() { e.stopDaemon(t) })
	layout, err := builder.Busybox(e.ctx, io.Discard)
	if err != nil {
		t.Skip(err)
	}
	e.image = e.importLayout(t, layout, "berth.local/busybox:v1")
	return e
}

func (e *env) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(e.dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (e *env) startDaemon(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(e.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	e.daemon = exec.Command(filepath.Join(e.bin, locate.Containerd), "--config", filepath.Join(e.dir, "config.toml"))
	e.daemon.Env = append(os.Environ(), "PATH="+e.bin+":"+os.Getenv("PATH")) // the shims look for runc
	e.daemon.Stdout, e.daemon.Stderr = log, log
	if err := e.daemon.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		e.client, err = client.New(filepath.Join(e.dir, "grpc.sock"), client.WithTimeout(time.Second))
		if err == nil {
			if _, err = e.client.Version(e.ctx); err == nil {
				return
			}
			e.client.Close()
		}
		if time.Now().After(deadline) {
			t.Fatalf("containerd does not answer: %v\n%s", err, e.log())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// stopDaemon ends containerd; it fails the test if shims outlive their tasks.
func (e *env) stopDaemon(t *testing.T) {
	if t.Failed() {
		t.Logf("containerd's log:\n%s", e.log())
		e.removeAll()
	}
	deadline := time.Now().Add(10 * time.Second)
	for len(e.shims(t)) > 0 && time.Now().Before(deadline) {
		time.Sleep(20 * time.Millisecond)
	}
	for pid, name := range e.shims(t) {
		t.Errorf("%s (process %d) outlives its tasks", name, pid)
		syscall.Kill(pid, syscall.SIGKILL)
	}
	e.client.Close()
	e.daemon.Process.Signal(os.Interrupt)
	e.daemon.Wait()
	// runsc keeps an empty network namespace mounted in its root for good.
	if err := mount.UnmountRecursive(e.dir, 0); err != nil {
		t.Errorf("unmount what is left: %v", err)
	}
}

// removeCgroups removes the namespace's empty parent groups, which nobody else does.
func removeCgroups() {
	for _, pattern := range []string{"/sys/fs/cgroup/" + namespace, "/sys/fs/cgroup/*/" + namespace} {
		groups, _ := filepath.Glob(pattern)
		for _, group := range groups {
			syscall.Rmdir(group)
		}
	}
}

// removeAll removes what a failed test left running.
func (e *env) removeAll() {
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), namespace), 20*time.Second)
	defer cancel()
	containers, err := e.client.Containers(ctx)
	if err != nil {
		return
	}
	for _, c := range containers {
		if task, err := c.Task(ctx, nil); err == nil {
			task.Delete(ctx, client.WithProcessKill)
		}
		c.Delete(ctx, client.WithSnapshotCleanup)
	}
}

func (e *env) killDaemon(t *testing.T) {
	t.Helper()
	e.client.Close()
	e.daemon.Process.Kill()
	e.daemon.Wait()
}

func (e *env) log() string {
	data, _ := os.ReadFile(filepath.Join(e.dir, "log"))
	lines := strings.Split(string(data), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// importLayout imports the image of an OCI layout and unpacks it.
func (e *env) importLayout(t *testing.T, layout, name string) client.Image {
	t.Helper()
	img, err := ociimage.Load(layout)
	if err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(ociimage.WriteArchive(w, name, img)) }()
	if _, err := e.client.Import(e.ctx, r); err != nil {
		t.Fatal(err)
	}
	imported, err := e.client.GetImage(e.ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if want, _ := img.Digest(); imported.Target().Digest.String() != want.String() {
		t.Errorf("containerd's digest %v; want %v", imported.Target().Digest, want)
	}
	if err := imported.Unpack(e.ctx, "overlayfs"); err != nil {
		t.Fatal(err)
	}
	return imported
}

// shims lists the shim processes of this containerd by process id.
func (e *env) shims(t *testing.T) map[int]string {
	t.Helper()
	found := make(map[int]string)
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range procs {
		line, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		args := strings.Split(string(line), "\x00")
		name := filepath.Base(args[0])
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && strings.HasPrefix(name, "containerd-shim-") && slices.Contains(args, e.dir+"/grpc.sock") {
			found[pid] = name
		}
	}
	return found
}

// runtime returns the options with which containers of a handler are made.
func (e *env) runtime(handler string) client.NewContainerOpts {
	if handler == locate.HandlerRunsc {
		return client.WithRuntime(handler, &runtimeoptions.Options{
			TypeUrl:    locate.RunscOptionsType,
			ConfigPath: filepath.Join(e.dir, "runsc.toml"),
		})
	}
	return client.WithRuntime(handler, &options.Options{
		BinaryName: filepath.Join(e.bin, locate.Runc),
		Root:       filepath.Join(e.dir, "runc"),
	})
}
