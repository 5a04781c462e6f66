package hostend_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// find returns the state of one exec.
func find(t *testing.T, c *hostend.Conn, key string) hostend.ExecInfo {
	t.Helper()
	list, err := c.ListExecs(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range list {
		if string(x.Key) == key {
			return x
		}
	}
	t.Fatalf("no exec %s", key)
	return hostend.ExecInfo{}
}

// waitFor asks for the state of an exec until it is as wanted.
func waitFor(t *testing.T, c *hostend.Conn, key string, ok func(hostend.ExecInfo) bool) hostend.ExecInfo {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		x := find(t, c, key)
		if ok(x) {
			return x
		}
		if time.Now().After(end) {
			t.Fatalf("exec never came there: %+v", x)
		}
	}
}

func TestGapIsExplicit(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	sp := spec(t, "talker", "generate", fmt.Sprint(6<<20), "0")
	sp.Detached = true
	if _, err := c.StartExec(testContext(t), sp); err != nil {
		t.Fatal(err)
	}
	x := waitFor(t, c, "talker", func(x hostend.ExecInfo) bool { return x.Exit != nil })
	if kept := x.End.Stdout - x.First.Stdout + x.End.Stderr - x.First.Stderr; kept > agent.RingSize || kept < agent.RingSize-64<<10 {
		t.Errorf("%d bytes kept", kept)
	}
	s, err := c.AttachExec(testContext(t), "talker", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	if len(o.gaps) == 0 {
		t.Fatal("no gap")
	}
	first := map[hostend.Stream]uint64{}
	for _, g := range o.gaps {
		if g.Offset != 0 || first[g.Stream] != 0 {
			t.Errorf("gap %+v", g)
		}
		first[g.Stream] = g.Gap
	}
	if first[hostend.Stdout] != x.First.Stdout || first[hostend.Stdout]+uint64(len(o.out)) != 6<<20 {
		t.Errorf("stdout: gap up to %d, then %d bytes", first[hostend.Stdout], len(o.out))
	}
	if checkPattern(o.out, 1, x.First.Stdout) >= 0 || checkPattern(o.err, 2, x.First.Stderr) >= 0 {
		t.Error("wrong bytes after the gap")
	}
	o.wantCode(t, 0)
}

func TestFullRingBlocksTheProcessWhileHeld(t *testing.T) {
	g := startGuest(t)
	c := g.attach()
	if _, err := c.StartExec(testContext(t), spec(t, "talker", "generate", fmt.Sprint(16<<20), "8")); err != nil {
		t.Fatal(err)
	}
	full := func(x hostend.ExecInfo) bool { return x.End.Stdout+x.End.Stderr == agent.RingSize }
	waitFor(t, c, "talker", full)
	// The host is gone without a word. That is no detach: nothing may go.
	c.Close()
	c = g.attach()
	if x := find(t, c, "talker"); !full(x) || !x.Held || x.First != (hostend.Offsets{}) {
		t.Fatalf("after the host was lost: %+v", x)
	}
	before := cpuTicks(t, g)
	time.Sleep(300 * time.Millisecond) // measures idleness, waits for nothing
	if used := cpuTicks(t, g) - before; used > 3 {
		t.Errorf("a blocked exec cost %d ticks of 10 ms in 300 ms", used)
	}
	s, err := c.AttachExec(testContext(t), "talker", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	if len(o.out) != 16<<20 || checkPattern(o.out, 1, 0) >= 0 || len(o.gaps) != 0 {
		t.Errorf("%d bytes, %d gaps", len(o.out), len(o.gaps))
	}
	o.wantCode(t, 8)
}

func TestDetachLetsTheProcessGoOn(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	s, err := c.StartExec(testContext(t), spec(t, "talker", "generate", fmt.Sprint(16<<20), "8"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Detach(testContext(t)); err != nil {
		t.Fatal(err)
	}
	x := waitFor(t, c, "talker", func(x hostend.ExecInfo) bool { return x.Exit != nil })
	outcome{exit: x.Exit}.wantCode(t, 8)
	if x.First.Stdout == 0 || x.End.Stdout != 16<<20 {
		t.Errorf("state %+v", x)
	}
}

// cpuTicks is the CPU time of the agent.
func cpuTicks(t *testing.T, g *guest) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", g.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := lines(b[strings.LastIndexByte(string(b), ')')+1:])
	return int(number(fields[11]) + number(fields[12]))
}

func TestSlowConsumerStopsOnlyItsOwnExec(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	if _, err := c.StartExec(testContext(t), spec(t, "slow", "generate", fmt.Sprint(16<<20), "0")); err != nil {
		t.Fatal(err)
	}
	s, err := c.StartExec(testContext(t), spec(t, "fast", "generate", fmt.Sprint(16<<20), "0"))
	if err != nil {
		t.Fatal(err)
	}
	if o := collect(t, s); len(o.out) != 16<<20 {
		t.Errorf("%d bytes", len(o.out))
	}
	if x := find(t, c, "slow"); x.Exit != nil {
		t.Error("the other exec ended, though nobody takes its output")
	}
	if err := c.DetachExec(testContext(t), "slow"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, c, "slow", func(x hostend.ExecInfo) bool { return x.Exit != nil })
}

func TestNewerReaderReplacesTheOlder(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	first, err := c.StartExec(testContext(t), hostend.ExecSpec{Key: "x", Argv: []string{"cat"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.AttachExec(testContext(t), "x", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Next(testContext(t)); !errors.Is(err, hostend.ErrReplaced) {
		t.Errorf("first reader: %v", err)
	}
	if err := c.CloseStdin(testContext(t), "x", 0); err != nil {
		t.Fatal(err)
	}
	collect(t, second).wantCode(t, 0)
	if _, err := c.AttachExec(testContext(t), "x", hostend.Offsets{Stdout: 1}); !errors.Is(err, hostend.ErrBadOffset) {
		t.Errorf("attach beyond the end: %v", err)
	}
}

func TestStartTwiceStartsOnce(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	file := t.TempDir() + "/count"
	sp := hostend.ExecSpec{Key: "x", Argv: []string{"sh", "-c", "echo once >> " + file + "; echo $$; read l; exit 5"}, Stdin: true, Detached: true}
	pids := make(chan int, 20)
	var wg sync.WaitGroup
	for range cap(pids) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			s, err := c.StartExec(testContext(t), sp)
			if err != nil {
				t.Error(err)
				return
			}
			pids <- s.Info().Pid
		}()
	}
	wg.Wait()
	close(pids)
	for pid := range pids {
		if want := find(t, c, "x").Pid; pid != want {
			t.Errorf("pid %d, want %d", pid, want)
		}
	}
	other := sp
	other.Argv = []string{"true"}
	if _, err := c.StartExec(testContext(t), other); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("same key, other command: %v", err)
	}
	if err := c.CloseStdin(testContext(t), "x", 0); err != nil {
		t.Fatal(err)
	}
	sp.Detached = false
	s, err := c.StartExec(testContext(t), sp)
	if err != nil {
		t.Fatal(err)
	}
	collect(t, s).wantCode(t, 5)
	if s, err = c.StartExec(testContext(t), sp); err != nil || !s.Info().Existing {
		t.Fatalf("start after the end: %+v, %v", s.Info(), err)
	}
	collect(t, s).wantCode(t, 5)
	if b, _ := os.ReadFile(file); string(b) != "once\n" {
		t.Errorf("the command ran: %q", b)
	}
}
