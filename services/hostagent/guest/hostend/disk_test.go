package hostend_test

import (
	"errors"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// kernel stands for a machine's own: a freeze hangs until a thaw, as one of a slow disk does.
type kernel struct {
	thawed chan struct{}
	asked  chan vmwire.Call
}

func (k *kernel) DiskCall(c vmwire.Call) (vmwire.Done, error) {
	k.asked <- c
	switch c.Op {
	case vmwire.OpFreeze:
		<-k.thawed
	case vmwire.OpThaw:
		close(k.thawed)
		return vmwire.Done{OK: true, Expired: true}, nil
	case vmwire.OpGrow:
		return vmwire.Done{Reason: vmwire.ReasonFull, Error: "no inodes"}, nil
	}
	return vmwire.Done{OK: true}, nil
}

func TestAThawDoesNotWaitForAFreezeThatHangs(t *testing.T) {
	k := &kernel{thawed: make(chan struct{}), asked: make(chan vmwire.Call, 3)}
	_, c := attachInProcess(t, agent.Options{Disk: k})
	if !c.OwnDisk() {
		t.Error("it does not say that it can")
	}
	frozen := make(chan error, 1)
	go func() { frozen <- c.Freeze(testContext(t), time.Second) }()
	if asked := <-k.asked; asked.Op != vmwire.OpFreeze || asked.Hold != int64(time.Second) {
		t.Errorf("asked for %+v", asked)
	}
	if expired, err := c.Thaw(testContext(t)); err != nil || !expired {
		t.Errorf("thaw: %v, %v", expired, err)
	}
	if err := <-frozen; err != nil {
		t.Errorf("freeze: %v", err)
	}
	if _, err := c.Grow(testContext(t), 5); !errors.Is(err, hostend.ErrNoSpace) {
		t.Errorf("a disk that cannot grow: %v", err)
	}
}

func TestDiskOfAnotherKernelIsRefused(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	if c.OwnDisk() {
		t.Error("it says that it can")
	}
	if err := c.Freeze(testContext(t), 0); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("freeze: %v", err)
	}
	if _, err := c.Thaw(testContext(t)); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("thaw: %v", err)
	}
	if _, err := c.Grow(testContext(t), 1); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("grow: %v", err)
	}
}
