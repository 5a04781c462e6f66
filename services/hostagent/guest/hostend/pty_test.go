package hostend_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// expect reads output until it contains a text, and returns all of it.
func expect(t *testing.T, s *hostend.ExecStream, text string) string {
	t.Helper()
	var all strings.Builder
	for !strings.Contains(all.String(), text) {
		ev, err := s.Next(testContext(t))
		if err != nil {
			t.Fatalf("%v, after %q", err, all.String())
		}
		if ev.Exit != nil {
			t.Fatalf("exit %s, after %q", describe(ev.Exit), all.String())
		}
		all.Write(ev.Data)
	}
	return all.String()
}

func TestTerminal(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	ctx := testContext(t)
	s, err := c.StartExec(ctx, hostend.ExecSpec{
		Key: "x", PTY: &hostend.Size{Rows: 24, Cols: 80},
		Argv: []string{"sh", "-c", `test -t 0 && test -t 2 && echo "tty $(stty size) $TERM"; while read l; do echo "$l $(stty size)"; done; echo at-end; exit 12`},
	})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "tty 24 80 xterm-256color")
	if err := c.Resize(ctx, "x", hostend.Size{Rows: 50, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteStdin(ctx, "x", 0, []byte("now\n")); err != nil {
		t.Fatal(err)
	}
	expect(t, s, "now 50 132")
	if err := c.CloseStdin(ctx, "x", 4); err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	if !strings.Contains(string(o.out), "at-end") {
		t.Errorf("last output %q", o.out)
	}
	o.wantCode(t, 12)
}

func TestTerminalInterrupts(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{
		Key: "x", PTY: &hostend.Size{Rows: 24, Cols: 80}, Argv: []string{"sh", "-c", "echo ready; exec sleep 1000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "ready")
	if err := c.WriteStdin(testContext(t), "x", 0, []byte{3}); err != nil {
		t.Fatal(err)
	}
	if o := collect(t, s); o.exit.Signal != 2 {
		t.Errorf("exit %s", describe(o.exit))
	}
}

func TestTerminalOutputIsWholeAtTheEnd(t *testing.T) {
	c := startGuest(t).attach()
	for i := range 100 {
		s, err := c.StartExec(testContext(t), hostend.ExecSpec{
			Key: fmt.Sprint(i), PTY: &hostend.Size{Rows: 24, Cols: 80}, Argv: []string{"sh", "-c", "seq 2000; exit 1"},
		})
		if err != nil {
			t.Fatal(err)
		}
		o := collect(t, s)
		if got := lines(o.out); len(got) != 2000 || got[1999] != "2000" {
			t.Fatalf("%d lines", len(got))
		}
		o.wantCode(t, 1)
	}
}

func TestTerminalOfADaemonDoesNotHoldTheExit(t *testing.T) {
	c := startGuest(t).attach()
	s, err := c.StartExec(testContext(t), hostend.ExecSpec{
		Key: "x", PTY: &hostend.Size{Rows: 24, Cols: 80}, Argv: []string{"sh", "-c", "(trap '' HUP; echo up; sleep 100000) & read x; seq 500; exit 3"},
	})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, s, "up")
	if err := c.WriteStdin(testContext(t), "x", 0, []byte("go\n")); err != nil {
		t.Fatal(err)
	}
	expect(t, s, "\n500\r\n")
	ev, err := s.Next(testContext(t))
	if err != nil || ev.Exit == nil {
		t.Fatalf("%+v, %v", ev, err)
	}
	outcome{exit: ev.Exit}.wantCode(t, 3)
}
