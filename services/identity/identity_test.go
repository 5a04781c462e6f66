package identity_test

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/identity"
)

func opened(t *testing.T, r *identityv1.Reply) *identityv1.OpenReply {
	t.Helper()
	if r.GetOpen() == nil {
		t.Fatalf("not opened: %v", r)
	}
	return r.GetOpen()
}

func TestOpenByBothDoorsAndInBothForms(t *testing.T) {
	w := newWorld(t)
	for _, asJSON := range []bool{false, true} {
		for _, door := range []string{"direct", "durable"} {
			r := w.request(t, "open", &identityv1.OpenRequest{SessionName: "work"})
			if r.asJSON = asJSON; asJSON {
				r.env.ContentType = bus.JSON
				r.body([]byte(`{"session_name":"work"}`))
			}
			var data []byte
			if door == "direct" {
				data = w.directRaw(t, w.front, "open", r.encode(t, w), r.contentType())
			} else {
				data = w.durable(t, w.front, "open", r.encode(t, w), r.contentType())
			}
			if bytes.Contains(data, []byte("grant-")) {
				t.Error("the grant is on the bus in the clear")
			}
			o := opened(t, r.open(t, data))
			w.mu.Lock()
			mint := w.minted[o.GetGrant()]
			w.mu.Unlock()
			if mint == nil || !bytes.Equal(mint.GetProofKey(), r.env.GetProofKey()) || mint.GetActor().GetFrontend() != "web" {
				t.Errorf("%s: the grant was minted for %v", door, mint)
			}
			want := "berth.v1.box." + o.GetSession().GetSession() + ".1-12"
			if o.GetEndpoint().GetSubject() != want || o.GetEndpoint().GetHost() != "h1" || o.GetPlace().GetTier() != "gvisor" || o.GetPlace().GetNetwork() != "named" || o.GetPlace().GetSessionName() != "work" {
				t.Errorf("%s: %v", door, o)
			}
			names := ""
			for _, s := range o.GetTiming().GetSteps() {
				names += s.GetName() + " "
			}
			if names != "identity.unseal identity.verify identity.lifecycle scheduler.apply identity.mint " {
				t.Errorf("%s: steps %s", door, names)
			}
		}
	}
}

func TestHandedOnAsVerified(t *testing.T) {
	w := newWorld(t)
	r := w.request(t, "open", &identityv1.OpenRequest{Wait: durationpb.New(time.Second)})
	opened(t, w.direct(t, w.front, r))
	calls := w.seen()
	v := calls[0].(*lifecyclev1.OpenRequest).GetVerified()
	if v.GetActor().GetSubject() != "alice" || v.GetActor().GetTenant() != "acme" || v.GetPlan() != "default" || v.GetTenantFloor() != corev1.Tier_TIER_GVISOR ||
		v.GetRequestId() != r.env.GetRequestId() || len(v.GetBodyHash()) != 32 || v.GetSessionName() != "default" || len(v.GetKeys()) != 1 {
		t.Errorf("%v", v)
	}
	// Another body under the same request id has another hash; so has another verb.
	again := w.request(t, "open", &identityv1.OpenRequest{Template: "python"})
	again.env.RequestId = r.env.GetRequestId()
	opened(t, w.direct(t, w.front, again))
	if h := w.seen()[0].(*lifecyclev1.OpenRequest).GetVerified().GetBodyHash(); bytes.Equal(h, v.GetBodyHash()) {
		t.Error("two bodies have one hash")
	}
}

func TestCloseDeleteStatusRenew(t *testing.T) {
	w := newWorld(t)
	if c := w.direct(t, w.front, w.request(t, "close", &identityv1.CloseRequest{})).GetClose(); c.GetState() != corev1.State_STATE_ASLEEP {
		t.Error(c)
	}
	r := w.request(t, "delete", &identityv1.DeleteRequest{})
	if d := r.open(t, w.durable(t, w.front, "delete", r.encode(t, w), bus.Protobuf)).GetDelete(); d.GetState() != corev1.State_STATE_DELETED {
		t.Error(d)
	}
	st := w.direct(t, w.front, w.request(t, "status", &identityv1.StatusRequest{})).GetStatus()
	if len(st.GetSessions()) != 2 || st.GetSessions()[1].GetSessionName() != "work" {
		t.Errorf("status lists %v; two are the user's own", st)
	}
	w.seen()
	for _, token := range []string{w.token(t, "acme", "alice", time.Now()), "", w.token(t, "acme", "alice", time.Now().Add(-2*time.Hour))} {
		r := w.request(t, "renew", &identityv1.RenewRequest{})
		r.env.Token = token
		raw, err := proto.Marshal(&identityv1.RenewRequest{Grant: "g", Proof: grant.Renewal{RequestID: r.env.GetRequestId(), Grant: "g", Time: r.env.GetTime().AsTime()}.Sign(r.proof)})
		must(t, err)
		r.body(raw)
		if got := w.direct(t, w.front, r).GetRenew().GetGrant(); got != "renewed" {
			t.Error(got)
		}
	}
	for i, m := range w.seen() {
		s := m.(*credentialsv1.RenewSecret)
		if fresh := s.GetTokenVerifiedAt() != nil; fresh != (i == 0) || (s.GetActor().GetSubject() == "alice") != fresh || s.GetActor().GetFrontend() != "web" {
			t.Errorf("renewal %d: %v", i, s)
		}
	}
}

