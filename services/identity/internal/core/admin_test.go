package core

import (
	"fmt"
	"strings"
	"testing"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// groupsOf stands for the claims of a token: one list of groups.
type groupsOf []string

func (groupsOf) Claim(string) (string, bool) { return "", false }
func (g groupsOf) Has(name string) bool      { return name == "groups" }
func (g groupsOf) List(name string) []string {
	if name != "groups" {
		return nil
	}
	return g
}

// claims are those that the words give a token.
func (w words) claims() Claims {
	if w["groups"] == "" {
		return nil
	}
	return groupsOf(strings.Split(w["groups"], ","))
}

func spaced(s string) string { return strings.ReplaceAll(s, "_", " ") }

func (w words) generation(key, def string) *corev1.Stamp {
	g, err := ids.ParseGeneration(w.or(key, def))
	if err != nil {
		return nil
	}
	return &corev1.Stamp{Incarnation: g.Incarnation, Index: g.Index}
}

// about fills in the body of a verb that is about somebody.
func (w words) about(verb string, a *Asked) {
	list := func(s string) []string {
		if s == "" {
			return nil
		}
		return strings.Split(s, ",")
	}
	attach := &identityv1.AdminAttachRequest{Reason: spaced(w.or("reason", "a_ticket")), Issuer: w.or("of-iss", "https://idp"), Subject: w.or("of", "bob"),
		Generation: w.generation("generation", "1-10"), Verbs: list(w["verbs"]), Handle: w["handle"], Tenant: w["of-tenant"], Session: w["session"]}
	switch verb {
	case Frontends:
		a.Body.Frontends = &identityv1.FrontendsRequest{}
	case RevokeFrontend:
		a.Body.RevokeFrontend = &identityv1.RevokeFrontendRequest{Frontend: w.or("name", "mobile"), Allow: w["allow"] == "yes"}
	case AdminSessions:
		a.Body.AdminSessions = &identityv1.AdminSessionsRequest{After: w["after"], Issuer: w["of-iss"], Subject: w["of"]}
	case AdminAttach:
		attach.Handle = w.or("handle", "hxyz")
		a.Body.AdminAttach = attach
	case OperatorAttach:
		a.Door, a.Tenant, a.Frontend, a.Envelope.Token = w.or("door", Console), ids.Tenant(w.or("of-tenant", "acme")), RoleOperator, ""
		attach.Tenant, attach.Session = w.or("of-tenant", "acme"), w.or("session", "s"+strings.Repeat("a", 52))
		a.Body.AdminAttach = attach
	case AdminSuspend:
		a.Body.AdminSuspend = &identityv1.AdminSuspendRequest{Issuer: w.or("of-iss", "https://idp"), Subject: w.or("of", "bob"),
			Suspended: w["lift"] == "", Reason: spaced(w.or("reason", "a_ticket"))}
	}
}

// found is what scheduler has.
func (w words) found() Event {
	if w["there"] == "nothing" {
		return Found{}
	}
	return Found{HostKey: w.or("host-key", "XHOST"), Record: &schedulerv1.SessionRecord{Host: "h1",
		Session: &corev1.SessionRef{Tenant: w.or("there-tenant", "acme"), Session: "sbob", Generation: w.generation("there", "1-10"), Epoch: &corev1.Stamp{Incarnation: 1, Index: 12}},
		Actor:   &corev1.Actor{Tenant: w.or("there-tenant", "acme"), Issuer: w.or("there-iss", "https://idp"), Subject: w.or("there-of", "bob"), Frontend: "web"},
		State:   corev1.State(corev1.State_value["STATE_"+strings.ToUpper(w.or("state", "active"))])}}
}

func actorWords(a *corev1.Actor) string {
	return fmt.Sprintf("%s/%s/%s%s%s", a.GetTenant(), a.GetSubject(), a.GetFrontend(), prefixed(" acting=", a.GetActing()), prefixed(" role=", a.GetRole()))
}

func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}

// recordWords are what a record says beyond the usual.
func recordWords(r *identityv1.Audit) string {
	out := prefixed(" acting=", r.GetActor().GetActing()) + prefixed(" role=", r.GetActor().GetRole()) + prefixed(" about=", r.GetAbout().GetSubject())
	return out + prefixed(" because: ", r.GetReason())
}

