package scheduler

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// A host that answers nothing has many things to remove: a round ends all the
// same, since the rooms of other hosts wait for the next one, and none of its
// jobs is always the one that there was no time for.
func TestHostThatHangsDoesNotHoldUpTheOthers(t *testing.T) {
	synctest.Test(t, everyJobHasItsTurn) // so that the time of one is enough for one, however busy the machine is
}

func everyJobHasItsTurn(t *testing.T) {
	const jobs = 5
	done := make([]bool, jobs)
	for round := 0; slices.Contains(done, false); round++ {
		if round == 1000 {
			t.Fatalf("some never had their turn: %v", done)
		}
		did := 0
		var all []func(context.Context)
		for i := range jobs {
			all = append(all, func(ctx context.Context) {
				done[i] = true
				did++
				<-ctx.Done() // it hangs
			})
		}
		inTurn(bustest.Context(t), time.Millisecond, all)
		if did != 1 {
			t.Fatalf("%d jobs in the time of one", did)
		}
	}
}

// A wake failed on a host that is drained now, and what is unsaved of the session
// is on a host that is gone: the drained one has nothing of it, and is let go.
func TestDrainEndsThoughTheHostOfUnsavedFilesIsAway(t *testing.T) {
	w := newWorld(t, nil)
	h1 := w.withHost(t, testHost, 0)
	w.awakeAndSaved(t, 1)
	h2 := w.withHost(t, "h2", 0)
	h2.failing("wake", errs.E("fake wake", errkind.Invalid, "", "this host cannot"))
	w.lost(t, h1)
	w.become(1, corev1.State_STATE_FAILED)
	w.drain("h2", true, time.Minute)
	w.drained("h2")
	if rec := w.show(1); !rec.GetUnsaved() || rec.GetNewestHost() != "h1" || rec.GetHost() != "" {
		t.Errorf("record: %v", rec)
	}
	w.withHost(t, testHost, 0)
	must[wakeReply](t)(w.open(1, "a4"))
	if rec := w.show(1); rec.GetHost() != "h1" || rec.GetUnsaved() {
		t.Errorf("record: %v", rec)
	}
}

// A delete for which any host will do does not wait for one that cannot.
func TestAnyHostIsNotAlwaysTheSame(t *testing.T) {
	w, l := newLedWorld(t, nil)
	w.withHost(t, testHost, 0)
	w.withHost(t, "h2", 0)
	seen := map[string]bool{}
	for range 1000 {
		for _, h := range l.anyHost() {
			seen[h.String()] = true
		}
	}
	if len(seen) != 2 {
		t.Errorf("only %v", seen)
	}
}
