package core

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/script"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

var epoch0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func testPolicy() Policy {
	return Policy{TTL: 15 * time.Minute, MaxAuth: 12 * time.Hour, Rotate: 24 * time.Hour, Ahead: time.Hour}
}

// TestDecisions runs testdata/*.txt: an event, a line of dashes, and what is
// decided; one state lives through a script. Run with -rewrite to accept what
// the code says now.
func TestDecisions(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		s := NewState(testPolicy())
		return func(line string) string { return step(t, &s, line) }
	})
}

type words map[string]string

func (w words) or(key, def string) string {
	if v, ok := w[key]; ok {
		return v
	}
	return def
}

func (w words) at(t *testing.T, key, def string) time.Time {
	t.Helper()
	d, err := time.ParseDuration(w.or(key, def))
	if err != nil {
		t.Fatal(err)
	}
	return epoch0.Add(d)
}

func (w words) session(t *testing.T) Session {
	t.Helper()
	g, err1 := ids.ParseGeneration(w.or("gen", "1-10"))
	e, err2 := ids.ParseEpoch(w.or("epoch", "1-12"))
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return Session{Generation{ids.Tenant(w.or("of", "acme")), "sone", g}, e}
}

func (w words) actor() Actor {
	return Actor{Tenant: ids.Tenant(w.or("tenant", "acme")), Frontend: ids.Frontend(w.or("frontend", "web")), Issuer: w.or("issuer", "https://idp"), Subject: w.or("subject", "alice")}
}

func (w words) verbs(t *testing.T) []grant.Verb {
	t.Helper()
	var asked []string
	if v := w["verbs"]; v != "" {
		asked = strings.Split(v, ",")
	}
	verbs, err := grant.ParseVerbs(asked)
	if err != nil {
		t.Fatal(err)
	}
	return verbs
}

func (w words) hosts() []string {
	v := w.or("hosts", "api.example.com")
	if v == "none" {
		return nil
	}
	return strings.Split(v, ",")
}

func step(t *testing.T, s *State, line string) string {
	fields := strings.Fields(line)
	w := words{}
	for _, f := range fields[1:] {
		k, v, _ := strings.Cut(f, "=")
		w[k] = v
	}
	now := w.at(t, "now", "0s")
	var ev Event
	switch fields[0] {
	case "tick":
		ev = Tick{}
	case "made":
		ev = KeyMade{SigningKey{ids.KeyID(w["key"]), w.at(t, "from", "0s")}}
	case "mint":
		ev = Mint{Session: w.session(t), Actor: w.actor(), Host: "h1", Confirm: grant.Confirm(make(ed25519.PublicKey, 32)), Verified: w.at(t, "verified", w.or("now", "0s")), ID: "g1",
			Verbs: w.verbs(t), Once: w["once"] == "yes", TTL: w.at(t, "ttl", "0s").Sub(epoch0)}
	case "end":
		ev = EndGrants{grant.Scope{Tenant: ids.Tenant(w["tenant"]), Issuer: w["issuer"], Subject: w["subject"], Frontend: ids.Frontend(w["frontend"])}, "suspended"}
	case "renew":
		on := w.session(t)
		old := claimsOf(Mint{Session: on, Actor: Actor{Tenant: on.Tenant, Frontend: "web", Issuer: "https://idp", Subject: "alice"}, Host: "h1", Verified: w.at(t, "auth", "0s"), ID: "g1",
			Verbs: w.verbs(t), Once: w["once"] == "yes"})
		old.IssuedAt = w.at(t, "iat", w.or("auth", "0s")).Unix()
		e := Renew{Old: old, Actor: w.actor(), ID: "g2"}
		if w["token"] == "none" {
			e.Actor.Issuer, e.Actor.Subject = "", ""
		} else {
			e.Verified = now
		}
		ev = e
	case "revoke":
		ev = Revoke{w.session(t).Generation, "deleted by the user"}
	case "datakey":
		r := w.session(t)
		asked := words{"gen": w.or("ask-gen", r.Generation.Generation.String()), "epoch": w.or("ask-epoch", r.Epoch.String())}.session(t)
		ev = DataKey{Host: ids.Host(w.or("host", "h1")), Session: asked,
			Record: Record{Found: w["record"] != "none", Session: r, Host: ids.Host(w.or("owner", "h1")), Awake: w["state"] != "asleep"}}
	case "reveal":
		r := w.session(t)
		asked := words{"gen": w.or("ask-gen", r.Generation.Generation.String()), "epoch": w.or("ask-epoch", r.Epoch.String())}.session(t)
		ev = Reveal{Host: ids.Host(w.or("host", "h1")), Session: asked, Name: w.or("name", "api-key"), Record: Record{Found: w["record"] != "none", Session: r,
			Host: ids.Host(w.or("owner", "h1")), Awake: w["state"] != "asleep", Ending: w["state"] == "sleeping"}}
	case "put":
		ev = PutSecret{Tenant: "acme", Name: w.or("name", "api-key"), Value: []byte(strings.ReplaceAll(w.or("value", "v-secret-v"), "~", "\n")), Hosts: w.hosts()}
	case "remove":
		ev = RemoveSecret{"acme", w.or("name", "api-key")}
	default:
		t.Fatalf("unknown step %q", line)
	}
	next, cmds, err := Decide(*s, ev, now)
	*s = next
	return render(cmds, err, now)
}

