package core

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/script"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/schemas/ids"
)

var epoch0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func testPolicy() Policy {
	return Policy{
		Entries: []Entry{
			{Issuer: "https://idp", Audience: "acme-aud", Tenant: "acme", Plan: "free", Floor: corev1.Tier_TIER_GVISOR,
				GroupsClaim: "groups", AdminGroups: []string{"admins"}},
			{Issuer: "https://idp", Audience: "globex-aud", Tenant: "globex", Plan: "pro", GroupsClaim: "groups", AdminGroups: []string{"admins"}},
			{Issuer: "https://other", Audience: "acme-aud", Tenant: "acme", Plan: "pro", Frontends: []ids.Frontend{"web"}},
		},
		SessionKeys: [][]byte{[]byte("new"), []byte("old")},
		Tenants:     map[ids.Tenant]TenantRules{"acme": {AdminAttach: true}},
		Frontends:   map[FrontendID]LoginRules{{"acme", "agent"}: {Acting: "agent-7"}},
		Users:       map[Principal]UserRules{{"acme", "https://idp", "mallory"}: {By: RoleOperator, Why: "fraud"}, {"acme", "https://idp", "carol"}: {By: RoleAdministrator}},
	}
}

// TestDecisions runs testdata/*.txt: a request and its token in words, a line
// of dashes, and what is decided step by step. Run with -rewrite to accept
// what the code says now.
func TestDecisions(t *testing.T) {
	script.Run(t, func(t *testing.T) func(string) string {
		return func(line string) string { return request(t, line) }
	})
}

type words map[string]string

func (w words) or(key, def string) string {
	if v, ok := w[key]; ok {
		return v
	}
	return def
}

func (w words) num(key string, def int) int {
	n, err := strconv.Atoi(w.or(key, strconv.Itoa(def)))
	if err != nil {
		return def
	}
	return n
}

