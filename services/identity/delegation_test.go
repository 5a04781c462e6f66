package identity_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// newSharedWorld is a world whose frontend fe-acme-mobile is an agent's: the
// party "agent" acts for users there. Administrators may attach in acme alone.
func newSharedWorld(t *testing.T) (*world, *fakeScheduler) {
	t.Helper()
	e := bustest.Start(t, frontends...)
	rec := &fakeScheduler{}
	connect := func(c subjects.Caller) *bus.Conn { return bustest.Connect(t, e, c) }
	rec.serve(t, connect(subjects.Service("scheduler")))
	return newConfiguredWorld(t, connect, func(cfg *identity.Config) {
		cfg.Tenants = []identity.Tenant{{Tenant: "acme", AdminAttach: true}, {Tenant: "globex"}}
		for name, acting := range map[string]string{"fe-acme-web": "", "fe-acme-mobile": "agent"} {
			cfg.Logins = append(cfg.Logins, identity.Login{Name: name, NKey: publicNKey(t), Acting: acting})
		}
	}), rec
}

func publicNKey(t *testing.T) string {
	t.Helper()
	kp, err := nkeys.CreateUser()
	must(t, err)
	pub, err := kp.PublicKey()
	must(t, err)
	return pub
}

// ask sends a request with a token of its own.
func (w *world) ask(t *testing.T, c *bus.Conn, token, verb string, body proto.Message) *identityv1.Reply {
	t.Helper()
	r := w.request(t, verb, body)
	r.env.Token = token
	return w.direct(t, c, r)
}

func refusedAs(t *testing.T, what string, r *identityv1.Reply, kind, words string) {
	t.Helper()
	f := r.GetFailure()
	if f.GetKind() != kind || !strings.Contains(f.GetReason(), words) {
		t.Errorf("%s: %v, want %s: ...%s...", what, r.GetOutcome(), kind, words)
	}
}

func wellDone(t *testing.T, what string, r *identityv1.Reply) {
	t.Helper()
	if f := r.GetFailure(); f != nil {
		t.Fatalf("%s: %s: %s", what, f.GetKind(), f.GetReason())
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain waited until %s", what)
		}
	}
}

// auditOf waits for the audit record of a request.
func (w *world) auditOf(t *testing.T, match func(*identityv1.Audit) bool) *identityv1.Audit {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cons, err := w.operator.JetStream().OrderedConsumer(ctx, "BERTH_AUDIT", jetstream.OrderedConsumerConfig{FilterSubjects: []string{"berth.v1.audit.identity.>"}})
	must(t, err)
	it, err := cons.Messages()
	must(t, err)
	defer it.Stop()
	for {
		msg, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			t.Fatalf("no such audit record: %v", err)
		}
		a := &identityv1.Audit{}
		must(t, bus.Decode(msg.Data(), msg.Headers().Get(bus.HeaderContentType), a))
		if match(a) {
			return a
		}
	}
}

// TestAnAgentsFrontendActsWithItsOwnExchangedTokensOnly: the user's own token
// and the one exchanged for this very frontend are good; who acts is in what
// lifecycle and credentials hear and in the audit.
func TestAnAgentsFrontendActsWithItsOwnExchangedTokensOnly(t *testing.T) {
	w, _ := newSharedWorld(t)
	own := w.token(t, "acme", "alice", time.Now())
	exchange := func(token, acting string) string {
		out, err := devissuer.Exchange(w.dir, "acme", token, acting, time.Now())
		must(t, err)
		return out
	}
	good := exchange(own, "agent")
	open := &identityv1.OpenRequest{}
	wellDone(t, "the user's own token", w.ask(t, w.other, own, "open", open))
	w.seen()
	wellDone(t, "an exchanged token", w.ask(t, w.other, good, "open", open))
	calls := w.seen()
	for _, c := range calls {
		var actor *corev1.Actor
		switch c := c.(type) {
		case *lifecyclev1.OpenRequest:
			actor = c.GetVerified().GetActor()
		case *credentialsv1.MintRequest:
			actor = c.GetActor()
		}
		if actor.GetActing() != "agent" || actor.GetSubject() != "alice" || actor.GetFrontend() != "mobile" {
			t.Errorf("%T has the actor %v", c, actor)
		}
	}
	if len(calls) != 2 {
		t.Errorf("%d calls", len(calls))
	}
	rec := w.auditOf(t, func(a *identityv1.Audit) bool { return a.GetActor().GetActing() != "" })
	if !rec.GetAdmitted() || rec.GetActor().GetActing() != "agent" || rec.GetActor().GetSubject() != "alice" {
		t.Errorf("audit %v", rec)
	}
	refusedAs(t, "by a frontend that has no party", w.ask(t, w.front, good, "open", open), "denied", "users' own tokens only")
	refusedAs(t, "for another party", w.ask(t, w.other, exchange(own, "rival"), "open", open), "denied", "another party")
	refusedAs(t, "the rival outermost, the agent within", w.ask(t, w.other, exchange(good, "rival"), "open", open), "denied", "another party")
	refusedAs(t, "by another tenant's frontend", w.ask(t, w.globex, good, "open", open), "denied", "another tenant")
	wellDone(t, "the agent outermost, the rival within", w.ask(t, w.other, exchange(exchange(own, "rival"), "agent"), "open", open))
}

