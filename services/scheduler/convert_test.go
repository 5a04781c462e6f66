package scheduler

import (
	"testing"

	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
)

// TestTheActorGoesThroughWhole: who carried a request and who acts for its
// user stand in every event and record as identity verified them.
func TestTheActorGoesThroughWhole(t *testing.T) {
	want := &corev1.Actor{Tenant: "acme", Issuer: "https://idp", Subject: "alice", Frontend: "agent", Acting: "party"}
	got, err := actorOf(want)
	if err != nil || !proto.Equal(protoActor(got), want) {
		t.Errorf("%v, %v", protoActor(got), err)
	}
}

// TestASleepSaysWhichEpochWasLastActive: the host saves a blank disk at rest for that epoch alone.
func TestASleepSaysWhichEpochWasLastActive(t *testing.T) {
	s := &core.Session{Key: testKey(1), State: core.Sleeping, LastActive: ids.Epoch{Incarnation: 1, Index: 7}, Sleep: &core.Sleep{Reason: core.ReasonDrain, Force: true}}
	if got := grant.EpochOf(sleepRequest(s).GetLastActiveEpoch()); got != s.LastActive {
		t.Errorf("%s, not %s", got, s.LastActive)
	}
}
