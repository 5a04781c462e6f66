package acting

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/subjects"
)

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain waited until %s", what)
		}
	}
}

// TestOneRecordForAPairWhoeverWritesIt: two replicas note the same pair; the
// first time stays, the last moves by the hour, and a right that was taken and
// given back is known to both.
func TestOneRecordForAPairWhoeverWritesIt(t *testing.T) {
	e := bustest.Start(t)
	ctx, stop := context.WithCancel(t.Context())
	var both [2]*Ledger
	for i := range both {
		l, err := Open(bustest.Context(t), ctx, bustest.Connect(t, e, subjects.Service("identity")), bustest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		both[i] = l
	}
	t.Cleanup(func() { stop(); both[0].Wait(); both[1].Wait() })
	actor := &corev1.Actor{Tenant: "acme", Issuer: "https://idp", Subject: "ann.*> ü", Frontend: "agent", Acting: "party"}
	first := time.Date(2026, 1, 1, 10, 20, 0, 0, time.UTC)
	for i, l := range both {
		for n := range 3 {
			l.Acted(actor, first.Add(time.Duration(3*i+n)*time.Hour))
		}
	}
	until(t, "the last hour is written", func() bool {
		list, err := both[0].List(t.Context(), actor)
		return err == nil && len(list) == 1 && list[0].GetLastAt().AsTime().Equal(time.Date(2026, 1, 1, 15, 0, 0, 0, time.UTC))
	})
	list, err := both[1].List(t.Context(), actor)
	if err != nil || list[0].GetActing() != "party" || list[0].GetRevokedAt() != nil {
		t.Fatalf("%v, %v", list, err)
	}
	other := &corev1.Actor{Tenant: "acme", Issuer: "https://idp", Subject: "ann", Frontend: "agent"}
	if list, err := both[0].List(t.Context(), other); err != nil || len(list) != 0 {
		t.Errorf("another user sees %v, %v", list, err)
	}
	for _, allow := range []bool{false, true, false} {
		if err := both[0].Revoke(t.Context(), actor, "agent", allow, first); err != nil {
			t.Fatal(err)
		}
		if both[0].Revoked(actor) == allow {
			t.Errorf("allow=%v is not known where it was said", allow)
		}
		until(t, "the other replica knows", func() bool { return both[1].Revoked(actor) != allow })
		if both[1].Revoked(other) {
			t.Error("another user's right is gone too")
		}
	}
	if known, err := both[1].Known(t.Context(), actor, "agent"); err != nil || !known {
		t.Errorf("known %v, %v", known, err)
	}
	if known, err := both[1].Known(t.Context(), actor, "nobody"); err != nil || known {
		t.Errorf("nobody is known: %v, %v", known, err)
	}
}

// TestABucketThatWasPutBackCountsAnew: what is known of a later state does
// not outlive it.
func TestABucketThatWasPutBackCountsAnew(t *testing.T) {
	l := &Ledger{revoked: map[string]state{}, ready: make(chan struct{})}
	l.takeWhole(map[string]state{"a.x": {9, true}, "b.x": {7, true}}, 0)
	l.take(map[string]state{"b.x": {10, false}})
	l.take(map[string]state{"b.x": {7, true}})
	if l.revoked["b.x"].taken || !l.revoked["a.x"].taken {
		t.Error("something older came back")
	}
	l.takeWhole(map[string]state{"a.x": {3, false}}, l.last)
	if l.revoked["a.x"].taken {
		t.Error("a state that was put back does not count")
	}
}

// TestARightTakenWhileTheListIsReadStaysTaken: what this replica wrote after a watch began is not in what the
// watch finds, and is no sign that the bucket was put back.
func TestARightTakenWhileTheListIsReadStaysTaken(t *testing.T) {
	l := &Ledger{ready: make(chan struct{}), revoked: map[string]state{}}
	l.takeWhole(map[string]state{"old": {5, true}}, 0)
	before := l.last
	l.take(map[string]state{"new": {7, true}})
	l.takeWhole(map[string]state{"old": {5, true}}, before)
	if !l.revoked["new"].taken || !l.revoked["old"].taken {
		t.Errorf("forgotten: %v", l.revoked)
	}
	l.takeWhole(map[string]state{"other": {3, true}}, l.last)
	if l.revoked["new"].taken || !l.revoked["other"].taken || l.last != 3 {
		t.Errorf("the bucket was put back: %v", l.revoked)
	}
}
