package registry_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/registry"
)

func TestMain(m *testing.M) {
	bustest.Child()
	os.Exit(m.Run())
}

func newKey(t *testing.T) string {
	t.Helper()
	pair, err := nkeys.CreateUser()
	must(t, err)
	public, err := pair.PublicKey()
	must(t, err)
	return public
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func static(t *testing.T) registry.Static {
	return registry.Static{
		Tenants: []*identityv1.Tenant{{Tenant: "fixed", Plan: "small"}},
		Issuers: []*identityv1.Issuer{{Issuer: "https://fixed", Audience: "a", Tenant: "fixed"}},
		Logins:  []*identityv1.Login{{Name: "fe-fixed-web", Nkey: newKey(t)}},
	}
}

// open is one replica on a bus that may have others.
func open(t *testing.T, conn *bus.Conn, st registry.Static) *registry.Store {
	t.Helper()
	follow, quit := context.WithCancel(context.Background())
	s, err := registry.Open(bustest.Context(t), follow, conn, st, bustest.Log(t))
	if err != nil {
		quit()
		t.Fatal(err)
	}
	t.Cleanup(func() { quit(); s.Wait() })
	return s
}

// until waits for what a replica is told by its watch.
func until(t *testing.T, s *registry.Store, what string, good func(*registry.Snapshot) bool) {
	t.Helper()
	late := time.After(time.Minute)
	for {
		changed := s.Changed()
		if good(s.Current()) {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("after a minute not so: %s", what)
		}
	}
}

func identityConn(t *testing.T) *bus.Conn {
	t.Helper()
	return bustest.Connect(t, bustest.Start(t), subjects.Service("identity"))
}

func wants(t *testing.T, what string, err error, kind errkind.Kind) {
	t.Helper()
	if !errs.Is(err, kind) {
		t.Errorf("%s: %v, wanted %s", what, err, kind)
	}
}

// TestTwoReplicas: what one stores the other judges by, also when it starts later; and the answer to a
// change is given only when the replica that gives it judges by it.
func TestTwoReplicas(t *testing.T) {
	conn := identityConn(t)
	st := static(t)
	one, two := open(t, conn, st), open(t, conn, st)
	ctx := bustest.Context(t)
	acme, err := one.PutTenant(ctx, &identityv1.Tenant{Tenant: "acme", Plan: "small", TierFloor: "gvisor"})
	must(t, err)
	if got, ok := one.Current().Tenant("acme"); !ok || got.GetRevision() != acme.GetRevision() || acme.GetRevision() == 0 {
		t.Fatalf("the one that stored it has %v", got)
	}
	i, err := one.PutIssuer(ctx, &identityv1.Issuer{Issuer: "https://idp", Audience: "berth", Tenant: "acme"}, false)
	must(t, err)
	key := newKey(t)
	_, err = one.PutLogin(ctx, &identityv1.Login{Name: "fe-acme-web", Nkey: key, Acting: "agents"}, false)
	must(t, err)
	must(t, one.Suspend(ctx, &identityv1.Suspension{Tenant: "acme", Issuer: "https://idp", Subject: "mallory", Reason: "left"}, registry.ByOperator, true))
	all := func(s *registry.Snapshot) bool {
		l, ok := s.ByNKey(key)
		why, shut := s.ShutUser(core.Principal{Tenant: "acme", Issuer: "https://idp", Subject: "mallory"})
		e, err := s.Policy.Find(core.Token{Issuer: "https://idp", Audience: []string{"berth"}, Subject: "ann"})
		return ok && l.Acting == "agents" && shut && why == "left" && err == nil && e.Plan == "small"
	}
	until(t, two, "the other replica knows all", all)
	if late := open(t, conn, st); !all(late.Current()) {
		t.Error("one that starts later does not know all")
	}
	_, err = two.PutIssuer(ctx, i, true)
	must(t, err)
	until(t, one, "the issuer is gone", func(s *registry.Snapshot) bool { return !s.Names("acme", "https://idp") })
	// What was removed can be added again.
	_, err = one.PutIssuer(ctx, &identityv1.Issuer{Issuer: "https://idp", Audience: "berth", Tenant: "acme"}, false)
	must(t, err)
	until(t, two, "it is there again", func(s *registry.Snapshot) bool { return s.Names("acme", "https://idp") })
}

// TestASnapshotDoesNotChange: a request under way is judged by what it began with.
func TestASnapshotDoesNotChange(t *testing.T) {
	s := open(t, identityConn(t), static(t))
	before := s.Current()
	must(t, s.Suspend(bustest.Context(t), &identityv1.Suspension{Tenant: "fixed"}, registry.ByOperator, true))
	if before.Policy.Tenants["fixed"].Suspended || before == s.Current() {
		t.Error("the snapshot from before has changed")
	}
	if r, _ := before.Tenant("fixed"); r.GetSuspended() {
		t.Error("a record in the snapshot from before has changed")
	}
	if why, shut := s.Current().Shut(subjects.Frontend("fixed", "web")); !shut {
		t.Error("a frontend of a suspended tenant is let in", why)
	}
}

// TestChangesMeetOnARecord: who did not see the newest state changes nothing.
func TestChangesMeetOnARecord(t *testing.T) {
	conn := identityConn(t)
	one, two := open(t, conn, registry.Static{}), open(t, conn, registry.Static{})
	ctx := bustest.Context(t)
	first, err := one.PutTenant(ctx, &identityv1.Tenant{Tenant: "acme"})
	must(t, err)
	_, err = two.PutTenant(ctx, &identityv1.Tenant{Tenant: "acme", Plan: "large"})
	wants(t, "added twice", err, errkind.Exists)
	first.Plan = "small"
	second, err := two.PutTenant(ctx, first)
	must(t, err)
	_, err = one.PutTenant(ctx, first)
	wants(t, "changed by what was seen before", err, errkind.Conflict)
	until(t, one, "the second change", func(s *registry.Snapshot) bool {
		r, _ := s.Tenant("acme")
		return r.GetPlan() == "small" && r.GetRevision() == second.GetRevision()
	})
	_, err = one.PutTenant(ctx, &identityv1.Tenant{Tenant: "nobody", Revision: 3})
	wants(t, "changed what was never there", err, errkind.Conflict)
	if strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), "never been there") {
		t.Error(err)
	}
}

