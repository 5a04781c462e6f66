package acting

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

// TestTheLastTimeIsNotBeforeTheFirst and the party of an exchanged token is known from the first note on,
// whatever the frontend does with the user's own token besides.
func TestTheLastTimeIsNotBeforeTheFirst(t *testing.T) {
	e := bustest.Start(t)
	ctx, stop := context.WithCancel(t.Context())
	l, err := Open(bustest.Context(t), ctx, bustest.Connect(t, e, subjects.Service("identity")), bustest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(); l.Wait() })
	party := &corev1.Actor{Tenant: "acme", Issuer: "https://idp", Subject: "ann", Frontend: "agent", Acting: "party"}
	own := proto.CloneOf(party)
	own.Acting = ""
	first := time.Date(2026, 1, 1, 9, 49, 3, 0, time.UTC)
	// listed is the one record, once it is as wanted.
	listed := func(what string, wanted func(*identityv1.ActedFor) bool) {
		t.Helper()
		var f *identityv1.ActedFor
		defer func() {
			if t.Failed() {
				t.Logf("it is %v", f)
			}
		}()
		until(t, what, func() bool {
			list, err := l.List(t.Context(), party)
			if err != nil || len(list) != 1 {
				return false
			}
			f = list[0]
			if f.GetLastAt().AsTime().Before(f.GetFirstAt().AsTime()) {
				t.Errorf("last before first: %v", f)
			}
			if f.GetActing() != "party" {
				t.Errorf("nobody is said to act: %v", f)
			}
			return wanted(f)
		})
	}
	l.Acted(party, first)
	listed("the first is listed", func(f *identityv1.ActedFor) bool { return f.GetFirstAt().AsTime().Equal(first) })
	l.Acted(own, first.Add(time.Minute)) // the same hour
	l.Acted(own, first.Add(time.Hour))
	listed("the next hour is listed", func(f *identityv1.ActedFor) bool {
		return f.GetLastAt().AsTime().Equal(first.Truncate(time.Hour).Add(time.Hour))
	})
}
