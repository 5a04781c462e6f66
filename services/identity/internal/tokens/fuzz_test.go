package tokens

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"
)

// FuzzToken: whatever comes, taking a token apart ends, and what passes means
// the same to the library that then verifies it.
func FuzzToken(f *testing.F) {
	b64 := base64.RawURLEncoding.EncodeToString
	for _, payload := range []string{`{"iss":"https://idp","sub":"a"}`, `{"iss":"a","ISS":"b"}`, `{"iss":"a","iss":"b"}`, `[`, `null`, `{"iss":"\ud800"}`} {
		f.Add(b64([]byte(header)) + "." + b64([]byte(payload)) + ".c2ln")
	}
	f.Add("opaque")
	f.Add("..")
	f.Add(strings.Repeat("a.", 10))
	f.Fuzz(func(t *testing.T, raw string) {
		iss, _, err := unverified(raw)
		if err != nil {
			if strings.Contains(err.Error(), "\n") || len(err.Error()) > 300 {
				t.Errorf("no short sentence: %q", err)
			}
			return
		}
		if iss == "" || len(raw) > MaxBytes {
			t.Errorf("%q passed", raw)
		}
		part, err := base64.RawURLEncoding.DecodeString(strings.Split(raw, ".")[1])
		if err != nil {
			t.Fatal(err)
		}
		var lax struct {
			Issuer string `json:"iss"`
		}
		if err := json.Unmarshal(part, &lax); err != nil || lax.Issuer != iss {
			t.Errorf("the issuer is %q here and %q there, %v", iss, lax.Issuer, err)
		}
		if jws, err := jose.ParseSigned(raw, []jose.SignatureAlgorithm{jose.EdDSA}); err == nil && string(jws.UnsafePayloadWithoutVerification()) != string(part) {
			t.Error("the payload differs")
		}
	})
}

// FuzzJWKS: whatever an issuer answers, reading it ends, and only keys that a
// signature may be verified with come out.
func FuzzJWKS(f *testing.F) {
	for _, raw := range []string{`{"keys":[]}`, `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"d","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}`,
		`{"keys":[{"kty":"EC","crv":"P-256","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}]}`,
		`{"keys":[{"kty":"oct","k":"AA"}]}`, `{"keys":[{"kty":"RSA","n":"AQ","e":"AQAB"}]}`, `{"keys":7}`, `[`, ``} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		keys, err := parseJWKS(raw)
		if err != nil {
			if len(err.Error()) > 300 {
				t.Errorf("no short sentence: %q", err)
			}
			return
		}
		if len(keys) == 0 || len(keys) > maxKeys {
			t.Errorf("%d keys", len(keys))
		}
		for _, k := range keys {
			if !k.IsPublic() || !k.Valid() {
				t.Errorf("no public key: %T", k.Key)
			}
		}
	})
}
