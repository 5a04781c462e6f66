package tokens

import (
	"os"
	"path/filepath"
	"testing"
)

// A file of one issuer that is gone leaves that issuer its keys, and keeps no other issuer's keys in use
// that were taken out of the registry.
func TestAFileThatIsGoneKeepsNobodyElsesKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.json")
	key := `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}`
	if err := os.WriteFile(file, []byte(key), 0o600); err != nil {
		t.Fatal(err)
	}
	filed := Issuer{URL: "https://file.example", JWKSFile: file}
	v, err := New([]Issuer{filed, {URL: "https://gone.example", JWKS: []byte(key)}, {URL: "https://other.example", JWKS: []byte(key)}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	next, err := v.With([]Issuer{filed, {URL: "https://other.example", JWKS: []byte(key), Algs: []string{"EdDSA"}}})
	if err == nil || next == nil {
		t.Fatalf("a file that is gone: %v", err)
	}
	if next.issuers["https://gone.example"] != nil || next.issuers["https://other.example"] == v.issuers["https://other.example"] {
		t.Error("keys from before are in use that the registry does not have any more")
	}
	if next.issuers[filed.URL] == nil || next.issuers[filed.URL] != v.issuers[filed.URL] {
		t.Error("the issuer whose file is gone lost its keys")
	}
	filed.Algs = []string{"ES256"}
	if next, _ = v.With([]Issuer{filed}); next.issuers[filed.URL] != nil {
		t.Error("an issuer that changed is verified as before")
	}
	if v, err := New([]Issuer{filed}, nil); err == nil || v != nil {
		t.Error("a verifier begins without the keys of an issuer")
	}
}
