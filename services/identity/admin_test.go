package identity_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/services/identity/devissuer"
)

// fakeScheduler stands for scheduler: it shows and lists what a test put in.
type fakeScheduler struct {
	mu     sync.Mutex
	all    []*schedulerv1.SessionRecord
	before func() // runs once, before a session is shown
}

func (r *fakeScheduler) put(recs ...*schedulerv1.SessionRecord) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, recs...)
	slices.SortFunc(r.all, func(a, b *schedulerv1.SessionRecord) int {
		return strings.Compare(a.GetSession().GetSession(), b.GetSession().GetSession())
	})
}

func (r *fakeScheduler) serve(t *testing.T, conn *bus.Conn) {
	t.Helper()
	svc, err := conn.Serve(t.Context(), bus.ServiceConfig{Name: "scheduler"})
	must(t, err)
	must(t, bus.Handle(svc, "show", func(_ context.Context, _ bus.Request, q *schedulerv1.ShowRequest) (*schedulerv1.ShowReply, error) {
		r.mu.Lock()
		first := r.before
		r.before = nil
		r.mu.Unlock()
		if first != nil {
			first()
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, rec := range r.all {
			if rec.GetSession().GetSession() == q.GetSession() && rec.GetSession().GetTenant() == q.GetTenant() {
				return &schedulerv1.ShowReply{Record: proto.CloneOf(rec), HostKey: "XHOSTKEY"}, nil
			}
		}
		return nil, errs.E("show", errkind.NotFound, "", "there is no such session")
	}))
	must(t, bus.Handle(svc, "list", func(_ context.Context, _ bus.Request, q *schedulerv1.ListRequest) (*schedulerv1.ListReply, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		out := &schedulerv1.ListReply{}
		for _, rec := range r.all {
			a, k := rec.GetActor(), rec.GetSession()
			if k.GetTenant() != q.GetTenant() || k.GetSession() <= q.GetAfter() || q.GetIssuer() != "" && (a.GetIssuer() != q.GetIssuer() || a.GetSubject() != q.GetSubject()) {
				continue
			}
			if len(out.Records) == int(q.GetLimit()) {
				out.Next = out.Records[len(out.Records)-1].GetSession().GetSession()
				break
			}
			out.Records = append(out.Records, proto.CloneOf(rec))
		}
		return out, nil
	}))
	must(t, conn.NATS().Flush())
}

// session is an active one of a user of the dev issuer.
func (w *world) session(t *testing.T, tenant, subject string, index uint64) *schedulerv1.SessionRecord {
	t.Helper()
	url, err := devissuer.URL(w.dir, ids.Tenant(tenant))
	must(t, err)
	key := ids.DeriveSessionKey([]byte("test"), url, ids.Tenant(tenant), subject, "default")
	return &schedulerv1.SessionRecord{State: corev1.State_STATE_ACTIVE, Host: "h1", SessionName: "private-name", Terms: terms, ChangedAt: timestamppb.Now(),
		Actor: &corev1.Actor{Tenant: tenant, Issuer: url, Subject: subject, Frontend: "web"},
		Session: &corev1.SessionRef{Tenant: tenant, Session: string(key), Generation: &corev1.Stamp{Incarnation: 1, Index: index},
			Epoch: &corev1.Stamp{Incarnation: 1, Index: index + 2}}}
}

func (w *world) admin(t *testing.T, tenant ids.Tenant, subject string) string {
	t.Helper()
	token, err := devissuer.Mint(w.dir, devissuer.User{Tenant: tenant, Subject: subject, Groups: []string{"staff", devissuer.AdminGroup}}, time.Now())
	must(t, err)
	return token
}

func attachTo(handle string, r *schedulerv1.SessionRecord) *identityv1.AdminAttachRequest {
	return &identityv1.AdminAttachRequest{Handle: handle, Reason: "ticket 4711", Issuer: r.GetActor().GetIssuer(), Subject: r.GetActor().GetSubject(),
		Generation: r.GetSession().GetGeneration()}
}

// TestAnAdministratorSeesHandlesAndNothingElse: page by page, of the own
// tenant alone; neither key nor user nor name is in the answer.
func TestAnAdministratorSeesHandlesAndNothingElse(t *testing.T) {
	w, rec := newSharedWorld(t)
	// Handles and cursors are random base32 of [a-z2-7]: a hyphen is in none of them, "bob" in some.
	rec.put(w.session(t, "acme", "bob-b", 10), w.session(t, "acme", "carol-c", 20), w.session(t, "acme", "dave-d", 30), w.session(t, "globex", "eve-e", 40))
	for _, r := range rec.all {
		r.Host = "host-1"
	}
	root := w.admin(t, "acme", "root")
	refusedAs(t, "a user", w.ask(t, w.front, w.token(t, "acme", "bob", time.Now()), "admin_sessions", &identityv1.AdminSessionsRequest{}), "denied", "administrator")
	seen := map[string]bool{}
	ask := &identityv1.AdminSessionsRequest{Limit: 2}
	for pages := 1; ; pages++ {
		r := w.ask(t, w.front, root, "admin_sessions", ask)
		wellDone(t, "list", r)
		for _, s := range r.GetAdminSessions().GetSessions() {
			seen[s.GetHandle()] = true
			text := s.String() + r.GetAdminSessions().GetNext()
			for _, secret := range []string{"bob-b", "carol-c", "dave-d", "private-name", "host-1"} {
				if strings.Contains(text, secret) {
					t.Errorf("%s is in %s", secret, text)
				}
			}
			for _, k := range rec.all {
				if strings.Contains(text, k.GetSession().GetSession()) {
					t.Errorf("a session key is in %s", text)
				}
			}
		}
		if ask.After = r.GetAdminSessions().GetNext(); ask.After == "" {
			if pages != 2 || len(seen) != 3 {
				t.Errorf("%d handles on %d pages", len(seen), pages)
			}
			break
		}
		// Another tenant's administrator cannot go on from here.
		refusedAs(t, "a foreign cursor", w.ask(t, w.globex, w.admin(t, "globex", "root"), "admin_sessions", ask), "invalid", "after")
	}
	of := rec.all[0].GetActor()
	one := w.ask(t, w.front, root, "admin_sessions", &identityv1.AdminSessionsRequest{Issuer: of.GetIssuer(), Subject: of.GetSubject()})
	if got := one.GetAdminSessions().GetSessions(); len(got) > 1 {
		t.Errorf("%d sessions of one user", len(got))
	}
}

// TestAnAdministratorAttachesOnlyToWhatWasExpected: a short grant that is not
// renewed, only with handle, user and generation as they are, in a tenant that
// allows it; the event is stored before.
func TestAnAdministratorAttachesOnlyToWhatWasExpected(t *testing.T) {
	w, rec := newSharedWorld(t)
	bob, carol, eve := w.session(t, "acme", "bob", 10), w.session(t, "acme", "carol", 20), w.session(t, "globex", "eve", 40)
	rec.put(bob, carol, eve)
	root := w.admin(t, "acme", "root")
	handle := func(c *bus.Conn, token string, r *schedulerv1.SessionRecord) string {
		list := w.ask(t, c, token, "admin_sessions", &identityv1.AdminSessionsRequest{Issuer: r.GetActor().GetIssuer(), Subject: r.GetActor().GetSubject()})
		return list.GetAdminSessions().GetSessions()[0].GetHandle()
	}
	h := handle(w.front, root, bob)
	sub, err := w.front.NATS().SubscribeSync("berth.v1.session.acme.*.attached")
	must(t, err)
	must(t, w.front.NATS().Flush())
	w.seen()
	r := w.ask(t, w.front, root, "admin_attach", attachTo(h, bob))
	wellDone(t, "attach", r)
	got := r.GetAdminAttach()
	if !proto.Equal(got.GetSession(), bob.GetSession()) || got.GetGrant() == "" || got.GetEndpoint().GetHostKey() != "XHOSTKEY" || !strings.HasSuffix(got.GetEndpoint().GetSubject(), ".1-12") {
		t.Errorf("answer %v", got)
	}
	mint, _ := w.seen()[0].(*credentialsv1.MintRequest)
	if !mint.GetOnce() || mint.GetTtl().AsDuration() != 2*time.Minute || !slices.Equal(mint.GetVerbs(), []string{"read"}) ||
		mint.GetActor().GetSubject() != "root" || mint.GetActor().GetRole() != "administrator" {
		t.Errorf("minted by %v", mint)
	}
	msg, err := sub.NextMsg(20 * time.Second)
	must(t, err)
	event := &identityv1.Attached{}
	must(t, proto.Unmarshal(msg.Data, event))
	if event.GetReason() != "ticket 4711" || event.GetBy().GetSubject() != "root" || !proto.Equal(event.GetSession(), bob.GetSession()) || event.GetUntil().AsTime().Sub(event.GetAt().AsTime()) != 2*time.Minute {
		t.Errorf("told %v", event)
	}
	a := w.auditOf(t, func(a *identityv1.Audit) bool { return a.GetVerb() == "admin_attach" })
	if !a.GetAdmitted() || a.GetReason() != "ticket 4711" || a.GetAbout().GetSubject() != "bob" || a.GetSession() != bob.GetSession().GetSession() || a.GetActor().GetRole() != "administrator" {
		t.Errorf("recorded %v", a)
	}
	for name, tc := range map[string]struct {
		conn        *bus.Conn
		token       string
		change      func(*identityv1.AdminAttachRequest)
		kind, words string
	}{
		"another user's name":       {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Subject = "carol" }, "not_found", "no such session"},
		"another user's handle":     {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Handle = handle(w.front, root, carol) }, "not_found", "no such session"},
		"no handle of anybody":      {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Handle = "h" + strings.Repeat("a", 52) }, "not_found", "no such session"},
		"another generation":        {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Generation.Index++ }, "conflict", "generation"},
		"no reason":                 {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Reason = "" }, "invalid", "reason"},
		"a reason that is too long": {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Reason = strings.Repeat("r", 257) }, "invalid", "reason"},
		"a session key":             {w.front, root, func(q *identityv1.AdminAttachRequest) { q.Handle, q.Session = "", bob.GetSession().GetSession() }, "invalid", "handle"},
		"a user":                    {w.front, w.token(t, "acme", "carol", time.Now()), func(*identityv1.AdminAttachRequest) {}, "denied", "administrator"},
		"another tenant's":          {w.globex, root, func(*identityv1.AdminAttachRequest) {}, "denied", "another tenant"},
		"where it is switched off":  {w.globex, w.admin(t, "globex", "root"), func(q *identityv1.AdminAttachRequest) { proto.Reset(q); proto.Merge(q, attachTo("h1", eve)) }, "refused", "switched off"},
	} {
		q := attachTo(h, proto.CloneOf(bob))
		tc.change(q)
		w.seen()
		refusedAs(t, name, w.ask(t, tc.conn, tc.token, "admin_attach", q), tc.kind, tc.words)
		if calls := w.seen(); len(calls) != 0 {
			t.Errorf("%s: reached %T", name, calls[0])
		}
	}
	if _, err := sub.NextMsg(50 * time.Millisecond); err == nil {
		t.Error("what was refused was told as done")
	}
}

