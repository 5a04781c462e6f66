package smoke

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/berth-dev/berth/tools/image/builder"
	"github.com/berth-dev/berth/tools/runtimes/locate"
)

// envAttach makes the test binary act as a host process attached to two pipes.
const envAttach = "BERTH_SMOKE_ATTACH"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envAttach); dir != "" {
		attach(dir)
		return
	}
	os.Exit(m.Run())
}

// attach sends one line to the container, prints the answer and then stays until
// it is killed, as the only reader and writer of the container's streams.
func attach(dir string) {
	in, err := os.OpenFile(filepath.Join(dir, "stdin"), os.O_WRONLY, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	out, err := os.OpenFile(filepath.Join(dir, "stdout"), os.O_RDONLY, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Fprintf(in, "hello from %d\n", os.Getpid())
	line, err := bufio.NewReader(out).ReadString('\n')
	fmt.Printf("%s|%v\n", strings.TrimSpace(line), err)
	time.Sleep(time.Hour)
}

// attachAndDie runs attach in a process of its own and kills it after the echo.
func attachAndDie(t *testing.T, dir string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envAttach+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(15*time.Second, func() { cmd.Process.Kill() })
	defer timer.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	cmd.Process.Kill()
	cmd.Wait()
	if want := fmt.Sprintf("hello from %d|<nil>\n", cmd.Process.Pid); line != want {
		t.Fatalf("the container echoes %q, %v; want %q", line, err, want)
	}
}

// pipes are streams that containerd's client neither opens nor reads.
type pipes struct{ config cio.Config }

func (p pipes) Config() cio.Config { return p.config }
func (pipes) Cancel()              {}
func (pipes) Wait()                {}
func (pipes) Close() error         { return nil }

func newPipes(t *testing.T, dir string) cio.Creator {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c := cio.Config{Stdin: dir + "/stdin", Stdout: dir + "/stdout", Stderr: dir + "/stderr"}
	for _, path := range []string{c.Stdin, c.Stdout, c.Stderr} {
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return func(string) (cio.IO, error) { return pipes{c}, nil }
}

// create makes a container of a sandbox and its task. Process 1 is cat, unless the
// options say otherwise.
func (e *env) create(t *testing.T, handler, id, sandbox string, more ...oci.SpecOpts) client.Task {
	t.Helper()
	return e.createWith(t, handler, id, sandbox, newPipes(t, filepath.Join(e.dir, id)), more...)
}

func (e *env) createWith(t *testing.T, handler, id, sandbox string, streams cio.Creator, more ...oci.SpecOpts) client.Task {
	t.Helper()
	kind := locate.TypeContainer
	if id == sandbox {
		kind = locate.TypeSandbox
	}
	spec := append([]oci.SpecOpts{
		oci.WithImageConfig(e.image),
		oci.WithProcessArgs("cat"),
		oci.WithAnnotations(map[string]string{
			locate.AnnotationType:      kind,
			locate.AnnotationSandboxID: sandbox,
		}),
	}, more...)
	container, err := e.client.NewContainer(e.ctx, id,
		client.WithImage(e.image),
		client.WithNewSnapshot(id, e.image),
		e.runtime(handler),
		client.WithNewSpec(spec...))
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(e.ctx, streams)
	if err != nil {
		t.Fatalf("create: %v\n%s", err, e.log())
	}
	return task
}

// finish kills and deletes a task and its container.
func (e *env) finish(t *testing.T, id string) {
	t.Helper()
	container, err := e.client.LoadContainer(e.ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.Task(e.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	exited, err := task.Wait(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Kill(e.ctx, syscall.SIGKILL); err != nil {
		t.Fatalf("kill: %v", err)
	}
	if status := <-exited; status.ExitCode() != 137 {
		t.Errorf("exit code %d, %v; want 137", status.ExitCode(), status.Error())
	}
	e.remove(t, task)
}

// exec runs a shell command in the task and returns its output and exit code.
func (e *env) exec(t *testing.T, task client.Task, command string) (string, uint32) {
	t.Helper()
	spec, err := task.Spec(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	process := *spec.Process
	process.Args = []string{"sh", "-c", command}
	var out bytes.Buffer
	id := fmt.Sprintf("exec-%d", time.Now().UnixNano())
	p, err := task.Exec(e.ctx, id, &process, cio.NewCreator(
		cio.WithStreams(nil, &out, io.Discard), cio.WithFIFODir(filepath.Join(e.dir, "fifo"))))
	if err != nil {
		t.Fatal(err)
	}
	exited, err := p.Wait(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(e.ctx); err != nil {
		t.Fatalf("exec: %v", err)
	}
	status := <-exited
	p.IO().Wait() // Delete drops output that is still on its way
	if _, err := p.Delete(e.ctx); err != nil {
		t.Fatalf("delete exec: %v", err)
	}
	return out.String(), status.ExitCode()
}

var handlers = map[string]string{"runc": locate.HandlerRunc, "runsc": locate.HandlerRunsc}

// A container's channel survives every process that ever used it.
func TestChannelOutlivesItsUsers(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			id := "chan-" + name
			start := time.Now()
			task := e.create(t, handler, id, id)
			if err := task.Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			t.Logf("create and start: %v", time.Since(start).Round(time.Millisecond))
			for range 5 {
				attachAndDie(t, filepath.Join(e.dir, id))
			}
			e.finish(t, id)
		})
	}
}

// Commands run in the container, and what they write to its root lies on the
// host's disk (under runsc only because its configuration says overlay2 none).
func TestExec(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			id := "exec-" + name
			task := e.create(t, handler, id, id)
			if err := task.Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			out, code := e.exec(t, task, "id -u; echo hello > /root/f; cat /root/f; exit 7")
			if out != "0\nhello\n" || code != 7 {
				t.Errorf("exec: %q, code %d", out, code)
			}
			root := filepath.Join(e.dir, "state/io.containerd.runtime.v2.task", namespace, id, "rootfs")
			if data, err := os.ReadFile(filepath.Join(root, "root/f")); string(data) != "hello\n" {
				t.Errorf("the file on the host: %q, %v", data, err)
			}
			e.finish(t, id)
		})
	}
}

// The containers of a sandbox share one shim; other sandboxes have their own.
func TestOneShimPerSandbox(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			pod, inner, other := "pod-"+name, "work-"+name, "other-"+name
			for id, sandbox := range map[string]string{pod: pod, other: other} {
				if err := e.create(t, handler, id, sandbox).Start(e.ctx); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.create(t, handler, inner, pod).Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			if shims := e.shims(t); len(shims) != 2 {
				t.Errorf("shims %v; want two, for two sandboxes", shims)
			}
			for _, id := range []string{pod, inner, other} {
				attachAndDie(t, filepath.Join(e.dir, id))
			}
			for _, id := range []string{inner, pod, other} {
				e.finish(t, id)
			}
		})
	}
}

