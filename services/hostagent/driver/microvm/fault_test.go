//go:build linux

package microvm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// TestAQEMUThatHangs: a QEMU that was stopped by somebody answers nothing; it is listed, frozen and
// removed all the same, and nobody waits for it for long.
func TestAQEMUThatHangs(t *testing.T) {
	h := newHost(t)
	h.cfg.OffTime = time.Second
	d := openDriver(t, h)
	sb, _ := start(t, d, h.Spec(t, 1, 1))
	if err := unix.Kill(sb.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	found, err := d.List(t.Context())
	if err != nil || len(found) != 1 || found[0].State != driver.Running {
		t.Errorf("list: %+v, %v", found, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := d.Freeze(ctx, sb.ID); err != nil {
		t.Errorf("freeze: %v", err)
	}
	began := time.Now()
	if err := d.Stop(ctx, sb.ID); err != nil {
		t.Errorf("stop: %v", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the stop took %s", took)
	}
}

// TestAGuestThatIsNeverReady: a machine whose guest does not become a sandbox in time leaves nothing.
func TestAGuestThatIsNeverReady(t *testing.T) {
	h := newHost(t)
	h.cfg.PersonaliseTime = time.Millisecond
	d := openDriver(t, h)
	_, err := d.Create(t.Context(), h.Spec(t, 1, 1))
	if !errs.Is(err, errkind.Deadline) {
		t.Errorf("got %v (%v)", err, errs.Kind(err))
	}
	if left := h.Left(t); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

// TestTheParentIsFrozen: while the watchdog keeps every sandbox of the host frozen, a machine can be
// removed, and none of it runs again before.
func TestTheParentIsFrozen(t *testing.T) {
	h := newHost(t)
	d := openDriver(t, h)
	sb, _ := start(t, d, h.Spec(t, 1, 1))
	if err := d.cgroup.Freeze(t.Context(), h.cfg.Cgroup, true); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.cgroup.Freeze(context.Background(), h.cfg.Cgroup, false) }()
	began := time.Now()
	if err := d.Stop(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

// falseGuest serves the control port of a machine that is none.
func falseGuest(t *testing.T, serve func(net.Conn)) *control {
	t.Helper()
	room := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(room, sockControl))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		if c, err := l.Accept(); err == nil {
			defer c.Close()
			serve(c)
		}
	}()
	c, err := dialControl(t.Context(), room, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

// TestAGuestThatLies: it answers for requests that nobody made, with other messages than were asked
// for, with nonsense, in half lines, or never. The call that it was asked ends in time with an error,
// and only its own answer counts.
func TestAGuestThatLies(t *testing.T) {
	line := func(m vmwire.Message) []byte { b, _ := vmwire.Encode(m); return b }
	for name, say := range map[string][]byte{
		"nothing":       nil,
		"another id":    line(vmwire.Message{Type: vmwire.TypeAnswer, Answer: &vmwire.Answer{ID: "other", OK: true}}),
		"another kind":  line(vmwire.Message{Type: vmwire.TypeDone, Done: &vmwire.Done{ID: "mine", OK: true}}),
		"half":          line(vmwire.Message{Type: vmwire.TypeAnswer, Answer: &vmwire.Answer{ID: "mine", OK: true}})[:20],
		"nonsense":      []byte("}{\n\x00\xff\n[]\n{\"type\":\"answer\"}\n"),
		"a long line":   []byte(strings.Repeat("x", vmwire.MaxLine+10)),
		"an empty name": []byte(`{"type":"ready","ready":{"min":1,"max":1}}` + "\n"),
	} {
		t.Run(name, func(t *testing.T) {
			hold := make(chan struct{})
			defer close(hold)
			c := falseGuest(t, func(conn net.Conn) {
				go func() { _, _ = conn.Write(say) }()
				_, _ = io.CopyN(io.Discard, conn, 1)
				<-hold
			})
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			_, err := c.ask(ctx, "mine", vmwire.Message{Type: vmwire.TypeCall, Call: &vmwire.Call{ID: "mine", Op: vmwire.OpGrow}}, vmwire.TypeAnswer)
			if err == nil {
				t.Error("it was believed")
			}
			if name != "another kind" && !errors.Is(err, errNoAnswer) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestAGuestThatFloods: what nobody asked for is read slowly, be it messages, lines without an end or
// empty ones, so that the machine waits and not the host.
func TestAGuestThatFloods(t *testing.T) {
	message, _ := vmwire.Encode(vmwire.Message{Type: vmwire.TypeDone, Done: &vmwire.Done{ID: "x", OK: true}})
	for name, c := range map[string]struct {
		say  []byte
		most int // of writes in half a second
	}{
		"messages":    {message, 64 << 10},
		"one endless": {bytes.Repeat([]byte("x"), 64<<10), 64},
		"empty lines": {bytes.Repeat([]byte("\n"), 64<<10), 64},
	} {
		t.Run(name, func(t *testing.T) {
			sent := make(chan int, 1)
			ctl := falseGuest(t, func(conn net.Conn) {
				_ = conn.(*net.UnixConn).SetWriteBuffer(4 << 10)
				_ = conn.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
				n := 0
				for ; ; n++ {
					if _, err := conn.Write(c.say); err != nil {
						break
					}
				}
				sent <- n
			})
			n := <-sent
			ctl.close()
			<-ctl.done
			if n > c.most {
				t.Errorf("the host took %d writes of %d bytes in half a second", n, len(c.say))
			}
		})
	}
}

// TestAnAnswerIsJudged: a guest that does not hold a limit that was asked for is no sandbox.
func TestAnAnswerIsJudged(t *testing.T) {
	for name, c := range map[string]struct {
		answer vmwire.Answer
		files  uint64
		kind   errkind.Kind
	}{
		"good":             {vmwire.Answer{OK: true, Enforced: []string{vmwire.EnforcedPIDs, vmwire.EnforcedOpenFiles}}, 100, errkind.OK},
		"no processes":     {vmwire.Answer{OK: true, Enforced: []string{vmwire.EnforcedOpenFiles}}, 0, errkind.Unimplemented},
		"no files":         {vmwire.Answer{OK: true, Enforced: []string{vmwire.EnforcedPIDs}}, 100, errkind.Unimplemented},
		"files not wanted": {vmwire.Answer{OK: true, Enforced: []string{vmwire.EnforcedPIDs}}, 0, errkind.OK},
		"damaged":          {vmwire.Answer{Reason: vmwire.ReasonDisk, Error: "bad superblock"}, 0, errkind.Internal},
		"full":             {vmwire.Answer{Reason: vmwire.ReasonFull}, 0, errkind.NoCapacity},
		"noise":            {vmwire.Answer{Reason: "x\ny", Error: strings.Repeat("\x1b[2J\n\xff", 1000)}, 0, errkind.Internal},
		"unknown":          {vmwire.Answer{Reason: "new"}, 0, errkind.Internal},
	} {
		m := &making{d: &Driver{}, spec: driver.Spec{Limits: driver.Limits{PIDs: 64, OpenFiles: c.files}}}
		if err := m.accept(c.answer); errs.Kind(err) != c.kind {
			t.Errorf("%s: got %v", name, err)
		} else if err != nil && (len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\n\x1b\xff")) {
			t.Errorf("%s: not one line: %q", name, err)
		}
	}
}

// TestAnOldRecordNamesNoOther: a process that has the number of a QEMU that is gone is not taken for it.
func TestAnOldRecordNamesNoOther(t *testing.T) {
	h := newHost(t)
	d := h.Open(t).(*Driver)
	sb, _ := start(t, d, h.Spec(t, 1, 1))
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(h.cfg.State, "vms", string(sb.ID), recordFile)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(string(b), `"pid":`+strconv.Itoa(sb.PID), `"pid":`+strconv.Itoa(os.Getpid()), 1)
	if other == string(b) {
		t.Fatalf("no such process in %s", b)
	}
	if err := os.WriteFile(file, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	d = openDriver(t, h)
	found, err := d.List(t.Context())
	if err != nil || len(found) != 1 || found[0].State != driver.Exited {
		t.Errorf("list: %+v, %v", found, err)
	}
	_, k := start(t, d, h.Spec(t, 1, 1))
	if _, err := k.Do("echo", "again"); err != nil {
		t.Error(err)
	}
}
