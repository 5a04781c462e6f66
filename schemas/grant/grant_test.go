package grant_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
)

const kid ids.KeyID = "k1"

var (
	signer = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))
	proofK = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{2}, 32))
	thief  = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{3}, 32))
	now    = time.Unix(1_800_000_000, 0).UTC()
	enc    = base64.RawURLEncoding
)

func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func claims() grant.Claims {
	return grant.Claims{
		Issuer: grant.Issuer, ID: "g1", Tenant: "acme", Frontend: "web",
		Session:    ids.DeriveSessionKey([]byte("k"), "https://idp", "acme", "alice", "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 10}, Epoch: ids.Epoch{Incarnation: 1, Index: 12},
		Host: "h1", Principal: grant.Principal{Issuer: "https://idp", Subject: "alice"},
		Confirm: grant.Confirm(pub(proofK)), Verbs: grant.DefaultVerbs(),
		IssuedAt: now.Unix(), Expires: now.Add(15 * time.Minute).Unix(), AuthTime: now.Unix(),
	}
}

func jwks(kid string, k ed25519.PublicKey) []byte {
	return fmt.Appendf(nil, `{"keys":[{"kty":"RSA","kid":"other","n":"AQAB","e":"AQAB"},{"kty":"OKP","crv":"Ed25519","use":"sig","alg":"EdDSA","kid":%q,"x":%q}]}`,
		kid, enc.EncodeToString(k))
}

func verifier(t testing.TB, revoked ...grant.Revocation) *grant.Verifier {
	t.Helper()
	v, err := grant.NewVerifier(jwks(string(kid), pub(signer)), revoked, nil)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func sign(t testing.TB, c grant.Claims) string {
	t.Helper()
	s, err := grant.Sign(c, kid, signer)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantKind(t *testing.T, err error, want errkind.Kind) {
	t.Helper()
	if got := grant.KindOf(err); got != want {
		t.Errorf("kind %v (%v), want %v", got, err, want)
	}
}

func TestGrantRoundTrip(t *testing.T) {
	c := claims()
	token := sign(t, c)
	got, err := verifier(t).Verify(token, c.Binding(), now)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, c) {
		t.Errorf("got %+v, want %+v", got, c)
	}
	if want := now.Add(450 * time.Second); !got.HalfLife().Equal(want) {
		t.Errorf("half-life at %v, want %v", got.HalfLife(), want)
	}
}

func TestVerifyRefusesEveryMismatch(t *testing.T) {
	good := claims().Binding()
	for name, tc := range map[string]struct {
		change func(*grant.Binding)
		want   errkind.Kind
	}{
		"tenant":             {func(b *grant.Binding) { b.Tenant = "globex" }, errkind.Denied},
		"session":            {func(b *grant.Binding) { b.Session = "s" }, errkind.Denied},
		"newer generation":   {func(b *grant.Binding) { b.Generation.Index++ }, errkind.StaleEpoch},
		"older generation":   {func(b *grant.Binding) { b.Generation.Index-- }, errkind.StaleEpoch},
		"other incarnation":  {func(b *grant.Binding) { b.Generation.Incarnation++ }, errkind.StaleEpoch},
		"newer epoch":        {func(b *grant.Binding) { b.Epoch.Index++ }, errkind.StaleEpoch},
		"older epoch":        {func(b *grant.Binding) { b.Epoch.Index-- }, errkind.StaleEpoch},
		"other host":         {func(b *grant.Binding) { b.Host = "h2" }, errkind.StaleEpoch},
		"nothing to compare": {func(b *grant.Binding) { *b = grant.Binding{} }, errkind.Denied},
	} {
		t.Run(name, func(t *testing.T) {
			want := good
			tc.change(&want)
			_, err := verifier(t).Verify(sign(t, claims()), want, now)
			wantKind(t, err, tc.want)
		})
	}
}

func TestAuthenticateRefusesTimesAndRevocation(t *testing.T) {
	c := claims()
	token := sign(t, c)
	for name, tc := range map[string]struct {
		at      time.Time
		revoked []grant.Revocation
		want    errkind.Kind
	}{
		"last second":      {now.Add(15*time.Minute - time.Nanosecond), nil, errkind.OK},
		"expired":          {now.Add(15 * time.Minute), nil, errkind.Expired},
		"within skew":      {now.Add(-grant.Skew), nil, errkind.OK},
		"from the future":  {now.Add(-grant.Skew - time.Second), nil, errkind.Unauthenticated},
		"revoked":          {now, []grant.Revocation{{Tenant: c.Tenant, Session: c.Session, Generation: c.Generation}}, errkind.Superseded},
		"other generation": {now, []grant.Revocation{{Tenant: c.Tenant, Session: c.Session, Generation: ids.Generation{Incarnation: 1, Index: 9}}}, errkind.OK},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := verifier(t, tc.revoked...).Authenticate(token, tc.at)
			wantKind(t, err, tc.want)
		})
	}
}