// TestAnAdministratorShutsOutUsersOfTheOwnTenant, and lifts nothing that an
// operator did.
func TestAnAdministratorShutsOutUsersOfTheOwnTenant(t *testing.T) {
	w, _ := newSharedWorld(t)
	root, bob := w.admin(t, "acme", "root"), w.token(t, "acme", "bob", time.Now())
	url, err := devissuer.URL(w.dir, "acme")
	must(t, err)
	open := &identityv1.OpenRequest{}
	ask := &identityv1.AdminSuspendRequest{Issuer: url, Subject: "bob", Suspended: true, Reason: "left the company"}
	refusedAs(t, "a user", w.ask(t, w.front, bob, "admin_suspend", ask), "denied", "administrator")
	wellDone(t, "suspend", w.ask(t, w.front, root, "admin_suspend", ask))
	until(t, "bob is shut out", func() bool {
		return w.ask(t, w.front, bob, "open", open).GetFailure().GetKind() == "refused"
	})
	ask.Suspended = false
	wellDone(t, "lift", w.ask(t, w.front, root, "admin_suspend", ask))
	until(t, "bob is let in", func() bool { return w.ask(t, w.front, bob, "open", open).GetFailure() == nil })
	foreign := proto.CloneOf(ask)
	foreign.Issuer, err = devissuer.URL(w.dir, "globex")
	must(t, err)
	foreign.Suspended = true
	refusedAs(t, "another tenant's user", w.ask(t, w.front, root, "admin_suspend", foreign), "not_found", "no such issuer")
	_, err = bus.Invoke[*identityv1.SuspendReply](t.Context(), w.operator, "identity", "suspend", &identityv1.SuspendRequest{Suspended: true,
		What: &identityv1.Suspension{Tenant: "acme", Issuer: url, Subject: "bob", Reason: "fraud"}})
	must(t, err)
	until(t, "bob is shut out by the operator", func() bool {
		return w.ask(t, w.front, bob, "open", open).GetFailure().GetKind() == "refused"
	})
	refusedAs(t, "lifting an operator's", w.ask(t, w.front, root, "admin_suspend", ask), "denied", "only an operator")
}

