package stack

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
)

// fleet is a scheduler with room for one session: when that sleeps, the next that waits is woken.
type fleet struct {
	mu      sync.Mutex
	states  map[string]corev1.State
	waiting []string
	refuse  map[string]int // so often
}

func (f *fleet) list(context.Context) (all []*schedulerv1.SessionRecord, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, state := range f.states {
		all = append(all, &schedulerv1.SessionRecord{Session: &corev1.SessionRef{Session: key}, State: state, Host: "h1"})
		if state == corev1.State_STATE_WAKING {
			f.states[key] = corev1.State_STATE_ACTIVE
		}
	}
	return all, nil
}

func (f *fleet) sleep(_ context.Context, ref *corev1.SessionRef) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse[ref.GetSession()] > 0 {
		f.refuse[ref.GetSession()]--
		return errors.New("not now")
	}
	f.states[ref.GetSession()] = corev1.State_STATE_ASLEEP
	if len(f.waiting) > 0 {
		f.states[f.waiting[0]], f.waiting = corev1.State_STATE_WAKING, f.waiting[1:]
	}
	return nil
}

// Room that comes free during a stop is given to opens that wait, and their sandboxes stay behind.
func TestAStopAlsoPutsToSleepWhatIsPlacedMeanwhile(t *testing.T) {
	f := &fleet{states: map[string]corev1.State{"s1": corev1.State_STATE_ACTIVE, "s2": corev1.State_STATE_ASLEEP},
		waiting: []string{"s3", "s4"}, refuse: map[string]int{"s3": 1}}
	d := &drainer{log: slog.New(slog.DiscardHandler), pause: time.Millisecond, list: f.list, sleep: f.sleep, warned: map[string]bool{}}
	d.run(t.Context())
	for _, key := range []string{"s1", "s2", "s3", "s4"} {
		if f.states[key] != corev1.State_STATE_ASLEEP {
			t.Errorf("%s is %s", key, f.states[key])
		}
	}
}

// A session that does not sleep must not hold up a stop for ever.
func TestAStopEndsWhenASessionDoesNotSleep(t *testing.T) {
	f := &fleet{states: map[string]corev1.State{"s1": corev1.State_STATE_ACTIVE}, refuse: map[string]int{"s1": 1 << 30}}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	d := &drainer{log: slog.New(slog.DiscardHandler), pause: time.Millisecond, list: f.list, sleep: f.sleep, warned: map[string]bool{}}
	d.run(ctx)
}
