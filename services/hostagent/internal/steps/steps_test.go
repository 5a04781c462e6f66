package steps

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
)

var errFault = errors.New("fault")

// world is what the steps of these tests make: a set of names.
type world struct {
	mu   sync.Mutex
	have map[string]bool
	log  []string
}

func (w *world) step(name string) Step {
	set := func(on bool, word string) func(context.Context) error {
		return func(context.Context) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.have[name] = on
			w.log = append(w.log, word+" "+name)
			return nil
		}
	}
	return Step{Name: name, Do: set(true, "do"), Undo: set(false, "undo")}
}

func (w *world) left() (n int) {
	for _, on := range w.have {
		if on {
			n++
		}
	}
	return n
}

func TestAFailureAtAnyStepLeavesNothing(t *testing.T) {
	for _, twice := range []bool{false, true} {
		for _, at := range []string{"a", "b1", "b2", "c"} {
			w := &world{have: map[string]bool{}}
			table := Table{{w.step("a")}, {w.step("b1"), w.step("b2")}, {w.step("c")}}
			r := Runner{Twice: twice, Fault: func(name string) error {
				if name == at {
					return errFault
				}
				return nil
			}}
			if _, err := r.Run(context.Background(), table); !errors.Is(err, errFault) {
				t.Errorf("fault at %s: got %v", at, err)
			}
			if w.left() != 0 {
				t.Errorf("fault at %s: left %v", at, w.have)
			}
		}
	}
}

func TestUndoRunsLastFirstAndAlsoWhenTheCallerGaveUp(t *testing.T) {
	w := &world{have: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	stop := Step{Name: "stop", Do: func(context.Context) error { cancel(); return nil }}
	_, err := Runner{}.Run(ctx, Table{{w.step("a")}, {w.step("b")}, {stop}})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if want := []string{"do a", "do b", "undo b", "undo a"}; !slices.Equal(w.log, want) {
		t.Errorf("got %v, want %v", w.log, want)
	}
}

func TestTimesNameEveryStep(t *testing.T) {
	w := &world{have: map[string]bool{}}
	times, err := Runner{}.Run(context.Background(), Table{{w.step("a")}, {w.step("b"), w.step("c")}})
	if err != nil || len(times) != 3 || times[1].Name != "b" || times[2].Start < times[0].Start {
		t.Errorf("got %v, %v", times, err)
	}
}
