package scheduler

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

// A host that is killed with a command in its hands joins with another boot:
// the command is given again at once, and the caller gets its answer.
func TestRejoinedHostIsAskedAgain(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.times.answerWithin = time.Hour }) // so that only the join has it sent again
	h := newFakeHost(t, w, "b1")
	h.join(t)
	for _, step := range []struct {
		method string
		call   func() (corev1.State, error)
		boot   string
		want   corev1.State
	}{
		{"wake", func() (corev1.State, error) { r, err := w.open(1, "r1"); return r.GetState(), err }, "b2", corev1.State_STATE_ACTIVE},
		{"sleep", func() (corev1.State, error) { r, err := w.close(1, "r2"); return r.GetState(), err }, "b3", corev1.State_STATE_ASLEEP},
		{"delete", func() (corev1.State, error) { r, err := w.delete(1, "r3"); return r.GetState(), err }, "b4", corev1.State_STATE_DELETED},
	} {
		taken := h.swallow(t, step.method)
		done := make(chan error, 1)
		var got corev1.State
		go func() { var err error; got, err = step.call(); done <- err }()
		taken()
		h.join(t) // the same boot once more is no reason
		select {
		case err := <-done:
			t.Fatalf("%s was answered by nobody: %v", step.method, err)
		case <-time.After(50 * time.Millisecond):
		}
		h.boot = step.boot
		h.join(t)
		if err := <-done; err != nil || got != step.want { // within a minute: see bustest.Context
			t.Errorf("%s: %s, %v", step.method, got, err)
		}
	}
	w.events(1, "admitted placed active asleep deleted erased")
}

// An answer that was lost with the host's connection to the bus is asked for
// again, though the host is the same boot and its lease goes on.
func TestLostAnswerOfAHostIsAskedForAgain(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.times.answerWithin = 500 * time.Millisecond })
	h := newFakeHost(t, w, "b1")
	h.join(t)
	h.keepLease(t)
	taken := h.swallow(t, "wake")
	done := make(chan error, 1)
	go func() { _, err := w.open(1, "r1"); done <- err }()
	taken()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if h.awake() != 1 {
		t.Errorf("%d sessions are awake", h.awake())
	}
	w.events(1, "admitted placed active")
}

// A host that nobody serves at the moment is waited for while its lease runs: a
// wake does not use its tries up in the meantime.
func TestHostThatIsDownIsWaitedFor(t *testing.T) {
	w := newWorld(t, nil)
	first := newFakeHost(t, w, "b1")
	first.join(t)
	first.conn.Close()
	done := make(chan error, 1)
	go func() { _, err := w.open(1, "r1"); done <- err }()
	select {
	case err := <-done:
		t.Fatalf("answered while nobody serves the host: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	w.host = bustest.Connect(t, w.bus, subjects.Host(testHost))
	newFakeHost(t, w, "b2").join(t)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if r := w.show(1); r.GetState() != corev1.State_STATE_ACTIVE {
		t.Errorf("the session is %s", r.GetState())
	}
	w.events(1, "admitted placed active")
}
