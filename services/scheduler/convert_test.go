package scheduler

import (
	"testing"

	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
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