// TestAnOperatorAttachesWithTheSameCompare: by key, without a token; the
// grant comes sealed.
func TestAnOperatorAttachesWithTheSameCompare(t *testing.T) {
	w, rec := newSharedWorld(t)
	bob := w.session(t, "acme", "bob", 10)
	rec.put(bob)
	attach := func(change func(*identityv1.OperatorAttach)) *identityv1.Reply {
		t.Helper()
		reply, err := seal.NewKey(rand.Reader)
		must(t, err)
		pub, _, err := ed25519.GenerateKey(rand.Reader)
		must(t, err)
		ask := attachTo("", proto.CloneOf(bob))
		ask.Tenant, ask.Session = "acme", bob.GetSession().GetSession()
		in := &identityv1.OperatorAttach{Ask: ask, ProofKey: pub, ReplyKey: string(reply.Public()), Time: timestamppb.Now(), RequestId: string(ids.NewRequestID())}
		change(in)
		raw, err := proto.Marshal(in)
		must(t, err)
		sealed, err := seal.SealTo(w.curve(t, w.operator), raw, rand.Reader)
		must(t, err)
		r, err := bus.Invoke[*identityv1.OperatorAttachReply](t.Context(), w.operator, "identity", "operator_attach", &identityv1.OperatorAttachRequest{Sealed: sealed})
		must(t, err)
		plain, err := reply.Open(r.GetSealed())
		must(t, err)
		out := &identityv1.Reply{}
		must(t, proto.Unmarshal(plain, out))
		return out
	}
	r := attach(func(*identityv1.OperatorAttach) {})
	wellDone(t, "attach", r)
	if r.GetAdminAttach().GetGrant() == "" {
		t.Error("there is no grant")
	}
	mint, _ := w.seen()[0].(*credentialsv1.MintRequest)
	if !mint.GetOnce() || mint.GetActor().GetRole() != "operator" || mint.GetActor().GetTenant() != "acme" {
		t.Errorf("minted by %v", mint)
	}
	refusedAs(t, "another user", attach(func(in *identityv1.OperatorAttach) { in.Ask.Subject = "carol" }), "conflict", "not of the user")
	refusedAs(t, "another generation", attach(func(in *identityv1.OperatorAttach) { in.Ask.Generation.Index = 11 }), "conflict", "generation")
	refusedAs(t, "another tenant", attach(func(in *identityv1.OperatorAttach) { in.Ask.Tenant = "globex" }), "not_found", "no such session")
	refusedAs(t, "no tenant", attach(func(in *identityv1.OperatorAttach) { in.Ask.Tenant = "a.b" }), "invalid", "tenant")
	refusedAs(t, "nothing asked", attach(func(in *identityv1.OperatorAttach) { in.Ask = nil }), "invalid", "reason")
	refusedAs(t, "an old one", attach(func(in *identityv1.OperatorAttach) { in.Time = timestamppb.New(time.Now().Add(-time.Hour)) }), "expired", "old")
	a := w.auditOf(t, func(a *identityv1.Audit) bool { return a.GetVerb() == "operator_attach" && !a.GetAdmitted() })
	if a.GetActor().GetRole() != "operator" || a.GetReason() != "ticket 4711" {
		t.Errorf("recorded %v", a)
	}
	_, err := bus.Invoke[*identityv1.OperatorAttachReply](t.Context(), w.operator, "identity", "operator_attach", &identityv1.OperatorAttachRequest{Sealed: []byte("noise")})
	if errs.Kind(err) != errkind.Invalid {
		t.Errorf("noise: %v", err)
	}
	if _, err := w.front.CallRaw(bounded(t), "berth.v1.rpc.identity.operator_attach.operator", nil, ""); err == nil {
		t.Error("a frontend reached the operators' door")
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}
