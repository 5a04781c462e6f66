package core

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// TestWhatActsAgainIsRecordedAgain: an administrator who shuts a user out, lets
// them in and shuts them out again under one request id leaves three records.
// Only the scheduler recognises a repeated request.
func TestWhatActsAgainIsRecordedAgain(t *testing.T) {
	for verb, again := range map[string]bool{Open: false, Close: false, Delete: false, Renew: true,
		Frontends: true, RevokeFrontend: true, AdminSessions: true, AdminAttach: true, AdminSuspend: true, OperatorAttach: true} {
		env := &identityv1.Envelope{RequestId: "r", Verb: verb, Body: []byte("body"), ReplyKey: "a", Time: timestamppb.New(time.Unix(1, 0))}
		first := State{Asked: Asked{Verb: verb, Envelope: env}}.once()
		if !bytes.Equal(first, State{Asked: Asked{Verb: verb, Envelope: env}}.once()) {
			t.Errorf("%s: the same envelope is recorded twice", verb)
		}
		later := proto.CloneOf(env)
		later.Time, later.ReplyKey = timestamppb.New(time.Unix(2, 0)), "b"
		if bytes.Equal(first, State{Asked: Asked{Verb: verb, Envelope: later}}.once()) == again {
			t.Errorf("%s: recorded again: %t, want %t", verb, !again, again)
		}
	}
}
