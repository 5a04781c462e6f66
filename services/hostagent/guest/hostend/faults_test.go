package hostend_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// The tests of this file are named after faults that users of such platforms
// reported.

func TestInventedExitCodeZeroWhenConnectionDies(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "read line; exit 42"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if ev, err := s.Next(testContext(t)); !errors.Is(err, hostend.ErrChannelLost) || ev.Exit != nil {
		t.Fatalf("after the loss: event %+v, error %v", ev, err)
	}
	if err := c.WriteStdin(testContext(t), "x", 0, []byte("late\n")); !errors.Is(err, hostend.ErrChannelLost) {
		t.Errorf("call on a lost channel: %v", err)
	}
	c = g.attach()
	s, err = c.AttachExec(testContext(t), "x", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.WriteStdin(testContext(t), "x", 0, []byte("go\n")); err != nil {
		t.Fatal(err)
	}
	collect(t, s).wantCode(t, 42)
	if _, err := c.AttachExec(testContext(t), "never", hostend.Offsets{}); !errors.Is(err, hostend.ErrNoSuchExec) {
		t.Errorf("attach to an exec that was never started: %v", err)
	}
}

func TestOutputCutAtTheEnd(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	const runs, workers = 1000, 4
	tail := strings.Repeat("0123456789abcde\n", 700)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := w; i < runs; i += workers {
				script, want := fmt.Sprintf("echo %d", i), fmt.Sprintf("%d\n", i)
				if i%4 == 0 { // more than one pipe read, and the last of it just before the exit
					script = fmt.Sprintf("printf %%s \"$TAIL\"; echo %d; exit %d", i, i%256)
					want = tail + want
				}
				s, err := c.StartExec(testContext(t), hostend.ExecSpec{
					Key: fmt.Sprint("short-", i), Argv: []string{"sh", "-c", script}, Env: []string{"TAIL=" + tail},
				})
				if err != nil {
					t.Error(err)
					return
				}
				o := collect(t, s)
				if string(o.out) != want {
					t.Errorf("run %d: %d bytes of %d", i, len(o.out), len(want))
				}
				code := 0
				if i%4 == 0 {
					code = i % 256
				}
				if o.exit == nil || o.exit.Code == nil || *o.exit.Code != code || int(o.exit.Output.Stdout) != len(want) {
					t.Errorf("run %d: exit %s at %+v", i, describe(o.exit), o.exit)
				}
			}
		}()
	}
	wg.Wait()
}

func TestStallAfterReattach(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	sp := spec(t, "talker", "generate", fmt.Sprint(12<<20), "0")
	s, err := c.StartExec(testContext(t), sp)
	if err != nil {
		t.Fatal(err)
	}
	// Take a little, lose the channel, attach anew: far more often than the ring
	// and the windows have room for.
	var at hostend.Offsets
	for i := range 40 {
		want := at.Stdout + 8<<10
		for at.Stdout < want {
			ev, err := s.Next(testContext(t))
			if err != nil {
				t.Fatalf("attach %d, offset %d: %v", i, at.Stdout, err)
			}
			seed := uint64(ev.Stream)
			if bad := checkPattern(ev.Data, seed, ev.Offset); bad >= 0 {
				t.Fatalf("wrong byte at %d", bad)
			}
			if ev.Stream == hostend.Stdout {
				at.Stdout = ev.Offset + uint64(len(ev.Data))
			} else {
				at.Stderr = ev.Offset + uint64(len(ev.Data))
			}
		}
		if i%2 == 0 {
			c.Close()
			c = g.attach()
		}
		if s, err = c.AttachExec(testContext(t), "talker", at); err != nil {
			t.Fatal(err)
		}
	}
	o := collect(t, s)
	o.wantCode(t, 0)
	if got := at.Stdout + uint64(len(o.out)); got != 12<<20 || checkPattern(o.out, 1, at.Stdout) >= 0 {
		t.Errorf("%d bytes of stdout", got)
	}
}

func TestHangOnBulkOutput(t *testing.T) {
	c := startGuest(t).attach()
	const size = 64 << 20
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			sp := spec(t, fmt.Sprint("bulk-", i), "generate", fmt.Sprint(size), "3")
			sp.Stdin = true // and nobody reads or writes it
			s, err := c.StartExec(testContext(t), sp)
			if err != nil {
				t.Error(err)
				return
			}
			o := collect(t, s)
			if len(o.out) != size || checkPattern(o.out, 1, 0) >= 0 || len(o.err) != size/3 || checkPattern(o.err, 2, 0) >= 0 {
				t.Errorf("%d and %d bytes", len(o.out), len(o.err))
			}
			if describe(o.exit) != "code 3" {
				t.Errorf("exit %s", describe(o.exit))
			}
		}()
	}
	wg.Wait()
}

// eventually asks the guest again and again until ok; each answer is awaited.
func eventually(t *testing.T, c *hostend.Conn, what string, ok func(hostend.Stats) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(testContext(t), 20*time.Second)
	defer cancel()
	var last hostend.Stats
	for {
		st, err := c.Stats(ctx)
		if err != nil {
			t.Fatalf("%s never came: %+v: %v", what, last, err)
		}
		if last = st; ok(st) {
			return
		}
	}
}