// TestRefusedChanges: each is one sentence of its kind, and changes nothing.
func TestRefusedChanges(t *testing.T) {
	s := open(t, identityConn(t), static(t))
	ctx := bustest.Context(t)
	_, err := s.PutTenant(ctx, &identityv1.Tenant{Tenant: "acme"})
	must(t, err)
	key := newKey(t)
	_, err = s.PutLogin(ctx, &identityv1.Login{Name: "fe-acme-web", Nkey: key}, false)
	must(t, err)
	_, err = s.PutIssuer(ctx, &identityv1.Issuer{Issuer: "https://idp", Audience: "a", Tenant: "acme"}, false)
	must(t, err)
	before := s.Current()
	tenant := func(r *identityv1.Tenant) error { _, err := s.PutTenant(ctx, r); return err }
	issuer := func(r *identityv1.Issuer) error { _, err := s.PutIssuer(ctx, r, false); return err }
	login := func(r *identityv1.Login) error { _, err := s.PutLogin(ctx, r, false); return err }
	suspend := func(r *identityv1.Suspension) error { return s.Suspend(ctx, r, registry.ByOperator, true) }
	for name, tc := range map[string]struct {
		err  error
		kind errkind.Kind
	}{
		"a configured tenant":           {tenant(&identityv1.Tenant{Tenant: "fixed"}), errkind.Refused},
		"suspended by the way":          {tenant(&identityv1.Tenant{Tenant: "acme", Suspended: true}), errkind.Invalid},
		"a configured issuer":           {issuer(&identityv1.Issuer{Issuer: "https://fixed", Audience: "a", Tenant: "fixed"}), errkind.Refused},
		"an unknown tenant":             {issuer(&identityv1.Issuer{Issuer: "https://idp2", Audience: "a", Tenant: "ghost"}), errkind.NotFound},
		"an issuer to another tenant":   {issuer(&identityv1.Issuer{Issuer: "https://idp", Audience: "a", Tenant: "fixed", Revision: 3}), errkind.Refused},
		"an issuer with two key sets":   {issuer(&identityv1.Issuer{Issuer: "https://idp", Audience: "b", Tenant: "acme", Algorithms: []string{"ES256"}}), errkind.Refused},
		"a configured login":            {login(&identityv1.Login{Name: "fe-fixed-web", Nkey: newKey(t)}), errkind.Refused},
		"a frontend of nobody":          {login(&identityv1.Login{Name: "fe-ghost-web", Nkey: newKey(t)}), errkind.NotFound},
		"one key for two":               {login(&identityv1.Login{Name: "fe-acme-cli", Nkey: key}), errkind.Refused},
		"suspend a ghost":               {suspend(&identityv1.Suspension{Tenant: "ghost"}), errkind.NotFound},
		"suspend a frontend of nobody":  {suspend(&identityv1.Suspension{Tenant: "acme", Frontend: "nope"}), errkind.NotFound},
		"suspend a user of no issuer":   {suspend(&identityv1.Suspension{Tenant: "acme", Issuer: "https://typo", Subject: "ann"}), errkind.NotFound},
		"suspend half a user":           {suspend(&identityv1.Suspension{Tenant: "acme", Subject: "ann"}), errkind.Invalid},
		"suspend a user and a frontend": {suspend(&identityv1.Suspension{Tenant: "acme", Issuer: "https://idp", Subject: "ann", Frontend: "web"}), errkind.Invalid},
		"suspend a user's connection":   {suspend(&identityv1.Suspension{Tenant: "acme", Frontend: "u-aaaaaaaaaaaaaaaaaaaaaaaaaa"}), errkind.Invalid},
	} {
		if !errs.Is(tc.err, tc.kind) || strings.Contains(tc.err.Error(), "\n") {
			t.Errorf("%s: %v, wanted %s", name, tc.err, tc.kind)
		}
	}
	if s.Current() != before {
		t.Error("something changed")
	}
}