// TestBadInput: each is answered with one sentence, recorded, and changes nothing.
func TestBadInput(t *testing.T) {
	w := newWorld(t)
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 1999, protowire.VarintType), 1)
	for name, tc := range map[string]struct {
		change func(*request)
		want   errkind.Kind
	}{
		"unknown field in the body": {func(r *request) { r.body(unknown) }, errkind.Invalid},
		"unknown field in JSON": {func(r *request) {
			r.env.ContentType = bus.JSON
			r.body([]byte(`{"admin":true}`))
		}, errkind.Invalid},
		"unknown field in the envelope": {func(r *request) { raw, _ := proto.Marshal(r.env); r.plain = append(raw, unknown...) }, errkind.Invalid},
		"unknown field in the request": {func(r *request) {
			r.mangled = func(q *identityv1.SealedRequest) { q.ProtoReflect().SetUnknown(unknown) }
		}, errkind.Invalid},
		"wrong tenant":                {func(r *request) { r.env.Token = w.token(t, "globex", "alice", time.Now()) }, errkind.Denied},
		"expired token":               {func(r *request) { r.env.Token = w.token(t, "acme", "alice", time.Now().Add(-2*time.Hour)) }, errkind.Unauthenticated},
		"foreign token":               {func(r *request) { r.env.Token = "eyJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJodHRwczovL2V2aWwifQ.c2ln" }, errkind.Unauthenticated},
		"no token":                    {func(r *request) { r.env.Token = "" }, errkind.Unauthenticated},
		"oversized body":              {func(r *request) { r.body(make([]byte, 16<<10+1)) }, errkind.TooLarge},
		"absurd name":                 {func(r *request) { r.body([]byte("\x0a\x09../../etc")) }, errkind.Invalid},
		"absurd request id":           {func(r *request) { r.env.RequestId = "a b\n*" }, errkind.Invalid},
		"body hash mismatch":          {func(r *request) { r.env.BodyHash = bytes.Repeat([]byte{1}, 32) }, errkind.Invalid},
		"verb of another subject":     {func(r *request) { r.env.Verb = "delete" }, errkind.Invalid},
		"too old":                     {func(r *request) { r.env.Time = timestamppb.New(time.Now().Add(-3 * time.Minute)) }, errkind.Expired},
		"from the future":             {func(r *request) { r.env.Time = timestamppb.New(time.Now().Add(time.Hour)) }, errkind.Invalid},
		"no reply key":                {func(r *request) { r.env.ReplyKey = "X" }, errkind.Invalid},
		"session key of another user": {func(r *request) { r.body(append([]byte("\x3a\x35"), "s"+strings.Repeat("a", 52)...)) }, errkind.Denied},
		"sealed to somebody else": {func(r *request) {
			r.mangled = func(q *identityv1.SealedRequest) { q.Sealed[100] ^= 1 }
		}, errkind.Invalid},
		"nothing sealed":       {func(r *request) { r.mangled = func(q *identityv1.SealedRequest) { q.Sealed = nil } }, errkind.Invalid},
		"unknown content type": {func(r *request) { r.env.ContentType = "text/plain" }, errkind.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			for _, door := range []string{"direct", "durable"} {
				r := w.request(t, "open", &identityv1.OpenRequest{})
				tc.change(r)
				var data []byte
				if door == "direct" {
					data = w.directRaw(t, w.front, "open", r.encode(t, w), bus.Protobuf)
				} else {
					data = w.durable(t, w.front, "open", r.encode(t, w), bus.Protobuf)
				}
				f := r.open(t, data).GetFailure()
				if f.GetKind() != tc.want.String() || f.GetReason() == "" || strings.Contains(f.GetReason(), "\n") || strings.Contains(f.GetReason(), r.env.GetToken()+"!") {
					t.Errorf("%s door: %v, want %v", door, f, tc.want)
				}
			}
			if calls := w.seen(); len(calls) != 0 {
				t.Errorf("it reached %T", calls[0])
			}
		})
	}
	dead, err := w.operator.ListDead(t.Context(), "identity", 10)
	if err != nil || len(dead) != 0 {
		t.Errorf("%d refused requests went to BERTH_DEAD, %v", len(dead), err)
	}
}

