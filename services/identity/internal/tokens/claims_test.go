package tokens

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// signed signs header and payload byte for byte, also such as no library
// would write.
func signed(key ed25519.PrivateKey, header, payload string) string {
	in := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	return in + "." + base64.RawURLEncoding.EncodeToString(ed25519.Sign(key, []byte(in)))
}

const header = `{"alg":"EdDSA","kid":"d"}`

// TestGenuineSignatureOverAmbiguousTokens: a token that its issuer did sign is
// refused where two parsers could read it in two ways, and where it is not a
// proof of who sends it.
func TestGenuineSignatureOverAmbiguousTokens(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", pub))
	v := verifier(t, Issuer{URL: p.URL})
	body := func(more string) string { return fmt.Sprintf(`{"iss":%q,"aud":"a","exp":2000000000%s}`, p.URL, more) }
	for name, c := range map[string]struct{ header, payload, want string }{
		"subject twice":                {header, body(`,"sub":"alice","sub":"bob"`), "stands twice"},
		"subject twice, escaped":       {header, body(`,"sub":"alice","s\u0075b":"bob"`), "stands twice"},
		"issuer twice":                 {header, body(`,"sub":"a","iss":"https://other"`), "stands twice"},
		"a name twice deep inside":     {header, body(`,"sub":"a","x":[{"y":{"z":1,"z":2}}]`), "stands twice"},
		"subject in capitals":          {header, body(`,"Sub":"alice"`), "in other letters"},
		"subject with a long s":        {header, body(`,"ſub":"alice"`), "in other letters"},
		"expiry in capitals":           {header, body(`,"sub":"a","EXP":4000000000`), "in other letters"},
		"algorithm twice":              {`{"alg":"EdDSA","alg":"none","kid":"d"}`, body(`,"sub":"a"`), "stands twice"},
		"algorithm in capitals":        {`{"Alg":"none","alg":"EdDSA","kid":"d"}`, body(`,"sub":"a"`), "in other letters"},
		"a demanded extension":         {`{"alg":"EdDSA","kid":"d","crit":["b64"],"b64":false}`, body(`,"sub":"a"`), "extension"},
		"header is a list":             {`["EdDSA"]`, body(`,"sub":"a"`), "header is not clear"},
		"payload is a list":            {header, `["alice"]`, "payload is not clear"},
		"payload is null":              {header, `null`, "payload is not clear"},
		"payload is cut":               {header, body("")[:20], "payload is not clear"},
		"payload and more":             {header, body("") + "{}", "payload is not clear"},
		"payload of deep lists":        {header, `{"x":` + strings.Repeat("[", 9000), "payload is not clear"},
		"subject is a number":          {header, body(`,"sub":7`), "malformed"},
		"subject is a list":            {header, body(`,"sub":["alice"]`), "malformed"},
		"issuer is a list":             {header, `{"iss":["` + p.URL + `"]}`, "names no issuer"},
		"invalid Unicode":              {header, body(",\"sub\":\"a\xff\""), "no valid Unicode"},
		"half a surrogate":             {header, body(`,"sub":"a\ud800"`), "no valid Unicode"},
		"the other half":               {header, body(`,"sub":"a\udc00"`), "no valid Unicode"},
		"newline in the subject":       {header, body(`,"sub":"alice\nadmitted"`), "control characters"},
		"screen codes in the subject":  {header, body(`,"sub":"\u001b[2Jalice"`), "control characters"},
		"nothing after a zero":         {header, body(`,"sub":"alice\u0000"`), "control characters"},
		"a logout notice":              {header, body(`,"sub":"a","events":{"http://schemas.openid.net/event/backchannel-logout":{}}`), "notice"},
		"expires beyond all calendars": {header, fmt.Sprintf(`{"iss":%q,"sub":"a","exp":1e15}`, p.URL), "beyond all calendars"},
		"begins beyond all calendars":  {header, body(`,"sub":"a","nbf":1e300`), "beyond all calendars"},
		"begins before time":           {header, body(`,"sub":"a","nbf":-1`), "beyond all calendars"},
		"acted for by nobody":          {header, body(`,"sub":"a","act":{}`), "names nobody"},
		"acted for by null":            {header, body(`,"sub":"a","act":null`), "act claim is no object"},
		"acted for by text":            {header, body(`,"sub":"a","act":"agent"`), "act claim is no object"},
		"acted for by an empty name":   {header, body(`,"sub":"a","act":{"sub":""}`), "names nobody"},
		"acted for by two":             {header, body(`,"sub":"a","act":{"sub":"x","sub":"y"}`), "stands twice"},
		"acted for by invalid Unicode": {header, body(`,"sub":"a","act":{"sub":"\ud800"}`), "no valid Unicode"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := v.Verify(t.Context(), signed(key, c.header, c.payload))
			wantKind(t, err, errkind.Unauthenticated)
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "alice") {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestOneSpellingOfAToken: what a careless decoder takes for the same token is
// refused.
func TestOneSpellingOfAToken(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", pub))
	v := verifier(t, Issuer{URL: p.URL})
	good := signed(key, header, fmt.Sprintf(`{"iss":%q,"aud":"a","exp":2000000000,"sub":"alice"}`, p.URL))
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := alphabet[strings.IndexByte(alphabet, good[len(good)-1])+1] // the same bytes to a careless decoder
	for name, token := range map[string]string{
		"broken into lines":  good[:30] + "\n" + good[30:],
		"as JSON":            `{"payload":"x","signatures":[{"protected":"x","signature":"x"}]}`,
		"encrypted, 5 parts": "eyJhbGciOiJSU0EtT0FFUCJ9.a.b.c.d",
		"padded":             strings.Replace(good, ".", "=.", 1),
		"another spelling":   good[:len(good)-1] + string(last),
	} {
		_, err := v.Verify(t.Context(), token)
		if errs.Kind(err) != errkind.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	if tok, err := v.Verify(t.Context(), good); err != nil || tok.Subject != "alice" {
		t.Errorf("%+v, %v", tok, err)
	}
}

// TestKeyConfusion: the issuer's public key, which everybody knows, is never
// taken for a shared secret, in any form that libraries have been tricked
// with; nor is a key that the token brings along.
func TestKeyConfusion(t *testing.T) {
	rk, _ := rsa.GenerateKey(rand.Reader, 2048)
	evilPub, evil, _ := ed25519.GenerateKey(rand.Reader)
	pub := public("r", &rk.PublicKey)
	p := newIDP(t, pub)
	der, _ := x509.MarshalPKIXPublicKey(&rk.PublicKey)
	doc, _ := pub.MarshalJSON()
	set, _ := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{pub}})
	v := verifier(t, Issuer{URL: p.URL})
	for name, secret := range map[string][]byte{
		"PEM":   pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}),
		"PKCS1": pem.EncodeToMemory(&pem.Block{Type: "RSA PUBLIC KEY", Bytes: x509.MarshalPKCS1PublicKey(&rk.PublicKey)}),
		"DER":   der, "JWK": doc, "JWKS": set, "modulus": rk.N.Bytes(),
	} {
		for _, alg := range []jose.SignatureAlgorithm{jose.HS256, jose.HS384, jose.HS512} {
			for _, kid := range []string{"r", "", "other"} {
				_, err := v.verify(t.Context(), mint(t, alg, kid, secret, claims(p.URL)))
				if errs.Kind(err) != errkind.Unauthenticated {
					t.Errorf("%s as %s, key %q: %v", name, alg, kid, err)
				}
			}
		}
	}
	jwk := jose.JSONWebKey{Key: evilPub, KeyID: "evil"}
	own, _ := jwk.MarshalJSON()
	payload, _ := json.Marshal(claims(p.URL))
	for name, h := range map[string]string{
		"its own key":            fmt.Sprintf(`{"alg":"EdDSA","jwk":%s}`, own),
		"its own key, named":     fmt.Sprintf(`{"alg":"EdDSA","kid":"r","jwk":%s}`, own),
		"where its key is":       `{"alg":"EdDSA","kid":"evil","jku":"https://evil.example/jwks"}`,
		"where its key is, X509": `{"alg":"EdDSA","kid":"evil","x5u":"https://evil.example/cert"}`,
		"a path as key":          `{"alg":"EdDSA","kid":"../../dev/null"}`,
		"none":                   `{"alg":"none"}`, "None": `{"alg":"None"}`, "no algorithm": `{}`, "algorithm is a list": `{"alg":["EdDSA"]}`,
	} {
		_, err := v.verify(t.Context(), signed(evil, h, string(payload)))
		if errs.Kind(err) != errkind.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSubjectsAreTakenByteForByte: none of them becomes another, whatever it
// looks like.
func TestSubjectsAreTakenByteForByte(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", pub))
	v := verifier(t, Issuer{URL: p.URL})
	seen := map[string]bool{}
	for _, sub := range []string{"alice", "Alice", "alice ", " alice", "аlice", "ａlice", "alice\u200b", "é", "e\u0301", "a.b", "a.*", ">", "*", "a b",
		"../alice", "alice@acme", "auth0|7", strings.Repeat("x", 5000)} {
		c := claims(p.URL)
		c["sub"] = sub
		tok, err := v.Verify(t.Context(), mint(t, jose.EdDSA, "d", key, c))
		if err != nil || tok.Subject != sub || seen[tok.Subject] {
			t.Errorf("%q became %q, %v", sub, tok.Subject, err)
		}
		seen[tok.Subject] = true
	}
}

func TestClaimsByName(t *testing.T) {
	pub, key, _ := ed25519.GenerateKey(rand.Reader)
	p := newIDP(t, public("d", pub))
	tok, err := verifier(t, Issuer{URL: p.URL}).Verify(t.Context(), signed(key, header, fmt.Sprintf(
		`{"iss":%q,"sub":"alice","plan":"team","n":7,"null":null,"empty":"","groups":["a","b"],"one":"admins","none":[],"mixed":["a",7],"holes":["a",null],
		"act":{"sub":"agent","iss":"https://other","act":{"sub":"earlier"}}}`, p.URL)))
	if err != nil {
		t.Fatal(err)
	}
	if tok.Acting != "agent" {
		t.Errorf("acting: %q", tok.Acting)
	}
	for name, want := range map[string]string{"plan": "team", "one": "admins", "empty": ""} {
		if got, ok := tok.Claim(name); !ok || got != want {
			t.Errorf("%s: %q, %v", name, got, ok)
		}
	}
	for _, name := range []string{"n", "null", "groups", "act", "absent", "Plan"} {
		if got, ok := tok.Claim(name); ok {
			t.Errorf("%s: %q", name, got)
		}
	}
	for name, want := range map[string][]string{"groups": {"a", "b"}, "one": {"admins"}, "none": {}, "mixed": nil, "holes": nil, "n": nil, "null": nil, "act": nil, "absent": nil} {
		if got := tok.List(name); !slices.Equal(got, want) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if (Token{}).List("groups") != nil {
		t.Error("the zero token has groups")
	}
}