// TestWhoLiftsASuspension: an administrator of a tenant does not undo what an operator did, nor does it
// become the administrator's by being set again.
func TestWhoLiftsASuspension(t *testing.T) {
	s := open(t, identityConn(t), static(t))
	ctx := bustest.Context(t)
	ann := &identityv1.Suspension{Tenant: "fixed", Issuer: "https://fixed", Subject: "ann", Reason: "fraud"}
	shut := func() bool {
		_, shut := s.Current().ShutUser(core.Principal{Tenant: "fixed", Issuer: "https://fixed", Subject: "ann"})
		return shut
	}
	must(t, s.Suspend(ctx, ann, registry.ByOperator, true))
	must(t, s.Suspend(ctx, ann, registry.ByAdministrator, true))
	wants(t, "an administrator lifts it", s.Suspend(ctx, ann, registry.ByAdministrator, false), errkind.Denied)
	if !shut() {
		t.Fatal("it was lifted")
	}
	must(t, s.Suspend(ctx, ann, registry.ByOperator, false))
	must(t, s.Suspend(ctx, ann, registry.ByOperator, false)) // twice is no error
	if shut() {
		t.Fatal("it was not lifted")
	}
	must(t, s.Suspend(ctx, ann, registry.ByAdministrator, true))
	must(t, s.Suspend(ctx, ann, registry.ByAdministrator, false))
	if shut() {
		t.Error("an administrator cannot lift its own")
	}
}

// TestALoginThatIsNoMore: the key of a removed, changed or suspended login lets nobody in.
func TestALoginThatIsNoMore(t *testing.T) {
	s := open(t, identityConn(t), static(t))
	ctx := bustest.Context(t)
	who, old, key := subjects.Frontend("fixed", "agents"), newKey(t), newKey(t)
	may := func(key string) bool { _, may := s.Current().May(who, key); return may }
	l, err := s.PutLogin(ctx, &identityv1.Login{Name: who.Name(), Nkey: old}, false)
	must(t, err)
	if !may(old) || may(key) {
		t.Error("the new login is not let in by its key alone")
	}
	l, err = s.PutLogin(ctx, &identityv1.Login{Name: who.Name(), Nkey: key, Revision: l.GetRevision()}, false)
	must(t, err)
	if may(old) || !may(key) {
		t.Error("after its key was changed the old one lets in")
	}
	if _, ok := s.Current().May(subjects.Frontend("fixed", "web"), key); ok {
		t.Error("a key lets in under another name")
	}
	must(t, s.Suspend(ctx, &identityv1.Suspension{Tenant: "fixed", Frontend: "agents"}, registry.ByOperator, true))
	if may(key) {
		t.Error("a suspended frontend is let in")
	}
	must(t, s.Suspend(ctx, &identityv1.Suspension{Tenant: "fixed", Frontend: "agents"}, registry.ByOperator, false))
	_, err = s.PutLogin(ctx, l, true)
	must(t, err)
	if may(key) {
		t.Error("a removed login is let in")
	}
}

// TestRecordsThatCannotBeRead: a damaged record is left out; a damaged suspension shuts its tenant out,
// because nobody knows whom it met.
func TestRecordsThatCannotBeRead(t *testing.T) {
	conn := identityConn(t)
	s := open(t, conn, static(t))
	ctx := bustest.Context(t)
	b, err := conn.OpenBucket(ctx, registry.BucketName)
	must(t, err)
	_, err = s.PutTenant(ctx, &identityv1.Tenant{Tenant: "acme"})
	must(t, err)
	for key, value := range map[string]string{
		"tenant.evil":  `{"tenant":"other"}`,  // under another's key
		"tenant.ghost": `not JSON`,            //
		"login.x":      `{"name":"operator"}`, //
		"strange.key":  `{}`,
		"tenant.later": `{"tenant":"later","invented_later":true}`,
	} {
		_, err := b.Put(ctx, key, []byte(value))
		must(t, err)
	}
	until(t, s, "a record of a later version is read", func(s *registry.Snapshot) bool { _, ok := s.Tenant("later"); return ok })
	for _, name := range []string{"evil", "ghost", "other"} {
		if l := s.Current().List(""); strings.Contains(l.String(), name) {
			t.Errorf("%s is there", name)
		}
	}
	_, err = b.Put(ctx, "suspended.acme.user.aaaa", []byte(`{"tenant":"acm`))
	must(t, err)
	until(t, s, "the tenant is shut out", func(s *registry.Snapshot) bool { return s.Policy.Tenants["acme"].Suspended })
	must(t, b.Delete(ctx, "suspended.acme.user.aaaa"))
	until(t, s, "it is let in again", func(s *registry.Snapshot) bool { return !s.Policy.Tenants["acme"].Suspended })
}
