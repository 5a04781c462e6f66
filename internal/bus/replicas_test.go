package bus_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/auditlog"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestOneReplicaBecomesThreeInPlace(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartClusterOf(t, 1)
	ctx := bustest.Context(t)
	keeper, sched := c.Connect(subjects.Keeper()), c.Connect(subjects.Service("scheduler"))
	if _, err := sched.Publish(ctx, subjects.Session("acme", session, "placed"), wrapperspb.String("before")); err != nil {
		t.Fatal(err)
	}
	changes, err := bus.Reconcile(ctx, keeper, bus.Declared(3))
	if err != nil {
		t.Fatal(err)
	}
	scaled := 0
	for _, line := range changes {
		if strings.HasSuffix(line, ": Replicas 1 to 3") {
			scaled++
		}
	}
	if want := len(subjects.Streams) + len(subjects.Buckets) + len(subjects.ObjectStores); scaled != want {
		t.Errorf("%d of %d streams have three replicas now: %q", scaled, want, changes)
	}
	inTime(t, "every replica has what was there", func() bool {
		s, err := keeper.JetStream().Stream(ctx, "BERTH_SESSIONS")
		if err != nil || s.CachedInfo().State.Msgs != 1 || s.CachedInfo().Cluster == nil || len(s.CachedInfo().Cluster.Replicas) != 2 {
			return false
		}
		for _, r := range s.CachedInfo().Cluster.Replicas {
			if !r.Current {
				return false
			}
		}
		return true
	})
}

// Three keepers, one beside each node, run in every cluster of these tests;
// a stream that somebody removed is made again once.
func TestKeepersDoNotDisturbEachOther(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartCluster(t)
	ctx := bustest.Context(t)
	keeper := c.Connect(subjects.Keeper())
	if err := keeper.JetStream().DeleteStream(ctx, "BERTH_USAGE"); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			conn := c.Connect(subjects.Keeper(), i)
			k, err := bus.StartKeeper(ctx, conn, bus.Declared(3), time.Hour)
			if err != nil {
				t.Error(err)
				return
			}
			k.Stop(ctx)
		})
	}
	all.Wait()
	if changes, err := bus.Reconcile(ctx, keeper, bus.Declared(3)); err != nil || len(changes) > 0 {
		t.Errorf("%q, %v", changes, err)
	}
}

// Buckets, timers, and what is published beside a path, across the loss of
// the node that leads each of them.
func TestStoredStateOutlivesItsLeader(t *testing.T) {
	t.Parallel() // most of it is waiting for elections
	c := bustest.StartCluster(t)
	keeper := c.Connect(subjects.Keeper())
	for _, part := range []struct {
		stream string
		run    func(*testing.T, *bustest.Cluster, func())
	}{
		{"KV_BERTH_DATAKEYS", bucketAcross},
		{"BERTH_TIMERS", timersAcross},
		{"BERTH_AUDIT", auditAcross},
	} {
		t.Run(part.stream, func(t *testing.T) {
			leader, _ := leaders(t, c, keeper, part.stream, "")
			part.run(t, c, func() { c.Kill(leader) })
			c.Restart(leader)
			inTime(t, "all nodes are current", func() bool { return current(keeper) })
		})
	}
}

// current tells whether every stream has its leader and two replicas that are
// not behind: only then can another node be spared.
func current(keeper *bus.Conn) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	for _, s := range subjects.Streams {
		st, err := keeper.JetStream().Stream(ctx, s.Name)
		if err != nil || st.CachedInfo().Cluster == nil || st.CachedInfo().Cluster.Leader == "" {
			return false
		}
		for _, r := range st.CachedInfo().Cluster.Replicas {
			if !r.Current || r.Offline {
				return false
			}
		}
	}
	return true
}

func bucketAcross(t *testing.T, c *bustest.Cluster, kill func()) {
	ctx := bustest.Context(t)
	b, err := c.Connect(subjects.Service("credentials")).OpenBucket(ctx, "BERTH_DATAKEYS")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"keep", "destroy"} {
		if _, err := b.Create(ctx, k, []byte("secret")); err != nil {
			t.Fatal(err)
		}
	}
	c.Replicated("KV_BERTH_DATAKEYS") // GetAny may miss what a replica does not have yet
	kill()
	began := time.Now()
	if v, _, err := b.GetAny(ctx, "keep"); err != nil || string(v) != "secret" {
		t.Errorf("from any replica: %q, %v", v, err)
	}
	t.Logf("read from any replica after %s", time.Since(began).Round(time.Millisecond))
	if v, _, err := b.Get(ctx, "keep"); err != nil || string(v) != "secret" {
		t.Errorf("from the leader: %q, %v", v, err)
	}
	t.Logf("read from the new leader after %s", time.Since(began).Round(time.Millisecond))
	if err := b.SecureDelete(ctx, "destroy"); err != nil {
		t.Error(err)
	}
	if _, _, err := b.Get(ctx, "destroy"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("destroyed, and read again: %v", err)
	}
	if _, err := b.Update(ctx, "destroy", []byte("again"), 0); !errs.Is(err, errkind.Conflict) && !errs.Is(err, errkind.Exists) {
		t.Errorf("what was destroyed was made again: %v", err)
	}
	if _, err := b.Put(ctx, "new", []byte("x")); err != nil {
		t.Error(err)
	}
}

func timersAcross(t *testing.T, c *bustest.Cluster, kill func()) {
	ctx := bustest.Context(t)
	life := c.Connect(subjects.Service("lifecycle"))
	got := make(chan string, 100)
	if _, err := life.Consume(ctx, bus.Spec("lifecycle-timers", 2), func(_ context.Context, m *bus.Msg) error {
		got <- body(m)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	arm := func(kind string) {
		t.Helper()
		if err := life.ArmTimer(ctx, "acme", session, kind, time.Now().Add(time.Second), wrapperspb.String(kind)); err != nil {
			t.Fatal(err)
		}
	}
	arm("before")
	kill()
	arm("after")
	due := map[string]bool{}
	for len(due) < 2 {
		select {
		case kind := <-got:
			due[kind] = true
		case <-time.After(40 * time.Second):
			t.Fatalf("only %v were due", due)
		}
	}
}

func auditAcross(t *testing.T, c *bustest.Cluster, kill func()) {
	ctx := bustest.Context(t)
	idn := c.Connect(subjects.Service("identity"))
	log := auditlog.New(idn, bustest.Log(t))
	const n = 300
	for i := range n {
		if i == n/2 {
			kill()
		}
		log.Record(ctx, subjects.Audit("identity", "acme", session), wrapperspb.String(fmt.Sprint(i)))
	}
	log.Close(ctx)
	s, err := c.Connect(subjects.Keeper()).JetStream().Stream(ctx, "BERTH_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.CachedInfo().State.Msgs; got != n {
		t.Errorf("%d records stored, want %d", got, n)
	}
}