// Containers and their channels survive the death of containerd.
func TestContainerdDies(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		id := "surv-" + name
		if err := e.create(t, handler, id, id).Start(e.ctx); err != nil {
			t.Fatal(err)
		}
	}
	e.killDaemon(t)
	for name := range handlers {
		attachAndDie(t, filepath.Join(e.dir, "surv-"+name))
	}
	e.startDaemon(t)
	for name := range handlers {
		attachAndDie(t, filepath.Join(e.dir, "surv-"+name))
		e.finish(t, "surv-"+name)
	}
}

// An explicit CloseIO still gives the container end of file.
func TestCloseIOEndsTheInput(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			id := "close-" + name
			task := e.create(t, handler, id, id)
			exited, err := task.Wait(e.ctx)
			if err != nil {
				t.Fatal(err)
			}
			if err := task.Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			attachAndDie(t, filepath.Join(e.dir, id))
			if err := task.CloseIO(e.ctx, client.WithStdinCloser); err != nil {
				t.Fatal(err)
			}
			if status := <-exited; status.ExitCode() != 0 {
				t.Errorf("cat exits with %d, %v; want 0", status.ExitCode(), status.Error())
			}
			e.remove(t, task)
		})
	}
}

// What a container writes while nobody reads waits for the next reader.
func TestOutputWaitsForAReader(t *testing.T) {
	const size = 300_000 // more than a pipe holds
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			id := "out-" + name
			task := e.create(t, handler, id, id, oci.WithProcessArgs("sh", "-c",
				fmt.Sprintf("yes | head -c %d; cat", size)))
			if err := task.Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			out, err := os.Open(filepath.Join(e.dir, id, "stdout"))
			if err != nil {
				t.Fatal(err)
			}
			n, err := io.CopyN(io.Discard, out, size/3) // this reader leaves midway
			out.Close()
			if err != nil {
				t.Fatalf("first reader: %d bytes, %v", n, err)
			}
			out, err = os.Open(filepath.Join(e.dir, id, "stdout"))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			out.SetReadDeadline(time.Now().Add(15 * time.Second))
			// io.CopyN reads no further than it is asked to, so nothing is lost between.
			if n, err = io.CopyN(io.Discard, out, size-size/3); err != nil {
				t.Fatalf("second reader: %d bytes, %v", n, err)
			}
			attachAndDie(t, filepath.Join(e.dir, id))
			e.finish(t, id)
		})
	}
}

