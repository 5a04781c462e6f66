package identity_test

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// refusedWith sends a request and holds answer and audit record to each other.
func (w *world) refusedWith(t *testing.T, rec *records, door string, r *request, want errkind.Kind, why string) {
	t.Helper()
	send := w.directRaw
	if door == "durable" {
		send = w.durable
	}
	f := r.open(t, send(t, w.front, r.env.GetVerb(), r.encode(t, w), bus.Protobuf)).GetFailure()
	if f.GetKind() != want.String() || !strings.Contains(f.GetReason(), why) || strings.Contains(f.GetReason(), "\n") || len(f.GetReason()) > 300 {
		t.Errorf("%s door answers %v, want %s because %q", door, f, want, why)
	}
	i := rec.find(t, door, func(a *identityv1.Audit) bool {
		return a.GetRequestId() == r.env.GetRequestId() && !a.GetAdmitted()
	})
	a := rec.seen[i]
	if a.GetFailure().GetKind() != f.GetKind() || a.GetFailure().GetReason() != f.GetReason() || a.GetVerb() != r.env.GetVerb() || a.GetDoor() != door ||
		a.GetActor().GetTenant() != "acme" || a.GetActor().GetFrontend() != "web" || a.GetActor().GetSubject() != "" || a.GetSession() != "" {
		t.Errorf("%s door: the audit record is %v, the answer %v", door, a, f)
	}
	token := r.env.GetToken()
	for _, part := range append(strings.Split(token, "."), token) {
		if len(part) > 16 && (bytes.Contains(rec.raw[i], []byte(part)) || strings.Contains(f.GetReason(), part)) {
			t.Errorf("%s door: the token, or a part of it, stands in the record or the answer", door)
		}
	}
	for _, c := range w.seen() {
		t.Errorf("%s door: it reached %T", door, c)
	}
}

// badToken is a token, and the answer to it.
type badToken struct {
	token string
	kind  errkind.Kind
	why   string
}

