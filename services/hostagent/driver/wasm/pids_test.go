package wasm

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// TestFaultALimitThatWasHitIsNotTold: a sandbox whose calls need more threads than it may have says so.
func TestFaultALimitThatWasHitIsNotTold(t *testing.T) {
	h := newHost(t, false)
	d := openDriver(t, h)
	spec := h.Spec(t, 1, 1)
	spec.Init, spec.Guest, spec.Limits.PIDs = nil, h.cfg.Program, 24
	b := attach(t, d, spec)
	events, err := d.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 8 {
		_, _ = b.begin(t, hostend.ExecSpec{Argv: []string{"tool", "keep", "x"}, Stdin: true}) // some cannot be started
	}
	late := time.After(30 * time.Second)
	for {
		select {
		case e := <-events:
			if e.ID == b.sb.ID && e.Kind == driver.EventPIDs {
				return
			}
		case <-late:
			s, err := d.Stats(t.Context(), b.sb.ID)
			t.Fatalf("nothing was told; %+v, %v", s, err)
		}
	}
}