func scopeText(s grant.Scope) string {
	return fmt.Sprintf("tenant=%s issuer=%s subject=%s frontend=%s", s.Tenant, s.Issuer, s.Subject, s.Frontend)
}

func render(cmds []Command, err error, now time.Time) string {
	var b strings.Builder
	for _, c := range cmds {
		switch c := c.(type) {
		case MakeKey:
			fmt.Fprintf(&b, "make key %s from=%s\n", c.Key.ID, since(c.Key.From))
		case Sign:
			fmt.Fprintf(&b, "sign with %s: %s for %s gen=%s epoch=%s host=%s auth=%s exp=%s\n", c.Key, c.Claims.ID, c.Claims.Principal.Subject,
				c.Claims.Generation, c.Claims.Epoch, c.Claims.Host, since(time.Unix(c.Claims.AuthTime, 0)), since(c.Claims.ExpiresAt()))
			if c.Claims.Once || !slices.Equal(c.Claims.Verbs, grant.DefaultVerbs()) {
				fmt.Fprintf(&b, "  verbs=%v once=%v\n", c.Claims.Verbs, c.Claims.Once)
			}
			if at := time.Unix(c.Claims.IssuedAt, 0); at.After(now) {
				fmt.Fprintf(&b, "  iat=%s\n", since(at))
			}
		case StoreEnding:
			fmt.Fprintf(&b, "store ending of %s at=%s until=%s\n", scopeText(c.Ending.Scope), since(c.Ending.At), since(c.Ending.Until))
		case DropEnding:
			fmt.Fprintf(&b, "drop ending of %s\n", scopeText(c.Scope))
		case EndGeneration:
			fmt.Fprintf(&b, "end gen=%s, on the list until=%s\n", c.Generation.Generation, since(c.Until))
		case Audit:
			fmt.Fprintf(&b, "audit %s %s grant=%s %s\n", c.What, c.Actor.Subject, c.GrantID, c.Reason)
		default:
			fmt.Fprintf(&b, "%s %+v\n", strings.TrimPrefix(fmt.Sprintf("%T", c), "core."), c)
		}
	}
	var r *Refusal
	if errors.As(err, &r) {
		fmt.Fprintf(&b, "%s: %s\n", r.Kind, r.Reason)
	} else if err != nil {
		fmt.Fprintf(&b, "error: %v\n", err)
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

func since(at time.Time) string { return "+" + at.Sub(epoch0).String() }

// FuzzHost holds that what is taken as canonical is no address and has one spelling.
func FuzzHost(f *testing.F) {
	for _, s := range []string{"api.example.com", "EXAMPLE.com", "1.2.3.4", "a.0x7f", "a.127", "::1", "xn--bcher-kva.example", "a..b", "-a.b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if !canonicalHost(s) {
			return
		}
		if _, err := netip.ParseAddr(s); err == nil || s != strings.ToLower(s) || strings.HasSuffix(s, ".") || strings.ContainsAny(s, "*:/@%[] \x00") {
			t.Errorf("%q is taken", s)
		}
	})
}