// TestUnknownVerb: bus permissions do not let one in, by either door; the
// core refuses it as well (testdata/refuse.txt).
func TestUnknownVerb(t *testing.T) {
	w := newWorld(t)
	body := w.request(t, "explode", &identityv1.OpenRequest{}).encode(t, w)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := w.front.JetStream().Publish(ctx, "berth.v1.request.acme.web.explode", body); err == nil {
		t.Error("an unknown verb was stored")
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := w.front.CallRaw(ctx, "berth.v1.rpc.identity.explode.acme.web", body, bus.Protobuf); err == nil {
		t.Error("an unknown verb was answered")
	}
	if calls := w.seen(); len(calls) != 0 {
		t.Errorf("it reached %T", calls[0])
	}
}

func TestReplayWithAnotherReplySubjectGetsNothingUsable(t *testing.T) {
	w := newWorld(t)
	r := w.request(t, "open", &identityv1.OpenRequest{})
	stolen := r.encode(t, w)
	opened(t, r.open(t, w.directRaw(t, w.front, "open", stolen, bus.Protobuf)))
	// The thief is another frontend of the tenant, with its own inbox and login.
	for _, data := range [][]byte{w.directRaw(t, w.other, "open", stolen, bus.Protobuf), w.durable(t, w.other, "open", stolen, bus.Protobuf)} {
		thief := w.request(t, "open", &identityv1.OpenRequest{})
		if _, err := thief.reply.Open(r.sealed(t, data).GetSealed()); err == nil {
			t.Error("the thief opened the answer")
		}
		o := opened(t, r.open(t, data)) // only the holder of the reply key can
		w.mu.Lock()
		if !bytes.Equal(w.minted[o.GetGrant()].GetProofKey(), r.env.GetProofKey()) {
			t.Error("the grant is bound to another proof key")
		}
		w.mu.Unlock()
	}
	// Another tenant's frontend does not even get that far.
	if f := r.open(t, w.directRaw(t, w.globex, "open", stolen, bus.Protobuf)).GetFailure(); f.GetKind() != "denied" {
		t.Errorf("%v", f)
	}
}

// TestReplayAfterTheSessionMovedOnMintsNothing: the stored outcome of an open
// comes with no grant once the session is not active any more, by either door.
func TestReplayAfterTheSessionMovedOnMintsNothing(t *testing.T) {
	w := newWorld(t)
	r := w.request(t, "open", &identityv1.OpenRequest{})
	opened(t, w.direct(t, w.front, r))
	for _, state := range []corev1.State{corev1.State_STATE_ASLEEP, corev1.State_STATE_SLEEPING, corev1.State_STATE_FAILED,
		corev1.State_STATE_DELETING, corev1.State_STATE_DELETED, corev1.State_STATE_UNSPECIFIED} {
		w.mu.Lock()
		w.state = state
		w.mu.Unlock()
		again := w.request(t, "open", &identityv1.OpenRequest{}) // the same id and body, other keys
		again.env.RequestId = r.env.GetRequestId()
		w.seen()
		for door, data := range map[string][]byte{"direct": w.directRaw(t, w.front, "open", again.encode(t, w), bus.Protobuf),
			"durable": w.durable(t, w.front, "open", again.encode(t, w), bus.Protobuf)} {
			if f := again.open(t, data).GetFailure(); f.GetKind() != "superseded" || f.GetReason() == "" {
				t.Errorf("%s, %s door: %v", state, door, f)
			}
		}
		for _, c := range w.seen() {
			if _, minted := c.(*credentialsv1.MintRequest); minted {
				t.Errorf("%s: a grant was minted", state)
			}
		}
	}
}

func TestForeignReplySubjectIsIgnoredAndRecorded(t *testing.T) {
	w := newWorld(t)
	records, err := w.operator.NATS().SubscribeSync("berth.v1.audit.*.*.*")
	must(t, err)
	victim, err := w.globex.NATS().SubscribeSync(w.globex.NATS().NewInbox())
	must(t, err)
	must(t, w.operator.NATS().Flush())
	must(t, w.globex.NATS().Flush())
	r := w.request(t, "open", &identityv1.OpenRequest{})
	w.publish(t, w.front, "open", r.encode(t, w), nats.Header{bus.HeaderReply: {victim.Subject}})
	found := false
	for !found {
		msg, err := records.NextMsg(20 * time.Second)
		must(t, err)
		var a identityv1.Audit
		must(t, bus.Decode(msg.Data, bus.Protobuf, &a))
		if bytes.Contains(msg.Data, []byte(r.env.GetToken())) {
			t.Error("the record holds the token")
		}
		found = strings.Contains(a.GetFailure().GetReason(), "inbox")
	}
	other := w.request(t, "open", &identityv1.OpenRequest{})
	opened(t, other.open(t, w.durable(t, w.front, "open", other.encode(t, w), bus.Protobuf))) // the queue goes on
	if n, _, _ := victim.Pending(); n != 0 {
		t.Error("an answer was sent into another frontend's inbox")
	}
}

func TestDurableDoorRetriesWhatMayGoWellLater(t *testing.T) {
	w := newWorld(t)
	w.failWith(errs.E("open", errkind.NotLeader, "", "another replica leads"))
	r := w.request(t, "open", &identityv1.OpenRequest{})
	done := make(chan []byte, 1)
	body := r.encode(t, w)
	go func() { done <- w.durable(t, w.front, "open", body, bus.Protobuf) }()
	tries := 0
	until(t, "it is tried again", func() bool {
		select {
		case <-done:
			t.Fatal("it was answered while it may go well later")
		default:
		}
		tries += len(w.seen())
		return tries >= 2
	})
	w.failWith(nil)
	opened(t, r.open(t, <-done))
}

func TestRefusalOfThePlanIsFinal(t *testing.T) {
	w := newWorld(t)
	w.failWith(errs.E("open", errkind.Refused, "", "the invoice of May is open"))
	r := w.request(t, "open", &identityv1.OpenRequest{})
	f := r.open(t, w.durable(t, w.front, "open", r.encode(t, w), bus.Protobuf)).GetFailure()
	if f.GetKind() != "refused" || !strings.Contains(f.GetReason(), "the invoice of May is open") {
		t.Errorf("%v", f)
	}
	w.failWith(errs.E("open", errkind.Internal, "", "secret detail at /var/lib"))
	f = w.direct(t, w.front, w.request(t, "open", &identityv1.OpenRequest{})).GetFailure()
	if f.GetKind() != "internal" || strings.Contains(f.GetReason(), "secret") {
		t.Errorf("%v", f)
	}
}

func TestDurableOpenPastItsDeadlineIsAnswered(t *testing.T) {
	w := newWorld(t)
	w.failWith(errs.E("open", errkind.NoCapacity, "", "no host has room"))
	r := w.request(t, "open", &identityv1.OpenRequest{Wait: durationpb.New(300 * time.Millisecond)})
	f := r.open(t, w.durable(t, w.front, "open", r.encode(t, w), bus.Protobuf)).GetFailure()
	if f.GetKind() != "no_capacity" {
		t.Errorf("%v", f)
	}
}

func TestKeysInJSONWithoutABody(t *testing.T) {
	w := newWorld(t)
	var keys struct {
		CurveKey string `json:"curveKey"`
	}
	must(t, json.Unmarshal(w.directRaw(t, w.front, "keys", nil, bus.JSON), &keys))
	if keys.CurveKey != string(w.curve(t, w.front)) {
		t.Error(keys)
	}
}

func TestConfigurationIsChecked(t *testing.T) {
	good := identity.Issuer{Issuer: "https://idp", Audience: "a", Tenant: "acme"}
	for name, change := range map[string]func(*identity.Config){
		"no key folder":   func(c *identity.Config) { c.KeyDir = "" },
		"no audience":     func(c *identity.Config) { c.Issuers[0].Audience = "" },
		"absurd tenant":   func(c *identity.Config) { c.Issuers[0].Tenant = "A/B" },
		"unknown tier":    func(c *identity.Config) { c.Issuers[0].TierFloor = "steel" },
		"absurd frontend": func(c *identity.Config) { c.Issuers[0].Frontends = []string{"*"} },
		"twice":           func(c *identity.Config) { c.Issuers = append(c.Issuers, good) },
		"keys contradicted": func(c *identity.Config) {
			c.Issuers = append(c.Issuers, identity.Issuer{Issuer: "https://idp", Audience: "b", Tenant: "acme", JWKSFile: "x"})
		},
	} {
		c := identity.NewConfig()
		c.KeyDir, c.Issuers = t.TempDir(), []identity.Issuer{good}
		must(t, c.Validate())
		change(&c)
		if err := c.Validate(); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func BenchmarkOpenDirect(b *testing.B) {
	w := newWorld(b)
	r := w.request(b, "open", &identityv1.OpenRequest{})
	body := r.encode(b, w)
	for b.Loop() {
		w.directRaw(b, w.front, "open", body, bus.Protobuf)
	}
}