func badTokens(t *testing.T, p, foreign *provider) map[string]badToken {
	t.Helper()
	evil, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	der, err := x509.MarshalPKIXPublicKey(p.key.Public())
	must(t, err)
	public := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	at := func(d time.Duration) int64 { return time.Now().Add(d).Unix() }
	body := fmt.Sprintf(`{"iss":%q,"aud":"berth","exp":%d`, p.URL, at(time.Hour))
	const head = `{"alg":"RS256","kid":"one"}`
	good := p.token(t, nil)
	part := func(token string, i int) string { return strings.Split(token, ".")[i] }
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none"}`))
	const unsigned, denied = "not signed by its issuer", errkind.Unauthenticated
	return map[string]badToken{
		"alg none":                        {none + "." + part(good, 1) + ".", denied, unsigned},
		"alg none with a signature":       {none + "." + part(good, 1) + "." + part(good, 2), denied, unsigned},
		"the public key as shared secret": {signWith(t, jose.HS256, "one", public, p.claims(nil)), denied, unsigned},
		"an algorithm that is not listed": {signWith(t, jose.RS512, "one", p.key, p.claims(nil)), denied, unsigned},
		"another's key, known name":       {signWith(t, jose.RS256, "one", evil, p.claims(nil)), denied, unsigned},
		"another's key, unknown name":     {signWith(t, jose.RS256, "two", evil, p.claims(nil)), denied, unsigned},
		"another's key, no name":          {signWith(t, jose.RS256, "", evil, p.claims(nil)), denied, unsigned},
		"another's claims":                {part(good, 0) + "." + part(p.token(t, map[string]any{"sub": "bob"}), 1) + "." + part(good, 2), denied, unsigned},
		"expired":                         {p.token(t, map[string]any{"exp": at(-5 * time.Minute)}), denied, "had expired"},
		"not valid yet":                   {p.token(t, map[string]any{"nbf": at(5 * time.Minute)}), denied, "not valid yet"},
		"issued in the future":            {p.token(t, map[string]any{"iat": at(5 * time.Minute)}), denied, "in the future"},
		"never expires":                   {p.token(t, map[string]any{"exp": nil}), denied, "never expires"},
		"wrong audience":                  {p.token(t, map[string]any{"aud": "other"}), denied, "issuer and audience are not registered"},
		"no audience":                     {p.token(t, map[string]any{"aud": nil}), denied, "issuer and audience are not registered"},
		"audience in other letters":       {p.token(t, map[string]any{"aud": "Berth"}), denied, "issuer and audience are not registered"},
		"foreign issuer":                  {foreign.token(t, nil), denied, "issuer is not registered"},
		"issuer with a slash":             {p.token(t, map[string]any{"iss": p.URL + "/"}), denied, "issuer is not registered"},
		"foreign key for this issuer":     {foreign.token(t, map[string]any{"iss": p.URL}), denied, unsigned},
		"opaque":                          {"2YotnFZFEjr1zCsicMWpAA-abcdefghijklmnop", denied, "opaque tokens are not accepted"},
		"subject twice":                   {p.byHand(t, head, body+`,"sub":"alice","sub":"bob"}`), denied, "stands twice"},
		"audience twice":                  {p.byHand(t, head, body+`,"sub":"alice","aud":"other"}`), denied, "stands twice"},
		"algorithm twice":                 {p.byHand(t, `{"alg":"RS256","alg":"RS256","kid":"one"}`, body+`,"sub":"alice"}`), denied, "stands twice"},
		"subject in capitals":             {p.byHand(t, head, body+`,"SUB":"alice"}`), denied, "in other letters"},
		"no subject":                      {p.token(t, map[string]any{"sub": nil}), denied, "subject is empty"},
		"subject of 256 bytes":            {p.token(t, map[string]any{"sub": strings.Repeat("x", 256)}), denied, "longer than 255"},
		"newline in the subject":          {p.token(t, map[string]any{"sub": "alice\nadmitted"}), denied, "control characters"},
		"half a surrogate":                {p.byHand(t, head, body+`,"sub":"a\ud800"}`), denied, "no valid Unicode"},
		"acted for by nobody":             {p.token(t, map[string]any{"act": map[string]any{}}), denied, "names nobody"},
		"a logout notice":                 {p.token(t, map[string]any{"events": map[string]any{}}), denied, "notice"},
		"17 KB":                           {strings.Repeat("a", 17<<10), errkind.TooLarge, "at most 16384 are allowed"},
		"17 KB, genuine":                  {p.token(t, map[string]any{"x": strings.Repeat("x", 17<<10)}), errkind.TooLarge, "at most 16384 are allowed"},
		"none at all":                     {"", denied, "no token of the user"},
	}
}

// TestBadTokens: each by both doors, with the answer that its sender gets and
// the record that is kept.
func TestBadTokens(t *testing.T) {
	p, foreign := newProvider(t), newProvider(t)
	w := newWorldWith(t, p)
	rec := w.records(t)
	for name, c := range badTokens(t, p, foreign) {
		t.Run(name, func(t *testing.T) {
			for _, door := range []string{"direct", "durable"} {
				r := w.request(t, "open", &identityv1.OpenRequest{})
				r.env.Token = c.token
				w.refusedWith(t, rec, door, r, c.kind, c.why)
			}
		})
	}
	r := w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = p.token(t, nil)
	opened(t, w.direct(t, w.front, r))
}

