package hostend_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/enter"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// The test binary plays every part: with BERTH_TEST_ROLE set it is the guest, a
// host that gets killed, or a program that runs in the guest.
func TestMain(m *testing.M) {
	role, args := os.Getenv("BERTH_TEST_ROLE"), os.Args[1:]
	switch role {
	case "":
		os.Exit(m.Run())
	case "guest":
		os.Exit(guestMain(args))
	}
	part, ok := parts[role]
	if !ok {
		fmt.Fprintln(os.Stderr, "no such role", role)
		os.Exit(99)
	}
	os.Exit(part(args))
}

// guestMain is the agent as PID 1 of a pid namespace of its own.
func guestMain(args []string) int {
	if world := os.Getenv("BERTH_TEST_WORLD"); world != "" {
		err := waitIn(world)
		if err == nil {
			err = unix.Exec("/run/guest/berth-guest", []string{"berth-guest", enter.Flag}, nil)
		}
		fmt.Fprintln(os.Stderr, "guest:", err)
		return 98
	}
	if os.Getpid() == 1 && os.Getenv("BERTH_TEST_IN_CONTAINER") == "" {
		err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		if err == nil {
			err = unix.Mount("proc", "/proc", "proc", 0, "")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			return 98
		}
	}
	return agent.Main(args)
}

// guest is a running agent behind two FIFOs that outlive every host.
type guest struct {
	t       testing.TB
	in, out string
	cmd     *exec.Cmd
	// terminate sends SIGTERM to PID 1.
	terminate func() error
}

// startGuest starts the agent as PID 1; the test holds the FIFOs open.
func startGuest(t testing.TB) *guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root for a pid namespace")
	}
	dir := t.TempDir()
	g := &guest{t: t, in: filepath.Join(dir, "in"), out: filepath.Join(dir, "out")}
	var held [2]*os.File
	for i, path := range []string{g.in, g.out} {
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		held[i] = os.NewFile(uintptr(fd), path)
		t.Cleanup(func() { held[i].Close() })
	}
	if runtime := os.Getenv("BERTH_TEST_RUNTIME"); runtime != "" {
		g.cmd, g.terminate = containerCommand(t, runtime)
	} else {
		g.cmd = exec.Command("/proc/self/exe")
		g.terminate = func() error { return g.cmd.Process.Signal(unix.SIGTERM) }
		g.cmd.Env = append(os.Environ(), "BERTH_TEST_ROLE=guest")
		g.cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL,
		}
	}
	g.cmd.Stdin, g.cmd.Stdout = held[0], held[1]
	g.cmd.Stderr = os.Stderr
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = g.cmd.Process.Kill()
		_ = g.cmd.Wait()
	})
	return g
}

// attach returns a Conn that is closed at the end of the test.
func (g *guest) attach() *hostend.Conn {
	g.t.Helper()
	ch, err := hostend.OpenFIFOs(g.in, g.out)
	if err != nil {
		g.t.Fatal(err)
	}
	c, err := hostend.Attach(testContext(g.t), ch, ch, hostend.Options{})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c
}

// attachInProcess attaches to an agent in this process, over pipes.
func attachInProcess(t testing.TB, opts agent.Options) (*agent.Agent, *hostend.Conn) {
	t.Helper()
	if testing.Verbose() {
		opts.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	a := agent.New(opts)
	fromHost, toGuest := pipes(t)
	fromGuest, toHost := pipes(t)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() { _ = a.Serve(ctx, fromHost, toHost, nil) }()
	c, err := hostend.Attach(testContext(t), fromGuest, toGuest, hostend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return a, c
}

func pipes(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// testContext ends a minute before the test binary would.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// program returns argv and env of a part played by this binary. The guest has
// the same files, so the path is good there too.
func program(t testing.TB, role string, args ...string) ([]string, []string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{self}, args...), []string{"BERTH_TEST_ROLE=" + role}
}

// outcome is all that an exec gave.
type outcome struct {
	out, err []byte
	gaps     []hostend.Event
	exit     *hostend.Exit
}

// collect reads a stream to its exit and end.
func collect(t testing.TB, s *hostend.ExecStream) outcome {
	t.Helper()
	ctx := testContext(t)
	var o outcome
	for {
		ev, err := s.Next(ctx)
		switch {
		case err != nil && err.Error() == "EOF":
			return o
		case err != nil:
			t.Fatalf("exec %s: %v", s.Key(), err)
		case ev.Exit != nil:
			o.exit = ev.Exit
		case ev.Gap != 0:
			o.gaps = append(o.gaps, ev)
		case ev.Stream == hostend.Stdout:
			o.out = append(o.out, ev.Data...)
		default:
			o.err = append(o.err, ev.Data...)
		}
	}
}

// run starts a shell command and collects it.
func run(t testing.TB, c *hostend.Conn, key, script string) outcome {
	t.Helper()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: key, Argv: []string{"sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	return collect(t, s)
}

func (o outcome) wantCode(t testing.TB, code int) {
	t.Helper()
	if o.exit == nil || o.exit.Code == nil || *o.exit.Code != code {
		t.Fatalf("exit %s, want code %d", describe(o.exit), code)
	}
}

func describe(x *hostend.Exit) string {
	switch {
	case x == nil:
		return "none"
	case x.Code != nil:
		return fmt.Sprintf("code %d", *x.Code)
	case x.Signal != 0:
		return fmt.Sprintf("signal %d", x.Signal)
	}
	return "unknown: " + x.Unknown
}

// fill writes the bytes of an endless pattern from an offset on; each offset and
// seed has its own, so that loss, doubling and reordering all show.
func fill(p []byte, seed, offset uint64) {
	var word [8]byte
	for i := 0; i < len(p); {
		at := offset + uint64(i)
		x := (at/8 + 1) * (seed*2 + 0x9E3779B97F4A7C15)
		x ^= x >> 29
		x *= 0xBF58476D1CE4E5B9
		binary.LittleEndian.PutUint64(word[:], x^x>>32)
		i += copy(p[i:], word[at%8:])
	}
}

// checkPattern returns the first offset at which p is not the pattern, or -1.
func checkPattern(p []byte, seed, offset uint64) int64 {
	want := make([]byte, len(p))
	fill(want, seed, offset)
	for i := range p {
		if p[i] != want[i] {
			return int64(offset) + int64(i)
		}
	}
	return -1
}

func lines(b []byte) []string { return strings.Fields(string(b)) }