func aboutWords(c Command) string {
	switch c := c.(type) {
	case CallFrontends:
		return fmt.Sprintf("list frontends of %s\n", actorWords(c.Actor))
	case CallRevokeFrontend:
		return fmt.Sprintf("settle frontend %s of %s allow=%v\n", c.Frontend, actorWords(c.Actor), c.Allow)
	case ListSessions:
		return fmt.Sprintf("list the sessions of tenant %s%s\n", c.Tenant, prefixed(" of ", c.Ask.GetSubject()))
	case FindSession:
		return fmt.Sprintf("find the session of %s in %s by %s\n", c.Ask.GetSubject(), c.Tenant, c.Ask.GetHandle()+c.Ask.GetSession())
	case CallSuspend:
		return fmt.Sprintf("suspend=%v %s of %s by %s because: %s\n", c.Suspended, c.What.GetSubject(), c.What.GetTenant(), c.What.GetBy(), c.What.GetReason())
	case TellAttached:
		e := c.Event
		return fmt.Sprintf("tell attached to %s by %s verbs=%v for %s because: %s\n", e.GetSession().GetSession(), actorWords(e.GetBy()), e.GetVerbs(),
			e.GetUntil().AsTime().Sub(e.GetAt().AsTime()), e.GetReason())
	case MintAttach:
		return fmt.Sprintf("mint once for %s at epoch %d as %s verbs=%v\n", c.Record.GetSession().GetSession(), c.Record.GetSession().GetEpoch().GetIndex(), actorWords(c.Actor), c.Verbs)
	}
	return ""
}

// TestAnAdministratorNeverBecomesTheUser: whatever an administrator's token
// asks for, the keys that are derived are those of the administrator's own
// sessions, and a grant for another's session comes only by admin_attach, once
// the user's side was told.
func TestAnAdministratorNeverBecomesTheUser(t *testing.T) {
	verbs := []string{Open, Close, Delete, Renew, Status, Frontends, RevokeFrontend, AdminSessions, AdminAttach, AdminSuspend, OperatorAttach}
	rapid.Check(t, func(rt *rapid.T) {
		verb := rapid.SampledFrom(verbs).Draw(rt, "verb")
		victim := rapid.SampledFrom([]string{"bob", "alice ", "Alice", "аlice", "alice\x00"}).Draw(rt, "victim")
		name := rapid.SampledFrom([]string{"", "default", "work", "bob"}).Draw(rt, "name")
		w := words{"groups": "staff,admins", "of": victim, "name": name, "door": rapid.SampledFrom([]string{Direct, Durable}).Draw(rt, "door"),
			"verbs": rapid.SampledFrom([]string{"", "read", "exec", "exec,files"}).Draw(rt, "verbs")}
		w["there-of"] = rapid.SampledFrom([]string{victim, "alice", "carol"}).Draw(rt, "whose it is")
		if rapid.Bool().Draw(rt, "names a key") {
			w["key"] = string(ids.DeriveSessionKey([]byte("new"), "https://idp", "acme", victim, "default"))
		}
		own := map[string]bool{}
		for _, k := range []string{"new", "old"} {
			for _, n := range []ids.SessionName{"default", "work", "bob"} {
				own[string(ids.DeriveSessionKey([]byte(k), "https://idp", "acme", "alice", n))] = true
			}
		}
		s := State{Policy: testPolicy()}
		told := false
		var last error
		for _, ev := range []Event{w.asked(t, verb), TokenGood{Token: w.token(t)}, w.found()} {
			var cmds []Command
			if s, cmds, last = Decide(s, ev, epoch0); last != nil {
				return
			}
			if actor := s.Verified.GetActor(); actor != nil && actor.GetSubject() != "alice" {
				rt.Fatalf("the actor became %s", actor.GetSubject())
			}
			for _, k := range s.Verified.GetKeys() {
				if !own[k] {
					rt.Fatalf("%s derived a key that is not the administrator's own", verb)
				}
			}
			for _, c := range cmds {
				switch c := c.(type) {
				case Mint:
					rt.Fatalf("%s minted a renewable grant", verb)
				case TellAttached:
					told = true
				case MintAttach:
					if !told || verb != AdminAttach || c.Record.GetActor().GetSubject() != victim || c.Actor.GetSubject() != "alice" || c.Actor.GetRole() != RoleAdministrator {
						rt.Fatalf("%s minted for %s as %s, told=%v", verb, c.Record.GetActor().GetSubject(), c.Actor.GetSubject(), told)
					}
				case CallLifecycle:
					if administrative(verb) {
						rt.Fatalf("%s reached lifecycle", verb)
					}
				}
			}
		}
	})
}

