package main

import (
	"strconv"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/sdk"
)

// A new leader publishes again what the one before it may not have published: it looks as if it
// happened twice.
func TestTailPrintsAnEventOnce(t *testing.T) {
	key := ids.DeriveSessionKey([]byte("k"), "issuer", "acme", "ann", "default")
	of := func(subject, id string, body proto.Message) sdk.Event {
		raw, err := proto.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		e, ok := sdk.EventOf(subject, nats.Header{"ce-id": {id}, "ce-type": {"x"}, "Content-Type": {"application/protobuf"}}, raw)
		if !ok || e.Body == nil || e.ID != id {
			t.Fatalf("%s: %+v", subject, e)
		}
		return e
	}
	session := func(name, id string, gen, rev uint64) sdk.Event {
		return of(subjects.Session("acme", key, name), id, &schedulerv1.Event{Revision: rev,
			Session: &corev1.SessionRef{Tenant: "acme", Session: string(key), Generation: &corev1.Stamp{Incarnation: 1, Index: gen}}})
	}
	host := func(id string) sdk.Event {
		return of(subjects.HostEvent("host-1", "lost"), id, &schedulerv1.HostEvent{Host: "host-1", What: "lost"})
	}
	var seen once
	for i, c := range []struct {
		e    sdk.Event
		want bool
	}{
		{session("admitted", "a1", 1, 1), true}, {session("placed", "a2", 1, 2), true},
		{session("admitted", "a1", 1, 1), false}, {session("placed", "b2", 1, 2), false}, {session("active", "a3", 1, 3), true},
		{session("admitted", "a4", 9, 1), true}, // a session of that name that is made anew
		{session("erased", "a5", 1, 4), true},   // of the one before
		{host("h1"), true}, {host("h1"), false}, {host("h2"), true}, {host(""), true}, {host(""), true},
	} {
		if got := seen.first(c.e); got != c.want {
			t.Errorf("%d, %s %s: %v", i, c.e.Name, c.e.ID, got)
		}
	}
	for i := range 5 * onceMost {
		seen.first(host("x" + strconv.Itoa(i)))
	}
	if n := len(seen.young) + len(seen.old); n > 2*onceMost {
		t.Errorf("%d are remembered", n)
	}
}
