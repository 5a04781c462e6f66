package identity_test

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// TestWhoIsShutOutWhileTheyAttachIsNotSaidToHaveAttached: the user reads of an administrator only when a
// grant is asked for.
func TestWhoIsShutOutWhileTheyAttachIsNotSaidToHaveAttached(t *testing.T) {
	w, rec := newSharedWorld(t)
	bob := w.session(t, "acme", "bob", 10)
	rec.put(bob)
	root := w.admin(t, "acme", "root")
	list := w.ask(t, w.front, root, "admin_sessions", &identityv1.AdminSessionsRequest{Issuer: bob.GetActor().GetIssuer(), Subject: "bob"})
	ask := attachTo(list.GetAdminSessions().GetSessions()[0].GetHandle(), bob)
	told, err := w.front.NATS().SubscribeSync("berth.v1.session.acme.*.attached")
	must(t, err)
	must(t, w.front.NATS().Flush())
	what := &identityv1.Suspension{Tenant: "acme", Issuer: w.cfg.Issuers[0].Issuer, Subject: "root", Reason: "left"}
	suspend := func(is bool) {
		if _, err := operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what, Suspended: is}); err != nil {
			t.Error(err)
		}
	}
	rec.mu.Lock()
	rec.before = func() { suspend(true) }
	rec.mu.Unlock()
	refusedAs(t, "the attach", w.ask(t, w.front, root, "admin_attach", ask), "refused", "suspended")
	for _, c := range w.seen() {
		if _, minted := c.(*credentialsv1.MintRequest); minted {
			t.Error("a grant was minted")
		}
	}
	suspend(false)
	ask.Reason = "the second"
	wellDone(t, "attach", w.ask(t, w.front, root, "admin_attach", ask))
	msg, err := told.NextMsg(20 * time.Second)
	must(t, err)
	event := &identityv1.Attached{}
	must(t, bus.Decode(msg.Data, msg.Header.Get(bus.HeaderContentType), event))
	if event.GetReason() != ask.Reason {
		t.Errorf("told of who was turned away: %v", event)
	}
}