// forge signs any header and any body with any key.
func forge(k ed25519.PrivateKey, head, body string) string {
	signed := enc.EncodeToString([]byte(head)) + "." + enc.EncodeToString([]byte(body))
	return signed + "." + enc.EncodeToString(ed25519.Sign(k, []byte(signed)))
}

func TestTamperedGrantsAreRefused(t *testing.T) {
	body, err := json.Marshal(claims())
	if err != nil {
		t.Fatal(err)
	}
	good := sign(t, claims())
	parts := strings.Split(good, ".")
	head := `{"alg":"EdDSA","kid":"k1","typ":"berth-grant+jwt"}`
	other := claims()
	other.Session = ids.DeriveSessionKey([]byte("k"), "https://idp", "acme", "bob", "default")
	otherBody, _ := json.Marshal(other)
	for name, token := range map[string]string{
		"empty":                "",
		"not three parts":      parts[0] + "." + parts[1],
		"four parts":           good + ".AAAA",
		"padding":              good + "=",
		"white space":          " " + good,
		"signature cut":        good[:len(good)-4],
		"signature of another": parts[0] + "." + parts[1] + "." + strings.Split(sign(t, other), ".")[2],
		"claims swapped":       parts[0] + "." + enc.EncodeToString(otherBody) + "." + parts[2],
		"another key":          forge(thief, head, string(body)),
		"alg none":             forge(signer, `{"alg":"none","kid":"k1","typ":"berth-grant+jwt"}`, string(body)),
		"alg HS256":            forge(signer, `{"alg":"HS256","kid":"k1","typ":"berth-grant+jwt"}`, string(body)),
		"typ JWT":              forge(signer, `{"alg":"EdDSA","kid":"k1","typ":"JWT"}`, string(body)),
		"kid not in the set":   forge(signer, `{"alg":"EdDSA","kid":"k2","typ":"berth-grant+jwt"}`, string(body)),
		"kid absurd":           forge(signer, `{"alg":"EdDSA","kid":"../k1","typ":"berth-grant+jwt"}`, string(body)),
		"crit header":          forge(signer, `{"alg":"EdDSA","crit":["x"],"kid":"k1","typ":"berth-grant+jwt"}`, string(body)),
		"jwk header":           forge(thief, `{"alg":"EdDSA","jwk":{},"kid":"k1","typ":"berth-grant+jwt"}`, string(body)),
		"alg twice":            forge(signer, `{"alg":"none","alg":"EdDSA","kid":"k1","typ":"berth-grant+jwt"}`, string(body)),
		"unknown claim":        forge(signer, head, `{"admin":true,`+string(body[1:])),
		"more after claims":    forge(signer, head, string(body)+"{}"),
		"claims not JSON":      forge(signer, head, "claims"),
		"other issuer":         forge(signer, head, strings.Replace(string(body), grant.Issuer, "urn:other", 1)),
		"verbs out of order":   forge(signer, head, strings.Replace(string(body), `["exec","files","ports"]`, `["files","exec"]`, 1)),
		"a verb twice":         forge(signer, head, strings.Replace(string(body), `["exec","files","ports"]`, `["exec","exec"]`, 1)),
		"a verb of nobody":     forge(signer, head, strings.Replace(string(body), `["exec","files","ports"]`, `["root"]`, 1)),
		"an empty list":        forge(signer, head, strings.Replace(string(body), `["exec","files","ports"]`, `[]`, 1)),
		"no session":           forge(signer, head, strings.Replace(string(body), string(claims().Session), "", 1)),
		"no epoch":             forge(signer, head, strings.Replace(string(body), `"1-12"`, `"0-0"`, 1)),
		"epoch not canonical":  forge(signer, head, strings.Replace(string(body), `"1-12"`, `"1-012"`, 1)),
		"too large":            strings.Repeat("A", grant.MaxBytes+1),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := verifier(t).Verify(token, claims().Binding(), now)
			if err == nil {
				t.Fatal("accepted")
			}
			if k := grant.KindOf(err); k != errkind.Unauthenticated && k != errkind.TooLarge {
				t.Errorf("kind %v: %v", k, err)
			}
		})
	}
}

func TestEveryFlippedBitIsRefused(t *testing.T) {
	good := sign(t, claims())
	v, want := verifier(t), claims().Binding()
	for i := range len(good) {
		for bit := range 8 {
			b := []byte(good)
			b[i] ^= 1 << bit
			if _, err := v.Verify(string(b), want, now); err == nil {
				t.Fatalf("bit %d of byte %d flipped and accepted", bit, i)
			}
		}
	}
}