// TestAttachingNeedsExactlyWhatWasNamed: of all that differs from what the
// administrator expected, each alone is enough that nothing is minted.
func TestAttachingNeedsExactlyWhatWasNamed(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		wrong := rapid.SampledFrom([]string{"nothing", "tenant", "issuer", "subject", "generation", "incarnation", "state", "host", "epoch", "key"}).Draw(rt, "what differs")
		w := words{"groups": "admins"}
		s := State{Policy: testPolicy()}
		for _, ev := range []Event{w.asked(t, AdminAttach), TokenGood{Token: w.token(t)}} {
			var err error
			if s, _, err = Decide(s, ev, epoch0); err != nil {
				rt.Fatal(err)
			}
		}
		f := w.found().(Found)
		switch wrong {
		case "tenant":
			f.Record.Session.Tenant = "globex"
		case "issuer":
			f.Record.Actor.Issuer = "https://idp/"
		case "subject":
			f.Record.Actor.Subject = "bob "
		case "generation":
			f.Record.Session.Generation.Index += rapid.SampledFrom([]uint64{1, ^uint64(0)}).Draw(rt, "by")
		case "incarnation":
			f.Record.Session.Generation.Incarnation++
		case "state":
			f.Record.State = corev1.State(rapid.SampledFrom([]int32{0, 1, 2, 4, 5, 6, 7, 8, 9}).Draw(rt, "state"))
		case "host":
			f.Record.Host = ""
		case "epoch":
			f.Record.Session.Epoch = nil
		case "key":
			f.HostKey = ""
		}
		_, cmds, err := Decide(s, f, epoch0)
		for _, c := range cmds {
			if _, minted := c.(MintAttach); minted != (wrong == "nothing") && minted {
				rt.Fatalf("minted although the %s differed", wrong)
			}
		}
		if (err == nil) != (wrong == "nothing") {
			rt.Fatalf("%s differed: %v", wrong, err)
		}
	})
}

// TestAnExchangedTokenIsGoodForItsOwnFrontendOnly: the act claim must name
// exactly the party that the registry has for the login that carries it.
func TestAnExchangedTokenIsGoodForItsOwnFrontendOnly(t *testing.T) {
	parties := []string{"", "agent", "agent-2", "Agent", "agent ", "alice"}
	rapid.Check(t, func(rt *rapid.T) {
		registered, acting := rapid.SampledFrom(parties).Draw(rt, "registered"), rapid.SampledFrom(parties).Draw(rt, "act")
		frontend := rapid.SampledFrom([]string{"agent", "web", "u-aaaaaaaaaaaaaaaaaaaaaaaaaa"}).Draw(rt, "frontend")
		p := testPolicy()
		p.Frontends = map[FrontendID]LoginRules{{"acme", "agent"}: {Acting: registered}, {"globex", "web"}: {Acting: acting}}
		w := words{"act": acting, "frontend": frontend}
		s, _, err := Decide(State{Policy: p}, w.asked(t, Open), epoch0)
		if err != nil {
			rt.Fatal(err)
		}
		s, _, err = Decide(s, TokenGood{Token: w.token(t)}, epoch0)
		want := acting == "" && !strings.HasPrefix(frontend, "u-") || acting != "" && frontend == "agent" && acting == registered
		if (err == nil) != want {
			rt.Fatalf("registered %q, act %q, by %s: %v", registered, acting, frontend, err)
		}
		if err == nil && s.Verified.GetActor().GetActing() != acting {
			rt.Fatalf("the actor says that %q acts", s.Verified.GetActor().GetActing())
		}
		if r, ok := err.(*Refusal); err != nil && (!ok || r.Kind != errkind.Denied) {
			rt.Fatal(err)
		}
	})
}

// TestAnAdministratorCannotFillTheRegistryWithUsersWhoNeverCame: how many are shut out is bounded for each
// tenant, and what is there can be changed and lifted all the same.
func TestAnAdministratorCannotFillTheRegistryWithUsersWhoNeverCame(t *testing.T) {
	p := testPolicy()
	for n := range maxShutOut - 1 { // carol is one
		p.Users[Principal{"acme", "https://idp", fmt.Sprintf("nobody-%d", n)}] = UserRules{By: RoleAdministrator}
		p.Users[Principal{"globex", "https://idp", fmt.Sprintf("nobody-%d", n)}] = UserRules{By: RoleAdministrator}
		p.Users[Principal{"acme", "https://idp", fmt.Sprintf("by-operator-%d", n)}] = UserRules{By: RoleOperator}
	}
	suspend := func(w words) error {
		w["groups"] = "admins"
		s, _, err := Decide(State{Policy: p}, w.asked(t, AdminSuspend), epoch0)
		if err == nil {
			_, _, err = Decide(s, TokenGood{Token: w.token(t)}, epoch0)
		}
		return err
	}
	if err := suspend(words{"of": "one-more"}); err == nil || !strings.Contains(err.Error(), "more are not allowed") {
		t.Errorf("one more: %v", err)
	}
	for name, w := range map[string]words{"one that is there": {"of": "carol"}, "letting in": {"of": "carol", "lift": "yes"}, "another tenant": {"of": "x", "tenant": "globex", "aud": "globex-aud"}} {
		if err := suspend(w); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	delete(p.Users, Principal{"acme", "https://idp", "nobody-0"})
	if err := suspend(words{"of": "one-more"}); err != nil {
		t.Errorf("when one was let in: %v", err)
	}
}