// The session image does what agents need, as its normal user.
func TestSessionImage(t *testing.T) {
	e := newEnv(t)
	layout, err := builder.Built()
	if err != nil {
		t.Skip(err)
	}
	e.image = e.importLayout(t, layout, "berth.local/session:v1")
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			id := "img-" + name
			task := e.create(t, handler, id, id, oci.WithUserID(builder.UID), oci.WithEnv([]string{"HOME=" + builder.Home}))
			if err := task.Start(e.ctx); err != nil {
				t.Fatal(err)
			}
			for command, want := range map[string]string{
				"id -un; pwd": builder.User + "\n" + builder.Home + "\n",
				"python3 -c 'import ssl, json, sqlite3; print(6*7)'":                                               "42\n",
				"git init -q r && cd r && echo x > f && git add f && git commit -qm one && git log --format=%an%s": "agentone\n",
				"busybox echo hi":                    "hi\n",
				"bash -c 'echo ${BASH_VERSION%%.*}'": "5\n",
				"curl --version | cut -c1-4 | head -n1; test -s /etc/ssl/certs/ca-certificates.crt && echo certs": "curl\ncerts\n",
			} {
				if out, code := e.exec(t, task, command); out != want || code != 0 {
					t.Errorf("%s: %q, code %d; want %q", command, out, code, want)
				}
			}
			e.finish(t, id)
		})
	}
}

// containerd's client with its usual streams works as with any other shim.
func TestClientStreams(t *testing.T) {
	e := newEnv(t)
	for name, handler := range handlers {
		t.Run(name, func(t *testing.T) {
			for i := range 5 {
				id := fmt.Sprintf("std%d-%s", i, name)
				var out bytes.Buffer
				streams := cio.NewCreator(cio.WithStreams(strings.NewReader("input\n"), &out, io.Discard),
					cio.WithFIFODir(filepath.Join(e.dir, "fifo")))
				task := e.createWith(t, handler, id, id, streams, oci.WithProcessArgs("sh", "-c", "echo hi; head -n1"))
				exited, err := task.Wait(e.ctx)
				if err != nil {
					t.Fatal(err)
				}
				if err := task.Start(e.ctx); err != nil {
					t.Fatal(err)
				}
				select {
				case <-exited:
				case <-time.After(15 * time.Second):
					t.Fatal("the container never got its input")
				}
				task.IO().Wait()
				if out.String() != "hi\ninput\n" {
					t.Errorf("output %q", out.String())
				}
				e.remove(t, task)
			}
		})
	}
}

// remove deletes a task that ended, and its container.
func (e *env) remove(t *testing.T, task client.Task) {
	t.Helper()
	container, err := e.client.LoadContainer(e.ctx, task.ID())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := task.Delete(e.ctx); err != nil {
		t.Fatalf("delete: %v", err)
	}
	if err := container.Delete(e.ctx, client.WithSnapshotCleanup); err != nil {
		t.Fatal(err)
	}
}
