package hostagent

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// together is a driver whose stops end once all of them are under way.
type together struct {
	driver.Driver
	waits atomic.Int32
	all   chan struct{}
}

func (d *together) Stop(ctx context.Context, _ ids.SandboxID) error {
	if d.waits.Add(1) == int32(cap(d.all)) {
		close(d.all)
	}
	select {
	case <-d.all:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestAGuestThatDoesNotEndDelaysNoOtherRemoval: a sandbox that nobody owns must go, however long the
// guest of another one takes.
func TestAGuestThatDoesNotEndDelaysNoOtherRemoval(t *testing.T) {
	d := &together{all: make(chan struct{}, 3)}
	h := &host{drv: d, log: slog.New(slog.DiscardHandler), sessions: map[ids.SessionKey]*session{}}
	h.keeper = newKeeper(h)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	found := []driver.Found{{Sandbox: driver.Sandbox{ID: "a"}}, {Sandbox: driver.Sandbox{ID: "b"}}, {Sandbox: driver.Sandbox{ID: "c"}}}
	if err := h.removeOthers(ctx, found); err != nil {
		t.Errorf("they were removed one after the other: %v", err)
	}
}
