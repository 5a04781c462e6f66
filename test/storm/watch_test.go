package storm

import (
	"context"
	"testing"
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// overs is how often in a row the sum over all hosts may be above the ceiling: they are asked one after
// the other, and what moves from one to another meanwhile counts twice.
const overs = 3

// watch looks at every host again and again.
type watch struct {
	t     *testing.T
	op    *sdk.Client
	hosts []string
	looks int
	most  int
	over  int
	// whose says which incarnation of a session a sandbox was seen with, has the reverse.
	whose map[string]string
	has   map[string]string
}

func newWatch(t *testing.T, e *testenv.Env) *watch {
	w := &watch{t: t, op: e.Operator(), whose: map[string]string{}, has: map[string]string{}}
	for _, m := range e.Members() {
		if m.Service == "hostagent" {
			w.hosts = append(w.hosts, m.Name)
		}
	}
	return w
}

func (w *watch) run(ctx context.Context) {
	for ctx.Err() == nil {
		waiting, answered := 0, 0
		for _, h := range w.hosts {
			reply := &hostv1.InventoryReply{}
			ask, cancel := context.WithTimeout(ctx, 2*time.Second)
			err := w.op.CallHost(ask, h, "inventory", &hostv1.InventoryRequest{}, reply)
			cancel()
			if err != nil {
				continue // it was killed: it answers again, with what is left
			}
			answered++
			waiting += len(reply.GetWarm())
			for _, sb := range reply.GetSandboxes() {
				w.saw(sb)
			}
		}
		if answered > 0 {
			w.looks++
		}
		w.count(waiting)
	}
}

// saw holds that a sandbox is one incarnation's for ever, and that this has no other.
func (w *watch) saw(sb *hostv1.SandboxRecord) {
	if !sb.GetClaimed() {
		return
	}
	ref := sb.GetSession()
	who, id := ref.GetSession()+" "+ref.GetGeneration().String()+" "+ref.GetEpoch().String(), sb.GetContainer()
	if was := w.whose[id]; was != "" && was != who {
		w.t.Errorf("sandbox %s is that of %s, and was that of %s", id, who, was)
	}
	if had := w.has[who]; had != "" && had != id {
		w.t.Errorf("%s has sandbox %s, and had %s", who, id, had)
	}
	w.whose[id], w.has[who] = who, id
}

func (w *watch) count(waiting int) {
	w.most = max(w.most, waiting)
	if waiting <= ceiling {
		w.over = 0
		return
	}
	if w.over++; w.over == overs {
		w.t.Errorf("%d sandboxes that nobody has claimed, %d times in a row; the ceiling is %d", waiting, overs, ceiling)
	}
}