func TestSignRefusesIncompleteClaims(t *testing.T) {
	for name, change := range map[string]func(*grant.Claims){
		"no tenant":         func(c *grant.Claims) { c.Tenant = "" },
		"no host":           func(c *grant.Claims) { c.Host = "" },
		"no principal":      func(c *grant.Claims) { c.Principal.Subject = "" },
		"no proof key":      func(c *grant.Claims) { c.Confirm = grant.Confirmation{} },
		"short proof key":   func(c *grant.Claims) { c.Confirm.JWK.X = "AAAA" },
		"no verbs":          func(c *grant.Claims) { c.Verbs = nil },
		"expires at once":   func(c *grant.Claims) { c.Expires = c.IssuedAt },
		"verified later":    func(c *grant.Claims) { c.AuthTime = c.IssuedAt + 1 },
		"subject too large": func(c *grant.Claims) { c.Principal.Subject = strings.Repeat("x", 4000) },
	} {
		c := claims()
		change(&c)
		if _, err := grant.Sign(c, kid, signer); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
}

func TestKeySets(t *testing.T) {
	x := enc.EncodeToString(pub(signer))
	for name, set := range map[string]string{
		"not JSON":    "keys",
		"no keys":     `{"keys":[]}`,
		"only RSA":    `{"keys":[{"kty":"RSA","kid":"a"}]}`,
		"no kid":      `{"keys":[{"kty":"OKP","crv":"Ed25519","x":"` + x + `"}]}`,
		"twice":       `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a","x":"` + x + `"},{"kty":"OKP","crv":"Ed25519","kid":"a","x":"` + x + `"}]}`,
		"short x":     `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a","x":"AAAA"}]}`,
		"use enc":     `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a","use":"enc","x":"` + x + `"}]}`,
		"other curve": `{"keys":[{"kty":"OKP","crv":"X25519","kid":"a","x":"` + x + `"}]}`,
	} {
		if _, err := grant.NewVerifier([]byte(set), nil, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func opening(token string) grant.Opening {
	return grant.Opening{
		Subject: "berth.v1.box.s.1-12.open", Nonce: bytes.Repeat([]byte{7}, grant.NonceBytes), Time: now,
		Operation: []byte("exec true"), Deliver: "_INBOX.fe-acme-web.box.x", ReplyKey: "XREPLY", Grant: token,
	}
}

func TestStolenGrantWithoutItsKeyOpensNothing(t *testing.T) {
	token := sign(t, claims())
	o := opening(token)
	_, err := verifier(t).Open(o, o.Sign(thief), claims().Binding(), grant.NewReplay(10, 10), now)
	wantKind(t, err, errkind.Unauthenticated)
	if _, err := verifier(t).Open(o, nil, claims().Binding(), grant.NewReplay(10, 10), now); err == nil {
		t.Error("opened without any proof")
	}
}

func TestOpeningTampering(t *testing.T) {
	token := sign(t, claims())
	good := opening(token)
	proof := good.Sign(proofK)
	renewed := claims()
	renewed.ID = "g2"
	for name, change := range map[string]func(*grant.Opening){
		"subject":     func(o *grant.Opening) { o.Subject = "berth.v1.box.s.1-13.open" },
		"nonce":       func(o *grant.Opening) { o.Nonce = bytes.Repeat([]byte{8}, grant.NonceBytes) },
		"short nonce": func(o *grant.Opening) { o.Nonce = o.Nonce[:8] },
		"time":        func(o *grant.Opening) { o.Time = o.Time.Add(time.Nanosecond) },
		"operation":   func(o *grant.Opening) { o.Operation = []byte("exec false") },
		"deliver":     func(o *grant.Opening) { o.Deliver = "_INBOX.fe-acme-other.box.x" },
		"reply key":   func(o *grant.Opening) { o.ReplyKey = "XOTHER" },
		"grant":       func(o *grant.Opening) { o.Grant = sign(t, renewed) },
		"shifted boundary": func(o *grant.Opening) {
			o.Deliver, o.ReplyKey = o.Deliver+"X", o.ReplyKey[1:]
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			change(&o)
			if _, err := verifier(t).Open(o, proof, claims().Binding(), grant.NewReplay(10, 10), now); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func TestOpeningAgeAndReplay(t *testing.T) {
	token := sign(t, claims())
	o := opening(token)
	proof, v, want := o.Sign(proofK), verifier(t), claims().Binding()
	seen := grant.NewReplay(10, 10)
	if _, err := v.Open(o, o.Sign(thief), want, seen, now); err == nil {
		t.Fatal("a stranger's proof was accepted")
	}
	if _, err := v.Open(o, proof, want, seen, now); err != nil {
		t.Fatalf("the stranger's try spent the nonce: %v", err)
	}
	_, err := v.Open(o, proof, want, seen, now.Add(grant.MaxProofAge))
	wantKind(t, err, errkind.Unauthenticated)
	_, err = v.Open(o, proof, want, grant.NewReplay(10, 10), now.Add(grant.MaxProofAge+1))
	wantKind(t, err, errkind.Expired)
	_, err = v.Open(o, proof, want, grant.NewReplay(10, 10), now.Add(-grant.Skew-1))
	wantKind(t, err, errkind.Unauthenticated)
}

func TestRenewalProof(t *testing.T) {
	token := sign(t, claims())
	r := grant.Renewal{RequestID: "r1", Grant: token, Time: now}
	proof := r.Sign(proofK)
	if err := r.Verify(pub(proofK), proof, now); err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]grant.Renewal{
		"request id": {RequestID: "r2", Grant: token, Time: now},
		"grant":      {RequestID: "r1", Grant: token + "x", Time: now},
		"time":       {RequestID: "r1", Grant: token, Time: now.Add(1)},
	} {
		if err := other.Verify(pub(proofK), proof, now); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := r.Verify(pub(thief), proof, now); err == nil {
		t.Error("a stranger's proof was accepted")
	}
	o := opening(token)
	if err := r.Verify(pub(proofK), o.Sign(proofK), now); err == nil {
		t.Error("the proof of an opening served for a renewal")
	}
}

func num(i int) []byte { return fmt.Appendf(nil, "%016d", i) }

func TestReplayIsBoundedPerScopeAndInAll(t *testing.T) {
	r := grant.NewReplay(5, 3)
	for i := range 3 {
		if err := r.Spend("a", num(i), now); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, r.Spend("a", num(3), now), errkind.Exhausted)
	wantKind(t, r.Spend("a", num(2), now), errkind.Unauthenticated)
	wantKind(t, r.Spend("b", num(0), now), errkind.OK)
	wantKind(t, r.Spend("b", num(1), now), errkind.OK)
	wantKind(t, r.Spend("c", num(1), now), errkind.Exhausted)
	later := now.Add(grant.MaxProofAge + grant.Skew)
	wantKind(t, r.Spend("a", num(1), later), errkind.Unauthenticated)
	muchLater := now.Add(2 * (grant.MaxProofAge + grant.Skew))
	wantKind(t, r.Spend("a", num(1), muchLater), errkind.OK)
}

func FuzzVerify(f *testing.F) {
	v := verifier(f)
	good := sign(f, claims())
	f.Add(good)
	f.Add("..")
	f.Add(forge(signer, `{"alg":"EdDSA","kid":"k1","typ":"berth-grant+jwt"}`, `{"iss":1}`))
	f.Fuzz(func(t *testing.T, token string) {
		c, err := v.Authenticate(token, now)
		if err == nil && (token != good || !reflect.DeepEqual(c, claims())) {
			t.Errorf("accepted a token that nobody signed: %q", token)
		}
		v.Knows(token)
		_, _ = grant.NewVerifier([]byte(token), nil, nil)
	})
}

func BenchmarkSign(b *testing.B) {
	c := claims()
	for b.Loop() {
		_, _ = grant.Sign(c, kid, signer)
	}
}

func BenchmarkOpen(b *testing.B) {
	v, want, o := verifier(b), claims().Binding(), opening(sign(b, claims()))
	seen := grant.NewReplay(1<<20, 1<<20)
	proof := o.Sign(proofK)
	for b.Loop() {
		_, _ = v.Open(o, proof, want, seen, now)
	}
}

// The released forms: another implementation signs exactly these bytes.
func TestGoldenForms(t *testing.T) {
	token := sign(t, claims())
	for name, tc := range map[string]struct {
		in   []byte
		want string
	}{
		"grant":   {[]byte(token), "28d7d8b8e02b2123ef03adf3dcafc36281a7952a7bb817f15191092ca1bb864e"},
		"opening": {opening(token).SigningInput(), "746dbb825e725627b456f34b91219d1cf08c82f09878d55376531405d047fb56"},
		"renewal": {grant.Renewal{RequestID: "r1", Grant: token, Time: now}.SigningInput(), "e7bc463ea125265fc6d7f2729099a2a8fcdc5a1bd663541a62637cdf99954b0e"},
	} {
		if got := fmt.Sprintf("%x", sha256.Sum256(tc.in)); got != tc.want {
			t.Errorf("%s: SHA-256 is %s, released as %s", name, got, tc.want)
		}
	}
}
