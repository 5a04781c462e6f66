package identity_test

import (
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestMain(m *testing.M) {
	bustest.Child()
	os.Exit(m.Run())
}

// With two of three nodes gone nothing can be stored: the direct door answers,
// and what it did is under audit once the nodes are back.
func TestTheDirectDoorDoesNotWaitForJetStream(t *testing.T) {
	c := bustest.StartCluster(t, frontends...)
	w := newWorldOn(t, func(x subjects.Caller) *bus.Conn { return c.Connect(x) })
	open := func() bool {
		r := w.request(t, "open", &identityv1.OpenRequest{Wait: durationpb.New(10 * time.Second)})
		msg, err := w.front.CallRaw(t.Context(), subjects.RPC("identity", "open", w.front.Self()), r.encode(t, w), r.contentType())
		return err == nil && r.open(t, msg.Data).GetOpen() != nil
	}
	if !open() {
		t.Fatal("not opened with three nodes")
	}
	c.Kill(1, 2)
	opened := 0
	for deadline := time.Now().Add(20 * time.Second); opened < 20; time.Sleep(10 * time.Millisecond) {
		if open() {
			opened++
		} else if opened > 0 || time.Now().After(deadline) {
			t.Fatalf("not opened with one node, after %d that were", opened) // while connections move it may fail
		}
	}
	c.Restart(1, 2)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		s, err := w.operator.JetStream().Stream(bustest.Context(t), "BERTH_AUDIT")
		if err == nil && s.CachedInfo().State.Msgs >= 21 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("not every open is under audit")
		}
	}
}