// TestTokenOfOneMegabyte: no such request passes, by whatever bound it meets
// first: that of sealing, of the bus, of a request or of a token. What reaches
// identity is recorded.
func TestTokenOfOneMegabyte(t *testing.T) {
	w := newWorld(t)
	rec := w.records(t)
	if _, err := seal.SealTo(w.curve(t, w.front), make([]byte, 1<<20), rand.Reader); err == nil {
		t.Error("a client sealed it")
	}
	send := func(raw []byte) (*nats.Msg, error) {
		return w.front.CallRaw(t.Context(), subjects.RPC("identity", "open", w.front.Self()), raw, bus.Protobuf)
	}
	byHand := func(size int) []byte {
		raw, err := proto.Marshal(&identityv1.SealedRequest{Sealed: make([]byte, size)})
		must(t, err)
		return raw
	}
	if _, err := send(byHand(1 << 20)); !errs.Is(err, errkind.TooLarge) {
		t.Errorf("the bus carried it: %v", err)
	}
	sealed := func(size int) []byte {
		r := w.request(t, "open", &identityv1.OpenRequest{})
		r.env.Token = strings.Repeat("t", size)
		return r.encode(t, w)
	}
	for what, raw := range map[string][]byte{"made by hand": byHand(900 << 10), "sealed": sealed(400 << 10)} {
		msg, err := send(raw)
		must(t, err)
		reply := &identityv1.SealedReply{}
		must(t, bus.Decode(msg.Data, bus.Protobuf, reply))
		if f := reply.GetFailure(); f.GetKind() != "too_large" || !strings.Contains(f.GetReason(), "at most 65536 are allowed") {
			t.Errorf("%s: %v", what, reply)
		}
		i := rec.find(t, what, func(a *identityv1.Audit) bool { return a.GetFailure().GetKind() == "too_large" })
		if a := rec.seen[i]; a.GetActor().GetFrontend() != "web" || len(rec.raw[i]) > 1000 {
			t.Errorf("%s: recorded as %v", what, a)
		}
		rec.seen[i].Reset()
	}
	r := w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = strings.Repeat("t", 60<<10)
	w.refusedWith(t, rec, "direct", r, errkind.TooLarge, "at most 16384 are allowed")
}

// TestClockSkew: a clock that differs by less than the tolerance locks nobody
// out; more than it lets nobody in.
func TestClockSkew(t *testing.T) {
	p := newProvider(t)
	w := newWorldWith(t, p)
	for _, c := range []struct {
		claim string
		off   time.Duration
		good  bool
	}{{"exp", -15 * time.Second, true}, {"exp", -90 * time.Second, false}, {"nbf", 15 * time.Second, true}, {"nbf", 90 * time.Second, false},
		{"iat", 15 * time.Second, true}, {"iat", 90 * time.Second, false}} {
		r := w.request(t, "open", &identityv1.OpenRequest{})
		r.env.Token = p.token(t, map[string]any{c.claim: time.Now().Add(c.off).Unix()})
		reply := w.direct(t, w.front, r)
		if got := reply.GetOpen() != nil; got != c.good || !c.good && reply.GetFailure().GetKind() != "unauthenticated" {
			t.Errorf("%s off by %s: %v", c.claim, c.off, reply)
		}
	}
}

// TestBadKeySetsOfAnIssuer: what the issuer answers when its keys are needed.
// Its users are told to try again, and nobody else notices.
func TestBadKeySetsOfAnIssuer(t *testing.T) {
	t.Parallel()
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	faults := map[string]http.HandlerFunc{
		"slow":      func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"huge":      text(`{"keys":[],"x":"` + strings.Repeat("x", 3<<20) + `"}`),
		"malformed": text(`{"keys":[{"kty":`),
		"a page":    text("<html>secret detail</html>"),
		"down":      func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "secret detail", http.StatusBadGateway) },
	}
	providers, all := map[string]*provider{}, []*provider{}
	for name, h := range faults {
		p := newProvider(t)
		p.answers(h)
		providers[name] = p
		all = append(all, p)
	}
	w := newWorldWith(t, all...)
	rec := w.records(t)
	for name, p := range providers {
		t.Run(name, func(t *testing.T) {
			r := w.request(t, "open", &identityv1.OpenRequest{})
			r.env.Token = p.token(t, nil)
			began := time.Now()
			w.refusedWith(t, rec, "direct", r, errkind.Unavailable, "the issuer of the token cannot be reached now; try again")
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %s", took)
			}
			opened(t, w.direct(t, w.front, w.request(t, "open", &identityv1.OpenRequest{}))) // of another issuer
			w.seen()
		})
	}
}

