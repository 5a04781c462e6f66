package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
)

// TestAWarmSandboxOfBeforeIsNotPutBack: a wake had it when the host drained, lost its lease, or when it
// ended, and then did without it.
func TestAWarmSandboxOfBeforeIsNotPutBack(t *testing.T) {
	for what, end := range map[string]func(k *warmKeeper, id ids.SandboxID){
		"drain": func(k *warmKeeper, _ ids.SandboxID) { k.drain() },
		"lease": func(k *warmKeeper, _ ids.SandboxID) { _ = k.retireAll(k.h.ctx) },
		"ended": func(k *warmKeeper, id ids.SandboxID) { k.lost(id, "test") },
	} {
		t.Run(what, func(t *testing.T) {
			r, drv, p := readyRig(t)
			name, k := p.must(1)[0], r.run.h.keeper
			k.mu.Lock()
			got, _ := k.shelf.Take(kindOf(terms()), "", func(ids.SandboxID) string { return "" })
			w := k.all[name]
			k.mu.Unlock()
			if got != name {
				t.Fatalf("%s is taken, not %s", got, name)
			}
			end(k, name)
			if drv.count() != 1 {
				t.Errorf("it was taken from the wake that has it")
			}
			if going := k.putBack(w); going == nil {
				t.Error("it waits again")
			}
			eventually(t, 20*time.Second, "it is gone", func() bool {
				k.mu.Lock()
				defer k.mu.Unlock()
				return k.shelf.Is(name) == shelf.State("") && drv.count() == 0
			})
		})
	}
}
