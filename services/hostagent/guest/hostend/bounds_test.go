package hostend_test

import (
	"fmt"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

// TestOutputOfFinishedExecsIsBounded: 30 detached execs leave 4 MiB each.
func TestOutputOfFinishedExecsIsBounded(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	for i := range 30 {
		sp := hostend.ExecSpec{Key: fmt.Sprintf("x%02d", i), Argv: []string{"head", "-c", "5000000", "/dev/zero"}, Detached: true}
		if _, err := c.StartExec(testContext(t), sp); err != nil {
			t.Fatal(err)
		}
		waitFor(t, c, sp.Key, func(x hostend.ExecInfo) bool { return x.Exit != nil })
	}
	eventually(t, c, "output within its budget", func(s hostend.Stats) bool { return s.RingBytes <= agent.RingBudget })
	// The exit of the first one is still known, and the loss of its output too.
	s, err := c.AttachExec(testContext(t), "x00", hostend.Offsets{})
	if err != nil {
		t.Fatal(err)
	}
	o := collect(t, s)
	o.wantCode(t, 0)
	if len(o.gaps) != 1 || o.gaps[0].Gap != 5000000 {
		t.Errorf("gaps %+v", o.gaps)
	}
}

// TestRecordsAreBounded: the oldest record goes, the newest stays.
func TestRecordsAreBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("starts thousands of processes")
	}
	c := startGuest(t).attach()
	const runs = agent.MaxRecords + 10
	work := make(chan int)
	done := make(chan error)
	for range 8 {
		go func() {
			for i := range work {
				sp := hostend.ExecSpec{Key: fmt.Sprint(i), Argv: []string{"/bin/true"}, Detached: true}
				_, err := c.StartExec(testContext(t), sp)
				done <- err
			}
		}()
	}
	go func() {
		defer close(work)
		for i := range runs {
			work <- i
		}
	}()
	for range runs {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	eventually(t, c, "records within their bound", func(s hostend.Stats) bool { return s.LiveExecs == 0 && s.Records <= agent.MaxRecords })
	if x := find(t, c, fmt.Sprint(runs-1)); x.Exit == nil {
		t.Errorf("%+v", x)
	}
}
