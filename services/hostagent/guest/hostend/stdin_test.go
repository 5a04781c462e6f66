package hostend_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func startCat(t *testing.T, c *hostend.Conn, key string) *hostend.ExecStream {
	t.Helper()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: key, Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStdinResentIsNotDoubled(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	s := startCat(t, c, "x")
	ctx := testContext(t)
	write := func(offset uint64, text string) {
		t.Helper()
		if err := c.WriteStdin(ctx, "x", offset, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	write(0, "hello ")
	write(0, "hello ") // all of it known
	write(3, "lo wor") // half of it known
	c.Close()
	c = g.attach()
	if x := find(t, c, "x"); x.Stdin != 9 || !x.StdinOpen {
		t.Errorf("state %+v", x)
	}
	write(0, "hello world")
	if err := c.WriteStdin(ctx, "x", 20, []byte("hole")); !errors.Is(err, hostend.ErrBadOffset) {
		t.Errorf("write beyond what came: %v", err)
	}
	if err := c.CloseStdin(ctx, "x", 5); !errors.Is(err, hostend.ErrBadOffset) {
		t.Errorf("close before what came: %v", err)
	}
	for range 2 {
		if err := c.CloseStdin(ctx, "x", 11); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.WriteStdin(ctx, "x", 11, []byte("late")); !errors.Is(err, hostend.ErrStdinClosed) {
		t.Errorf("write after the end: %v", err)
	}
	s, err := c.AttachExec(ctx, "x", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	if string(o.out) != "hello world" {
		t.Errorf("the process read %q", o.out)
	}
	o.wantCode(t, 0)
}

func TestStdinClosedByTheProcess(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"true"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	collect(t, s).wantCode(t, 0)
	if err := c.WriteStdin(testContext(t), "x", 0, make([]byte, 4<<20)); !errors.Is(err, hostend.ErrStdinClosed) {
		t.Errorf("write to a process that ended: %v", err)
	}
	if err := c.WriteStdin(testContext(t), "y", 0, []byte("x")); !errors.Is(err, hostend.ErrNoSuchExec) {
		t.Errorf("write to no exec: %v", err)
	}
}

func TestStdinWaitsForAProcessThatDoesNotRead(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	gate := t.TempDir() + "/gate"
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{
		Key: "x", Argv: []string{"sh", "-c", "read go < " + gate + "; wc -c"}, Stdin: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	const size = 5 << 20
	wrote := make(chan error, 1)
	go func() { wrote <- c.WriteStdin(testContext(t), "x", 0, make([]byte, size)) }()
	// A window and a pipe are taken, and no more.
	x := waitFor(t, c, "x", func(x hostend.ExecInfo) bool { return x.Stdin >= 1<<20 })
	select {
	case err := <-wrote:
		t.Fatalf("the write returned though nobody reads: %v", err)
	default:
	}
	if x.Stdin > 1<<20+256<<10 {
		t.Errorf("the guest took %d bytes", x.Stdin)
	}
	run(t, c, "go", "echo go > "+gate)
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	if err := c.CloseStdin(testContext(t), "x", size); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, s); strings.TrimSpace(string(o.out)) != fmt.Sprint(size) {
		t.Errorf("the process read %s bytes", o.out)
	}
}
