package identity_test

import (
	"context"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestMain(m *testing.M) {
	bustest.Child()
	identityChild()
	os.Exit(m.Run())
}

// With two of three nodes gone nothing can be stored: the direct door answers,
// and what it did is under audit once the nodes are back.
func TestTheDirectDoorDoesNotWaitForJetStream(t *testing.T) {
	t.Parallel()
	c := bustest.StartCluster(t, frontends...)
	w := newWorldOn(t, func(x subjects.Caller) *bus.Conn { return c.Connect(x) })
	var key seal.Public // asked for once, since no question is answered while connections move
	until(t, "every node knows where identity is", func() bool {
		reply, err := bus.Invoke[*identityv1.KeysReply](t.Context(), w.front, "identity", "keys", &identityv1.KeysRequest{})
		key = seal.Public(reply.GetCurveKey())
		return err == nil
	})
	open := func(within time.Duration) bool {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		r := w.request(t, "open", &identityv1.OpenRequest{Wait: durationpb.New(10 * time.Second)})
		msg, err := w.front.CallRaw(ctx, subjects.RPC("identity", "open", w.front.Self()), r.encodeTo(t, key), r.contentType())
		if err != nil {
			t.Logf("not answered: %v", err)
			return false
		}
		return r.open(t, msg.Data).GetOpen() != nil
	}
	// What was asked before a node knew of a connection, or before one moved, may
	// be lost; it must not use up the time in which the others are asked.
	const lost = 5 * time.Second
	until(t, "it opens with three nodes", func() bool { return open(lost) })
	c.Kill(1, 2)
	// A connection to a busy node is given up after seconds and made anew: then a
	// row begins anew. Whoever waits for JetStream opens not once.
	row := 0
	for deadline := time.Now().Add(time.Minute); row < 20; row++ {
		if !open(lost) {
			row = -1
		}
		if time.Now().After(deadline) {
			t.Fatalf("with one node %d in a row are opened", row)
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