// TestFloodOfUnknownKeys: forged tokens with ever new key names reach the
// issuer at most about once a second, and its users come through.
func TestFloodOfUnknownKeys(t *testing.T) {
	p := newProvider(t)
	w := newWorldWith(t, p)
	evil, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	began := time.Now()
	done := make(chan string, 200)
	for i := range cap(done) {
		r := w.request(t, "open", &identityv1.OpenRequest{})
		r.env.Token = signWith(t, jose.RS256, fmt.Sprint("forged", i), evil, p.claims(nil))
		raw := r.encode(t, w)
		go func() {
			msg, err := w.front.CallRaw(t.Context(), subjects.RPC("identity", "open", w.front.Self()), raw, bus.Protobuf)
			if err != nil {
				done <- err.Error()
				return
			}
			done <- r.open(t, msg.Data).GetFailure().GetKind()
		}()
	}
	for range 3 {
		r := w.request(t, "open", &identityv1.OpenRequest{})
		r.env.Token = p.token(t, map[string]any{"jti": time.Now().String()})
		opened(t, w.direct(t, w.front, r))
	}
	for range cap(done) {
		if kind := <-done; kind != "unauthenticated" && kind != "unavailable" {
			t.Errorf("a forged token was answered with %q", kind)
		}
	}
	if most := 2 + int(time.Since(began)/time.Second); p.fetched() > most {
		t.Errorf("the keys were fetched %d times, want at most %d", p.fetched(), most)
	}
}

// TestSubjectsAreNeverNamesOnTheBus: whatever stands in a subject claim, it is
// one user of its own, its records go where they belong, and it is told apart
// from what looks like it.
func TestSubjectsAreNeverNamesOnTheBus(t *testing.T) {
	p := newProvider(t)
	w := newWorldWith(t, p)
	rec := w.records(t)
	keys := map[string]string{}
	for _, sub := range []string{"alice", "Alice", "alice ", " alice", "аlice", "ａlice", "alice\u200b", "é", "e\u0301", "a.b", "a.*.c", "a.>", ">", "*", "two words",
		"../../etc/passwd", "globex", "alice@globex.example", "auth0|7", "$SYS", "_INBOX.x", strings.Repeat("x", 255)} {
		r := w.request(t, "open", &identityv1.OpenRequest{})
		r.env.Token = p.token(t, map[string]any{"sub": sub})
		o := opened(t, w.direct(t, w.front, r))
		v := w.seen()[0].(*lifecyclev1.OpenRequest).GetVerified()
		if v.GetActor().GetSubject() != sub || v.GetActor().GetTenant() != "acme" {
			t.Errorf("%q became %v", sub, v.GetActor())
		}
		key := o.GetSession().GetSession()
		if of, twice := keys[key]; twice {
			t.Errorf("%q and %q have one session", sub, of)
		}
		keys[key] = sub
		i := rec.find(t, sub, func(a *identityv1.Audit) bool { return a.GetRequestId() == r.env.GetRequestId() })
		if rec.on[i] != "berth.v1.audit.identity.acme."+key || !rec.seen[i].GetAdmitted() || rec.seen[i].GetActor().GetSubject() != sub {
			t.Errorf("%q: recorded on %s as %v", sub, rec.on[i], rec.seen[i])
		}
	}
}

// TestSameSubjectInTwoTenants: two users, and neither passes for the other.
func TestSameSubjectInTwoTenants(t *testing.T) {
	w := newWorld(t)
	rec := w.records(t)
	mine := opened(t, w.direct(t, w.front, w.request(t, "open", &identityv1.OpenRequest{})))
	r := w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = w.token(t, "globex", "alice", time.Now())
	theirs := opened(t, w.direct(t, w.globex, r))
	if mine.GetSession().GetSession() == theirs.GetSession().GetSession() || theirs.GetSession().GetTenant() != "globex" {
		t.Errorf("%v and %v", mine.GetSession(), theirs.GetSession())
	}
	w.seen()
	r = w.request(t, "open", &identityv1.OpenRequest{})
	r.env.Token = w.token(t, "globex", "alice", time.Now())
	w.refusedWith(t, rec, "direct", r, errkind.Denied, "belongs to another tenant")
}

