package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// TestOpenTakesASleepBack: until the first process is signalled a wake of the same epoch keeps the
// session awake with all that runs in it, and the sleep is answered as busy.
func TestOpenTakesASleepBack(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	first := r.mustWake(one, nil)
	c := r.client(one)
	c.mustOpen(execOp("x1", "sh", "-c", "sleep 1; exit 7"))
	// An opening that does not get on keeps the sleep from closing the data plane.
	s := r.run.h.session(key("ann"))
	s.mu.Lock()
	sb := s.sb
	s.mu.Unlock()
	sb.activate.Lock()
	before := s.now().Work
	late := make(chan error, 1)
	go func() { _, err := c.open(execOp("x2", "true")); late <- err }()
	eventually(t, 20*time.Second, "the opening is admitted", func() bool { return s.now().Work > before })
	slept := make(chan *hostv1.SleepReply, 1)
	go func() {
		got, err := r.sleep(one, time.Time{}, true)
		if err != nil {
			t.Error(err)
		}
		slept <- got
	}()
	eventually(t, 20*time.Second, "the sleep has begun", func() bool { return s.now().Phase == core.Sleeping })
	woken := make(chan *hostv1.WakeReply, 1)
	go func() {
		got, err := r.wake(one, nil)
		if err != nil {
			t.Error(err)
		}
		woken <- got
	}()
	eventually(t, 20*time.Second, "it is taken back", func() bool { return s.now().Recalled })
	sb.activate.Unlock()
	<-late
	if got := <-slept; !got.GetBusy() {
		t.Errorf("the sleep: %v", got)
	}
	if got := <-woken; got.GetImageDigest() != first.GetImageDigest() {
		t.Errorf("the wake: %v, first %v", got, first)
	}
	if o, err := c.mustOpen(attachOp("x1", 0)).drain(); err != nil || o.exit.GetCode() != 7 {
		t.Errorf("the exec that ran: %v %v", o.exit, err)
	}
	r.sleepWhenIdle(one)
	if _, err := r.wake(one, nil); !errs.Is(err, errkind.StaleEpoch) {
		t.Errorf("a wake of the epoch that slept: %v", err)
	}
}

func (s *session) now() core.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.st
}