func (w words) at(t *testing.T, key, def string) time.Time {
	t.Helper()
	text := w.or(key, def)
	if text == "none" {
		return time.Time{}
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return epoch0.Add(d)
}

// request plays one request: the envelope, then the token, then the outcome.
func request(t *testing.T, line string) string {
	fields := strings.Fields(line)
	w := words{}
	for _, f := range fields[1:] {
		k, v, _ := strings.Cut(f, "=")
		w[k] = v
	}
	now := w.at(t, "now", "0s")
	s, out := play(t, State{Policy: testPolicy()}, w.asked(t, fields[0]), now)
	if fields[0] == OperatorAttach && s.Verified != nil {
		_, more := play(t, s, w.found(), now)
		return out + more
	}
	if !strings.Contains(out, "VerifyToken") {
		return out
	}
	var ev Event = TokenGood{Token: w.token(t), Revoked: w["revoked"] == "yes"}
	if w["token"] == "forged" {
		ev = TokenBad{2, "the token's signature is wrong"}
	}
	s, more := play(t, s, ev, now)
	out += more
	if fields[0] == Open && s.Verified != nil {
		ref := &corev1.SessionRef{Tenant: w.or("opened-tenant", "acme"), Session: w.or("opened", s.Verified.GetKeys()[0]),
			Generation: &corev1.Stamp{Incarnation: 1, Index: 10}, Epoch: &corev1.Stamp{Incarnation: 1, Index: uint64(w.num("opened-epoch", 12))}}
		_, more = play(t, s, Awake{Session: ref, State: corev1.State(corev1.State_value["STATE_"+strings.ToUpper(w.or("state", "active"))]),
			Revoked: w["revoked"] == "meanwhile"}, now)
		out += more
	}
	if strings.Contains(out, "find the session") {
		_, more = play(t, s, w.found(), now)
		out += more
	}
	return out
}

func (w words) asked(t *testing.T, verb string) Asked {
	body := bytes.Repeat([]byte("b"), w.num("body", 4))
	sum := sha256.Sum256(body)
	if w["hash"] == "wrong" {
		sum[0] ^= 1
	}
	env := &identityv1.Envelope{
		Token: w.or("token", "good"), RequestId: w.or("id", "r1"), Verb: w.or("envelope-verb", verb), BodyHash: sum[:],
		Time: timestamppb.New(w.at(t, "time", "0s")), ReplyKey: "X", ProofKey: make([]byte, w.num("proof", 32)), Body: body,
	}
	if w["time"] == "none" {
		env.Time = nil
	}
	if env.Token == "none" {
		env.Token = ""
	}
	if n := w.num("token-bytes", 0); n > 0 {
		env.Token = strings.Repeat("t", n)
	}
	a := Asked{Door: w.or("door", Direct), Tenant: ids.Tenant(w.or("tenant", "acme")), Frontend: ids.Frontend(w.or("frontend", "web")),
		Verb: verb, StoredAt: w.at(t, "stored", "0s"), Envelope: env}
	name := w["name"]
	switch verb {
	case Open:
		a.Body.Open = &identityv1.OpenRequest{SessionName: name, Template: w["template"], SessionKey: w["key"], Plan: w["plan"],
			BudgetReservation: w["budget"], Persistence: corev1.Persistence(w.num("persistence", 0)), MinTier: corev1.Tier(w.num("tier", 0))}
		if w["wait"] != "" {
			a.Body.Open.Wait = durationpb.New(w.at(t, "wait", "").Sub(epoch0))
		}
		if k := w["key"]; k == "old" || k == "new" || k == "foreign" {
			a.Body.Open.SessionKey = string(ids.DeriveSessionKey([]byte(k), "https://idp", "acme", "alice", "default"))
		}
	case Close:
		a.Body.Close = &identityv1.CloseRequest{SessionName: name}
	case Delete:
		a.Body.Delete = &identityv1.DeleteRequest{SessionName: name}
	case Renew:
		a.Body.Renew = &identityv1.RenewRequest{SessionName: name, Grant: w.or("grant", "g"), Proof: make([]byte, w.num("signature", 64))}
	case Status:
		a.Body.Status = &identityv1.StatusRequest{SessionName: name}
	default:
		w.about(verb, &a)
	}
	return a
}

func (w words) token(t *testing.T) Token {
	return Token{Issuer: w.or("iss", "https://idp"), Subject: w.or("sub", "alice"), Audience: strings.Split(w.or("aud", "acme-aud"), ","),
		Acting: w["act"], Claims: w.claims(), Expires: w.at(t, "exp", "1h"), NotBefore: w.at(t, "nbf", "none"), IssuedAt: w.at(t, "iat", "none")}
}

func play(t *testing.T, s State, ev Event, now time.Time) (State, string) {
	t.Helper()
	s, cmds, err := Decide(s, ev, now)
	var b strings.Builder
	for _, c := range cmds {
		switch c := c.(type) {
		case CallLifecycle:
			v := s.Verified
			fmt.Fprintf(&b, "call lifecycle.%s for %s of %s name=%s plan=%s floor=%s keys=%.6s,%.6s hash=%.4x\n", s.Asked.Verb, v.GetActor().GetSubject(),
				v.GetActor().GetTenant(), v.GetSessionName(), v.GetPlan(), v.GetTenantFloor(), v.GetKeys()[0], v.GetKeys()[1], v.GetBodyHash())
		case CallRenew:
			fmt.Fprintf(&b, "call credentials.renew for %q of %s fresh=%v\n", c.Actor.GetSubject(), c.Actor.GetTenant(), !c.Verified.IsZero())
		case CallList:
			fmt.Fprintf(&b, "list sessions of %s of %s\n", c.Actor.GetSubject(), c.Actor.GetTenant())
		case Mint:
			fmt.Fprintf(&b, "mint for epoch %d\n", c.Session.GetEpoch().GetIndex())
		case Audit:
			fmt.Fprintf(&b, "audit %s %s admitted=%v subject=%s session=%.6s %s%s\n", c.Record.GetVerb(), c.Record.GetRequestId(), c.Record.GetAdmitted(),
				c.Record.GetActor().GetSubject(), c.Record.GetSession(), c.Record.GetFailure().GetKind(), recordWords(c.Record))
		case CallFrontends, CallRevokeFrontend, ListSessions, FindSession, CallSuspend, TellAttached, MintAttach:
			b.WriteString(aboutWords(c))
		default:
			fmt.Fprintf(&b, "%s\n", strings.TrimPrefix(fmt.Sprintf("%T", c), "core."))
		}
	}
	var r *Refusal
	if errors.As(err, &r) {
		fmt.Fprintf(&b, "%s: %s\n", r.Kind, r.Reason)
	} else if err != nil {
		t.Fatalf("not a refusal: %v", err)
	}
	return s, b.String()
}

func TestBodyHashSeparatesVerbAndBody(t *testing.T) {
	seen := map[string]string{}
	for _, c := range [][2]string{{"open", ""}, {"open", "x"}, {"close", ""}, {"ope", "nx"}, {"", "openx"}} {
		h := string(BodyHash(c[0], []byte(c[1])))
		if other, twice := seen[h]; twice {
			t.Errorf("%v and %s have one hash", c, other)
		}
		seen[h] = fmt.Sprint(c)
	}
}