// TestReplayedRequest: the same bytes again are the same request, with the
// same id and body, so that lifecycle does nothing twice; the answer is sealed
// to whom it was sealed to before; both are recorded.
func TestReplayedRequest(t *testing.T) {
	w := newWorld(t)
	rec := w.records(t)
	r := w.request(t, "delete", &identityv1.DeleteRequest{})
	raw := r.encode(t, w)
	for range 2 {
		if d := r.open(t, w.directRaw(t, w.front, "delete", raw, bus.Protobuf)).GetDelete(); d == nil {
			t.Fatal("not deleted")
		}
	}
	calls := w.seen()
	a, b := calls[0].(*lifecyclev1.DeleteRequest).GetVerified(), calls[1].(*lifecyclev1.DeleteRequest).GetVerified()
	if a.GetRequestId() != b.GetRequestId() || !bytes.Equal(a.GetBodyHash(), b.GetBodyHash()) || a.GetKeys()[0] != b.GetKeys()[0] {
		t.Errorf("%v and %v", a, b)
	}
	for range 2 {
		i := rec.find(t, "each handling", func(a *identityv1.Audit) bool { return a.GetRequestId() == r.env.GetRequestId() })
		rec.seen[i].Reset()
	}
	old := w.request(t, "delete", &identityv1.DeleteRequest{})
	old.env.Time = timestamppb.New(time.Now().Add(-3 * time.Minute))
	w.refusedWith(t, rec, "direct", old, errkind.Expired, "more than 2m0s old")
}

// TestSealedTokenOnAnotherRequest: a token is sealed together with the request
// that it is for, so whoever has the sealed bytes can put them to no other use.
func TestSealedTokenOnAnotherRequest(t *testing.T) {
	w := newWorld(t)
	rec := w.records(t)
	r := w.request(t, "open", &identityv1.OpenRequest{})
	stolen := r.encode(t, w)
	refused := func(what string, front *bus.Conn, verb string, body []byte, kind errkind.Kind, why string) {
		t.Helper()
		f := r.open(t, w.directRaw(t, front, verb, body, bus.Protobuf)).GetFailure()
		if f.GetKind() != kind.String() || !strings.Contains(f.GetReason(), why) {
			t.Errorf("%s: %v", what, f)
		}
		i := rec.find(t, what, func(a *identityv1.Audit) bool {
			return a.GetVerb() == verb && !a.GetAdmitted() && a.GetFailure().GetReason() == f.GetReason()
		})
		rec.seen[i].Reset()
	}
	for _, verb := range []string{"delete", "close", "status", "renew"} {
		refused("on "+verb, w.front, verb, stolen, errkind.Invalid, "the verb in the envelope is not that of the subject")
	}
	refused("by another tenant's frontend", w.globex, "open", stolen, errkind.Denied, "belongs to another tenant")
	sealed := &identityv1.SealedRequest{}
	must(t, bus.Decode(stolen, bus.Protobuf, sealed))
	for what, change := range map[string]func([]byte) []byte{
		"cut":       func(b []byte) []byte { return b[:len(b)-1] },
		"longer":    func(b []byte) []byte { return append(b, 0) },
		"one bit":   func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"its start": func(b []byte) []byte { return b[:40] },
	} {
		x := w.request(t, "open", &identityv1.OpenRequest{})
		x.mangled = func(q *identityv1.SealedRequest) { q.Sealed = change(bytes.Clone(sealed.GetSealed())) }
		refused(what, w.front, "open", x.encode(t, w), errkind.Invalid, "cannot be opened")
	}
	inside := w.request(t, "open", &identityv1.OpenRequest{})
	inside.env.Token = base64.RawURLEncoding.EncodeToString(sealed.GetSealed())
	w.refusedWith(t, rec, "direct", inside, errkind.Unauthenticated, "opaque tokens are not accepted")
	for _, c := range w.seen() {
		t.Errorf("it reached %T", c)
	}
}
