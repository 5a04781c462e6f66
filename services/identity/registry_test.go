package identity_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// operate calls a method of the registry as an operator.
func operate[Reply proto.Message](t *testing.T, w *world, method string, ask proto.Message) (Reply, error) {
	t.Helper()
	return bus.Invoke[Reply](t.Context(), w.operator, "identity", method, ask)
}

// everywhere asks again until every identity must have been asked and all answered so.
func (w *world) everywhere(t *testing.T, what string, ask func() (string, bool)) {
	t.Helper()
	said := ""
	for deadline, row := time.Now().Add(20*time.Second), 0; row < 12; {
		var good bool
		if said, good = ask(); good {
			row++
			continue
		}
		if row = 0; time.Now().After(deadline) {
			t.Fatalf("%s: it says %s", what, said)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// opens tries an open with a token and tells the reason when it is refused.
func (w *world) opens(t *testing.T, token string) (reason string, opened bool) {
	t.Helper()
	r := w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = token
	reply := w.direct(t, w.front, r)
	return reply.GetFailure().GetReason(), reply.GetOpen() != nil
}

// ended counts the calls that end the grants of somebody, since the last time.
func (w *world) ended(match func(*credentialsv1.EndGrantsRequest) bool) (n int) {
	for _, c := range w.seen() {
		if q, ok := c.(*credentialsv1.EndGrantsRequest); ok && match(q) {
			n++
		}
	}
	return n
}

// TestAnIssuerComesAndGoes: while two identities run, with no restart; what the token names chooses its
// plan; when the issuer goes the grants of its users end.
func TestAnIssuerComesAndGoes(t *testing.T) {
	w := newWorld(t)
	w.replica(t)
	rec, p := w.records(t), newProvider(t)
	token := p.token(t, map[string]any{"tier": "gold"})
	if why, opened := w.opens(t, token); opened || !strings.Contains(why, "not registered") {
		t.Fatalf("before: %q", why)
	}
	issuer := &identityv1.Issuer{Issuer: p.URL, Audience: "berth", Tenant: "acme", PlanClaim: "tier", Plans: map[string]string{"gold": "large"}}
	put, err := operate[*identityv1.IssuerPutReply](t, w, "issuer_put", &identityv1.IssuerPutRequest{Issuer: issuer})
	must(t, err)
	w.everywhere(t, "the new issuer", func() (string, bool) { return w.opens(t, token) })
	if why, opened := w.opens(t, p.token(t, map[string]any{"tier": "diamond"})); opened || !strings.Contains(why, "plan") {
		t.Errorf("a plan that is not registered: %q", why)
	}
	if fetched := p.fetched(); fetched > 2 {
		t.Errorf("two identities fetched the keys %d times", fetched)
	}
	_, err = operate[*identityv1.IssuerPutReply](t, w, "issuer_put", &identityv1.IssuerPutRequest{Issuer: issuer})
	if !errs.Is(err, errkind.Exists) {
		t.Errorf("added twice: %v", err)
	}
	_, err = operate[*identityv1.IssuerPutReply](t, w, "issuer_put", &identityv1.IssuerPutRequest{Issuer: put.GetIssuer(), Remove: true})
	must(t, err)
	w.everywhere(t, "the removed issuer", func() (string, bool) { why, opened := w.opens(t, token); return why, !opened })
	if w.ended(func(q *credentialsv1.EndGrantsRequest) bool { return q.GetTenant() == "acme" && q.GetIssuer() == p.URL }) == 0 {
		t.Error("the grants of its users were not ended")
	}
	for _, kind := range []string{"", errkind.Exists.String()} {
		rec.find(t, "the change", func(a *identityv1.Audit) bool {
			return a.GetVerb() == "issuer_put" && a.GetActor().GetRole() == "operator" && a.GetAbout().GetIssuer() == p.URL && a.GetFailure().GetKind() == kind && a.GetAdmitted() == (kind == "")
		})
	}
}

// TestALiftedSuspensionEndsNoLaterGrants: grants are ended once more a little later, but not when the suspension was
// lifted by then: those that were given out since are good.
func TestALiftedSuspensionEndsNoLaterGrants(t *testing.T) {
	t.Attr("wait", "3s: grants are ended once more 2 s after a suspension")
	w := newWorld(t)
	ann := w.token(t, "acme", "ann", time.Now())
	what := &identityv1.Suspension{Tenant: "acme", Issuer: w.cfg.Issuers[0].Issuer, Subject: "ann", Reason: "a mistake"}
	for _, on := range []bool{true, false} {
		_, err := operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what, Suspended: on})
		must(t, err)
	}
	w.everywhere(t, "lifted", func() (string, bool) { return w.opens(t, ann) })
	w.seen()
	time.Sleep(3 * time.Second)
	if n := w.ended(func(q *credentialsv1.EndGrantsRequest) bool { return q.GetSubject() == "ann" }); n > 0 {
		t.Errorf("after the suspension was lifted grants were ended %d times", n)
	}
}

// TestWhoIsShutOut: the user, by every identity; with the reason; grants end, and once more a little later;
// others are let in; and nothing is left of it once it was lifted.
func TestWhoIsShutOut(t *testing.T) {
	w := newWorld(t)
	w.replica(t)
	rec := w.records(t)
	ann, bob := w.token(t, "acme", "ann", time.Now()), w.token(t, "acme", "bob", time.Now())
	what := &identityv1.Suspension{Tenant: "acme", Issuer: w.cfg.Issuers[0].Issuer, Subject: "ann", Reason: "left the firm"}
	w.everywhere(t, "before", func() (string, bool) { return w.opens(t, ann) })
	w.seen()
	began := time.Now()
	_, err := operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what, Suspended: true})
	must(t, err)
	w.everywhere(t, "suspended", func() (string, bool) {
		why, opened := w.opens(t, ann)
		return why, !opened && why == "this user is suspended: left the firm"
	})
	t.Logf("suspended everywhere after %s", time.Since(began).Round(time.Millisecond))
	if why, opened := w.opens(t, bob); !opened {
		t.Errorf("another user is shut out too: %s", why)
	}
	ended := 0
	for deadline := time.Now().Add(20 * time.Second); ended < 2; time.Sleep(20 * time.Millisecond) {
		ended += w.ended(func(q *credentialsv1.EndGrantsRequest) bool {
			return q.GetTenant() == "acme" && q.GetSubject() == "ann" && q.GetFrontend() == ""
		})
		if time.Now().After(deadline) {
			t.Fatalf("grants were ended %d times", ended)
		}
	}
	rec.find(t, "the suspension", func(a *identityv1.Audit) bool {
		return a.GetVerb() == "suspend" && a.GetAbout().GetSubject() == "ann" && a.GetReason() == "left the firm" && a.GetAdmitted()
	})
	rec.find(t, "the refusal", func(a *identityv1.Audit) bool {
		return a.GetVerb() == "open" && !a.GetAdmitted() && a.GetFailure().GetReason() == "this user is suspended: left the firm"
	})
	_, err = operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what})
	must(t, err)
	w.everywhere(t, "lifted", func() (string, bool) { return w.opens(t, ann) })
}

// TestSuspendedWhileTheSessionWakes: a wake may take minutes; its end gives no grant to whoever was shut
// out meanwhile.
func TestSuspendedWhileTheSessionWakes(t *testing.T) {
	w := newWorld(t)
	for name, what := range map[string]*identityv1.Suspension{
		"user":   {Tenant: "acme", Issuer: w.cfg.Issuers[0].Issuer, Subject: "alice"},
		"tenant": {Tenant: "acme"},
	} {
		w.mu.Lock()
		w.before = func() {
			_, err := operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what, Suspended: true})
			if err != nil {
				t.Error(err)
			}
		}
		w.mu.Unlock()
		if why, opened := w.opens(t, w.token(t, "acme", "alice", time.Now())); opened || !strings.Contains(why, "suspended") {
			t.Errorf("%s: %q", name, why)
		}
		if slices.ContainsFunc(w.seen(), func(m proto.Message) bool { _, ok := m.(*credentialsv1.MintRequest); return ok }) {
			t.Errorf("%s: a grant was minted", name)
		}
		_, err := operate[*identityv1.SuspendReply](t, w, "suspend", &identityv1.SuspendRequest{What: what})
		must(t, err)
	}
}