// TestAUserSeesAndSettlesWhoActsForThem: who acted is listed; a frontend whose
// right was taken is refused for this user alone, its grants end, and it
// cannot give itself the right back.
func TestAUserSeesAndSettlesWhoActsForThem(t *testing.T) {
	w, _ := newSharedWorld(t)
	alice, bob := w.token(t, "acme", "alice", time.Now()), w.token(t, "acme", "bob", time.Now())
	open := &identityv1.OpenRequest{}
	wellDone(t, "open", w.ask(t, w.other, alice, "open", open))
	list := func() map[string]*identityv1.ActedFor {
		r := w.ask(t, w.front, alice, "frontends", &identityv1.FrontendsRequest{})
		wellDone(t, "list", r)
		out := map[string]*identityv1.ActedFor{}
		for _, f := range r.GetFrontends().GetFrontends() {
			out[f.GetFrontend()] = f
		}
		return out
	}
	until(t, "both frontends are listed", func() bool { l := list(); return l["mobile"] != nil && l["web"] != nil })
	if f := list()["mobile"]; f.GetFirstAt() == nil || f.GetLastAt().AsTime().Before(f.GetFirstAt().AsTime()) || f.GetRevokedAt() != nil {
		t.Errorf("listed as %v", f)
	}
	w.seen()
	revoke := &identityv1.RevokeFrontendRequest{Frontend: "mobile"}
	wellDone(t, "revoke", w.ask(t, w.front, alice, "revoke_frontend", revoke))
	ended, _ := w.seen()[0].(*credentialsv1.EndGrantsRequest)
	if ended.GetTenant() != "acme" || ended.GetSubject() != "alice" || ended.GetIssuer() == "" || ended.GetFrontend() != "mobile" {
		t.Errorf("ended %v", ended)
	}
	refusedAs(t, "the frontend for alice", w.ask(t, w.other, alice, "open", open), "denied", "taken from this frontend")
	refusedAs(t, "giving itself the right back", w.ask(t, w.other, alice, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile", Allow: true}), "denied", "taken from this frontend")
	wellDone(t, "the frontend for bob", w.ask(t, w.other, bob, "open", open))
	wellDone(t, "another frontend for alice", w.ask(t, w.front, alice, "open", open))
	if f := list()["mobile"]; f.GetRevokedAt() == nil || f.GetFirstAt() == nil {
		t.Errorf("listed as %v", f)
	}
	wellDone(t, "revoking twice", w.ask(t, w.front, alice, "revoke_frontend", revoke))
	wellDone(t, "allow", w.ask(t, w.front, alice, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile", Allow: true}))
	wellDone(t, "the frontend for alice again", w.ask(t, w.other, alice, "open", open))
	refusedAs(t, "nobody's name", w.ask(t, w.front, alice, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "nobody"}), "not_found", "no such frontend")
	if n := len(w.ask(t, w.globex, w.token(t, "globex", "alice", time.Now()), "frontends", &identityv1.FrontendsRequest{}).GetFrontends().GetFrontends()); n > 1 {
		t.Errorf("a user of the same name in another tenant sees %d frontends", n)
	}
}

// TestARightTakenWhileTheSessionWakesMintsNothing: the open was let in, and
// then the user changed their mind.
func TestARightTakenWhileTheSessionWakesMintsNothing(t *testing.T) {
	w, _ := newSharedWorld(t)
	alice := w.token(t, "acme", "alice", time.Now())
	w.mu.Lock()
	w.before = func() {
		wellDone(t, "revoke", w.ask(t, w.front, alice, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile"}))
	}
	w.mu.Unlock()
	refusedAs(t, "the open", w.ask(t, w.other, alice, "open", &identityv1.OpenRequest{}), "denied", "while the session woke")
	for _, c := range w.seen() {
		if m, ok := c.(*credentialsv1.MintRequest); ok {
			t.Errorf("minted %v", m.GetSession())
		}
	}
}

// TestARightThatWasTakenRenewsNothing: a renewal brings no token, and credentials may not have heard yet
// that the grant ends.
func TestARightThatWasTakenRenewsNothing(t *testing.T) {
	w, _ := newSharedWorld(t)
	url, err := devissuer.URL(w.dir, "acme")
	must(t, err)
	_, signer, err := ed25519.GenerateKey(nil)
	must(t, err)
	renew := func(subject string) *identityv1.Reply {
		r := w.request(t, "renew", &identityv1.RenewRequest{})
		r.env.Token = ""
		now := time.Now().Unix()
		token, err := grant.Sign(grant.Claims{Issuer: grant.Issuer, ID: "g1", Tenant: "acme", Frontend: "mobile", Host: "h1",
			Session: ids.DeriveSessionKey([]byte("k"), url, "acme", subject, "default"), Generation: ids.Generation{Incarnation: 1, Index: 10},
			Epoch: ids.Epoch{Incarnation: 1, Index: 12}, Principal: grant.Principal{Issuer: url, Subject: subject},
			Confirm: grant.Confirm(r.proof.Public().(ed25519.PublicKey)), Verbs: grant.DefaultVerbs(), IssuedAt: now, Expires: now + 900, AuthTime: now}, "k1", signer)
		must(t, err)
		raw, err := proto.Marshal(&identityv1.RenewRequest{Grant: token,
			Proof: grant.Renewal{RequestID: r.env.GetRequestId(), Grant: token, Time: r.env.GetTime().AsTime()}.Sign(r.proof)})
		must(t, err)
		r.body(raw)
		return w.direct(t, w.other, r)
	}
	wellDone(t, "before", renew("alice"))
	wellDone(t, "revoke", w.ask(t, w.front, w.token(t, "acme", "alice", time.Now()), "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile"}))
	refusedAs(t, "after", renew("alice"), "denied", "taken from this frontend")
	wellDone(t, "another user", renew("bob"))
	_, err = bus.Invoke[*identityv1.SuspendReply](t.Context(), w.operator, "identity", "suspend",
		&identityv1.SuspendRequest{What: &identityv1.Suspension{Tenant: "acme", Issuer: url, Subject: "bob", Reason: "left"}, Suspended: true})
	must(t, err)
	refusedAs(t, "a user who was shut out", renew("bob"), "refused", "suspended")
}

// TestRevocationsOutliveIdentityAndReachItsReplicas: they are read before
// anybody is let in, and told to those that run.
func TestRevocationsOutliveIdentityAndReachItsReplicas(t *testing.T) {
	w, _ := newSharedWorld(t)
	for n := range 3 {
		token := w.token(t, "acme", fmt.Sprintf("user-%d", n), time.Now())
		wellDone(t, "revoke", w.ask(t, w.front, token, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile"}))
	}
	w.replica(t)
	for n := range 20 { // of two replicas each answers some
		token := w.token(t, "acme", fmt.Sprintf("user-%d", n%3), time.Now())
		refusedAs(t, "open", w.ask(t, w.other, token, "open", &identityv1.OpenRequest{}), "denied", "taken from this frontend")
	}
	token := w.token(t, "acme", "late", time.Now())
	wellDone(t, "revoke", w.ask(t, w.front, token, "revoke_frontend", &identityv1.RevokeFrontendRequest{Frontend: "mobile"}))
	until(t, "both replicas know", func() bool {
		for range 12 {
			if w.ask(t, w.other, token, "open", &identityv1.OpenRequest{}).GetFailure().GetKind() != "denied" {
				return false
			}
		}
		return true
	})
}

// TestTheFirstOpenByAnExchangedTokenIsListedWithItsParty: and stays so when the frontend comes with the
// user's own token.
func TestTheFirstOpenByAnExchangedTokenIsListedWithItsParty(t *testing.T) {
	w, _ := newSharedWorld(t)
	own := w.token(t, "acme", "alice", time.Now())
	exchanged, err := devissuer.Exchange(w.dir, "acme", own, "agent", time.Now())
	must(t, err)
	wellDone(t, "open", w.ask(t, w.other, exchanged, "open", &identityv1.OpenRequest{}))
	for _, token := range []string{exchanged, own} {
		wellDone(t, "open", w.ask(t, w.other, token, "open", &identityv1.OpenRequest{}))
		until(t, "the frontend is listed", func() bool {
			for _, f := range w.ask(t, w.front, own, "frontends", &identityv1.FrontendsRequest{}).GetFrontends().GetFrontends() {
				if f.GetFrontend() == "mobile" {
					if f.GetActing() != "agent" {
						t.Errorf("listed as %v", f)
					}
					return true
				}
			}
			return false
		})
	}
}
