package wasm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// TestFaultAKilledSupervisor takes its calls with it, is told, and the session can be opened again.
func TestFaultAKilledSupervisor(t *testing.T) {
	h := newHost(t, false)
	d := openDriver(t, h)
	b := h.open(t, d, 1)
	events, err := d.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s, err := b.begin(t, hostend.ExecSpec{Argv: []string{"tool", "keep", "x"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(b.sb.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-events:
		if e.ID != b.sb.ID || e.Kind != driver.EventExited || e.ExitStatus != 137 {
			t.Errorf("%+v", e)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the end was not told")
	}
	if err := d.Stop(t.Context(), b.sb.ID); err != nil {
		t.Fatal(err)
	}
	spec := b.spec
	spec.Epoch.Index++
	attach(t, d, spec).call(t, "tool", "exit", "4").want(t, 4, "")
}
