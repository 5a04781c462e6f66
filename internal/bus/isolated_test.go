package bus_test

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
)

// A node that lost the others keeps its clients, who reach nobody at other
// nodes then, for as long as that lasts. But when there are no others, those
// who come back must be served as before.
func TestANodeWithoutAMajoritySendsItsClientsAway(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartCluster(t)
	a, b := c.Connect(subjects.Operator(), 0), c.Connect(subjects.Service("lifecycle"), 0)
	if n := a.NATS().Stats().Reconnects; n != 0 {
		t.Fatalf("%d reconnects while every node is there", n)
	}
	c.Kill(1, 2)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if a.NATS().Stats().Reconnects > 0 && b.NATS().Stats().Reconnects > 0 && a.Connected() && b.Connected() {
			break
		}
		if time.Now().After(end) {
			t.Fatal("nobody was sent away")
		}
	}
	sub, err := a.NATS().SubscribeSync(subjects.Serving("identity"))
	if err == nil {
		err = a.NATS().Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = sub.Unsubscribe()
	if _, err := a.NATS().RTT(); err != nil {
		t.Fatalf("who came back is not served: %v", err)
	}
}
