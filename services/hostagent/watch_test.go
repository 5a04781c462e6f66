package hostagent

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestALimitIsToldOnceAMinute: a program that runs into a limit again and again does not flood its user,
// and one limit does not hide another.
func TestALimitIsToldOnceAMinute(t *testing.T) {
	h := &host{limits: map[ids.SandboxID]map[driver.EventKind]time.Time{}}
	one, two := ids.NewSandboxID(), ids.NewSandboxID()
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		id   ids.SandboxID
		kind driver.EventKind
		at   time.Duration
		want bool
	}{
		{one, driver.EventPIDs, 0, true}, {one, driver.EventPIDs, time.Second, false}, {one, driver.EventOOM, time.Second, true},
		{two, driver.EventPIDs, time.Second, true}, {one, driver.EventPIDs, limitEvery - 1, false}, {one, driver.EventPIDs, limitEvery, true},
	} {
		if got := h.limitNews(c.id, c.kind, now.Add(c.at)); got != c.want {
			t.Errorf("%s after %s: %v", c.kind, c.at, got)
		}
	}
	for _, kind := range []driver.EventKind{driver.EventOOM, driver.EventPIDs} {
		if x := limitText[kind]; x.what == "" || x.reason == "" || !x.again {
			t.Errorf("%s is told as %+v", kind, x)
		}
	}
}
