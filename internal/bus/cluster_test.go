package bus_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// leaders tells the nodes that lead a stream and one of its consumers.
func leaders(t *testing.T, c *bustest.Cluster, keeper *bus.Conn, stream, durable string) (ofStream, ofConsumer int) {
	t.Helper()
	inTime(t, stream+" and "+durable+" have leaders", func() bool {
		ctx, cancel := context.WithTimeout(bustest.Context(t), 2*time.Second)
		defer cancel()
		s, err := keeper.JetStream().Stream(ctx, stream)
		if err != nil || s.CachedInfo().Cluster == nil || s.CachedInfo().Cluster.Leader == "" {
			return false
		}
		ofStream = c.Index(s.CachedInfo().Cluster.Leader)
		if durable == "" {
			return true
		}
		k, err := s.Consumer(ctx, durable)
		if err != nil || k.CachedInfo().Cluster == nil || k.CachedInfo().Cluster.Leader == "" {
			return false
		}
		ofConsumer = c.Index(k.CachedInfo().Cluster.Leader)
		return true
	})
	return ofStream, ofConsumer
}

// inTime is eventually with the patience that elections of JetStream need.
func inTime(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

func others(node int) []int { return []int{(node + 1) % 3, (node + 2) % 3} }

// durableDoor publishes and handles requests and keeps the score.
type durableDoor struct {
	mu      sync.Mutex
	handled map[string]int
	acked   map[string]bool
	quit    chan struct{}
	done    chan struct{}
}

func openDoor(t *testing.T, c *bustest.Cluster) *durableDoor {
	t.Helper()
	d := &durableDoor{handled: map[string]int{}, acked: map[string]bool{}, quit: make(chan struct{}), done: make(chan struct{})}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	spec := bus.Spec("identity-requests", 4)
	spec.Heartbeat = time.Second // a consumer without a leader is found after several
	if _, err := c.Connect(subjects.Service("identity")).Consume(ctx, spec, func(_ context.Context, m *bus.Msg) error {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.handled[body(m)]++
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	fe := c.Connect(acmeWeb)
	go func() {
		defer close(d.done)
		for i := 0; ; i++ {
			select {
			case <-d.quit:
				return
			case <-ctx.Done():
				return
			default:
			}
			id := fmt.Sprint(i)
			short, cancel := context.WithTimeout(ctx, 15*time.Second)
			_, err := fe.Publish(short, subjects.Request("acme", "web", "open"), wrapperspb.String(id))
			cancel()
			if err == nil {
				d.mu.Lock()
				d.acked[id] = true
				d.mu.Unlock()
			}
		}
	}()
	return d
}

func (d *durableDoor) goesOn(t *testing.T) {
	t.Helper()
	count := func() (int, int) { d.mu.Lock(); defer d.mu.Unlock(); return len(d.acked), len(d.handled) }
	a, h := count()
	began := time.Now()
	said := [2]bool{}
	inTime(t, "requests are acknowledged and handled", func() bool {
		a2, h2 := count()
		if a2 > a && !said[0] {
			said[0] = true
			t.Logf("first ack after %s", time.Since(began))
		}
		if h2 > h && !said[1] {
			said[1] = true
			t.Logf("first handled after %s", time.Since(began))
		}
		return a2 > a+20 && h2 > h+20
	})
}

// close wants every acknowledged request handled.
func (d *durableDoor) close(t *testing.T) {
	t.Helper()
	close(d.quit)
	<-d.done
	inTime(t, "every acknowledged request is handled", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for id := range d.acked {
			if d.handled[id] == 0 {
				return false
			}
		}
		return true
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	t.Logf("%d acknowledged, %d handled", len(d.acked), len(d.handled))
}

// The stream's leader, the consumer's leader, any node and all three at once:
// what was acknowledged is handled, and the door goes on by itself.
func TestAcknowledgedRequestsOutliveNodes(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	began := time.Now()
	lap := func(what string) { t.Logf("%6.2f s: %s", time.Since(began).Seconds(), what) }
	c := bustest.StartCluster(t, acmeWeb)
	lap("three nodes are ready")
	keeper := c.Connect(subjects.Keeper())
	d := openDoor(t, c)
	d.goesOn(t)
	lap("the door is open")
	stream, _ := leaders(t, c, keeper, "BERTH_REQUESTS", "identity-requests")
	c.Kill(stream)
	d.goesOn(t)
	lap("the stream's leader was killed")
	c.Restart(stream)
	lap("and is back")
	_, consumer := leaders(t, c, keeper, "BERTH_REQUESTS", "identity-requests")
	c.Kill(consumer)
	d.goesOn(t)
	lap("the consumer's leader was killed")
	c.Restart(consumer)
	d.goesOn(t)
	lap("and is back")
	c.Kill(0, 1, 2)
	c.Restart(0, 1, 2)
	lap("all three were killed and are back")
	d.goesOn(t)
	d.close(t)
	lap("end")
}
