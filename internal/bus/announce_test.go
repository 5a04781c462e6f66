package bus_test

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// A replica that moved to another node is there before the bus knows that its
// old node hangs, and so the call that is sent again may be handed to the dead
// subscription once more. When that one ends nobody says anything: the call
// must be sent again all the same.
func TestACallIsSentAgainWhenTheBusHasForgottenTheDead(t *testing.T) {
	t.Parallel()
	e := bustest.Start(t)
	idn := bustest.Connect(t, e, subjects.Service("identity"))
	got := make(chan struct{}, 1000)
	var dead []*bus.Conn
	for range 20 { // so that the bus picks one of them, and not the living one
		conn, _ := replicaOf(t, e, "lifecycle", "open", func(ctx context.Context, _ bus.Request, _ []byte) ([]byte, error) {
			got <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		})
		dead = append(dead, conn)
	}
	out := make(chan answer, 1)
	go func() {
		v, err := bus.Invoke[*wrapperspb.StringValue](bustest.Context(t), idn, "lifecycle", "open", wrapperspb.String("x"))
		out <- answer{v.GetValue(), err}
	}()
	taken(t, got)
	_, svc := replicaOf(t, e, "lifecycle", "open", says("living"))
	told(t, svc)
	select {
	case <-got: // sent again, into the void
	case a := <-out:
		out <- a // the bus picked the living one at once
	}
	for _, conn := range dead {
		conn.Close()
	}
	wantAnswer(t, out, "living")
}