func TestZombiesAreReaped(t *testing.T) {
	c := startGuest(t).attach()
	// Orphans: their parents end before them, so they become children of PID 1.
	o := run(t, c, "orphans", "for i in $(seq 100); do (sleep 0.0$((i % 10)) & ) ; done; exit 9")
	o.wantCode(t, 9)
	eventually(t, c, "an empty process table", func(s hostend.Stats) bool { return s.Processes == 0 && s.Zombies == 0 })
	// And none of them took the status of an exec.
	for i := range 50 {
		run(t, c, fmt.Sprint("after-", i), fmt.Sprintf("(true &); exit %d", i)).wantCode(t, i)
	}
}

func TestWaitThatNeverReturns(t *testing.T) {
	c := startGuest(t).attach()
	// The child that is left behind keeps stdout open and would for ever.
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "sleep 100000 & echo done; exit 4"}})
	if err != nil {
		t.Fatal(err)
	}
	out := ""
	for {
		ev, err := s.Next(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		out += string(ev.Data)
		if ev.Exit != nil {
			outcome{exit: ev.Exit}.wantCode(t, 4)
			break
		}
	}
	if out != "done\n" {
		t.Errorf("output before the exit: %q", out)
	}
	st, err := c.Stats(testContext(t))
	if err != nil || st.LiveExecs != 0 || st.Background != 1 {
		t.Errorf("stats %+v, %v", st, err)
	}
}

func TestWaitReturnsDespiteFloodOfTheOnesLeftBehind(t *testing.T) {
	c := startGuest(t).attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "yes & exit 6"}})
	if err != nil {
		t.Fatal(err)
	}
	for {
		ev, err := s.Next(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if ev.Exit != nil {
			outcome{exit: ev.Exit}.wantCode(t, 6)
			return
		}
	}
}

func TestExitOfManyShortProcessesIsTheirOwn(t *testing.T) {
	c := startGuest(t).attach()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 60 {
				s, err := c.StartExec(testContext(t), hostend.ExecSpec{
					Key: fmt.Sprintf("%d-%d", w, i), Argv: []string{"sh", "-c", fmt.Sprintf("exit %d", (w*60+i)%256)},
				})
				if err != nil {
					t.Error(err)
					return
				}
				if got := describe(collect(t, s).exit); got != fmt.Sprintf("code %d", (w*60+i)%256) {
					t.Errorf("exec %d-%d: %s", w, i, got)
				}
			}
		}()
	}
	wg.Wait()
}

func TestSignalReachesTheGroup(t *testing.T) {
	c := startGuest(t).attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "sleep 1000 & echo ready; wait"}})
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := s.Next(testContext(t)); err != nil || string(ev.Data) != "ready\n" {
		t.Fatal(ev, err)
	}
	if err := c.Signal(testContext(t), "x", syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, s); o.exit.Signal != int(syscall.SIGTERM) || o.exit.Code != nil {
		t.Errorf("exit %s", describe(o.exit))
	}
	if err := c.Signal(testContext(t), "x", syscall.SIGTERM); !errors.Is(err, hostend.ErrExited) {
		t.Errorf("signal after the exit: %v", err)
	}
	eventually(t, c, "the end of the group", func(s hostend.Stats) bool { return s.Processes == 0 })
}

func TestTimeoutKillsTheGroup(t *testing.T) {
	c := startGuest(t).attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{
		Key: "x", Argv: []string{"sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000"}, Timeout: 100 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if o := collect(t, s); o.exit.Signal != int(syscall.SIGKILL) || !o.exit.TimedOut {
		t.Errorf("exit %+v", o.exit)
	}
	eventually(t, c, "the end of the group", func(s hostend.Stats) bool { return s.Processes == 0 })
}

func TestUnknownExecAfterItsRecordExpired(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{RecordLifetime: time.Millisecond})
	run(t, c, "x", "exit 1").wantCode(t, 1)
	for {
		_, err := c.AttachExec(testContext(t), "x", hostend.Offsets{})
		if errors.Is(err, hostend.ErrNoSuchExec) {
			return
		}
		if err != nil && !errors.Is(err, hostend.ErrBadOffset) {
			t.Fatal(err)
		}
	}
}

func TestGuestSurvivesGarbage(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	c.Close()
	f, err := os.OpenFile(g.in, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	junk := make([]byte, 3<<20)
	fill(junk, 77, 0)
	if _, err := f.Write(junk); err != nil {
		t.Fatal(err)
	}
	run(t, g.attach(), "x", "exit 2").wantCode(t, 2)
}

func TestCorruptFrameEndsTheConnAndNotTheGuest(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	f, err := os.OpenFile(g.in, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write([]byte("noise between two frames")); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if !errors.Is(c.Err(), hostend.ErrChannelLost) {
		t.Error(c.Err())
	}
	run(t, g.attach(), "x", "exit 2").wantCode(t, 2)
}

func TestSecondHostIsNoticed(t *testing.T) {
	g := startGuest(t)
	first := g.attach()
	// Both read the same FIFO, which no owner does; the first one must not go on
	// with half of the bytes.
	second, err := hostend.OpenFIFOs(g.in, g.out)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	go func() {
		if c, err := hostend.Attach(testContext(t), second, second, hostend.Options{}); err == nil {
			c.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(testContext(t), 10*time.Second)
	defer cancel()
	for {
		if _, err := first.Ping(ctx); err != nil {
			return // lost, or never answered again
		}
	}
}
