package leaks

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/proto"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
)

func b64(raw []byte) string { return base64.RawURLEncoding.EncodeToString(raw) }

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

func jws(header string) string {
	return b64([]byte(header)) + "." + b64([]byte(`{"iss":"https://issuer.example","sub":"ann"}`)) + "." + b64(random(64))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// plants are secrets of every kind, by what they are found as.
func plants() map[string][]string {
	ec := must(x509.MarshalPKCS8PrivateKey(must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))))
	_, priv, _ := ed25519.GenerateKey(rand.Reader)
	out := map[string][]string{
		"a token": {jws(`{"alg":"RS256","typ":"JWT"}`), jws(`{ "alg":"ES256"}`), jws("{\n\"alg\":\"EdDSA\"}"), jws(`{"typ":"JWT","alg":"ed25519-nkey"}`),
			b64([]byte(`{"alg":"none"}`)) + "." + b64([]byte(`{"sub":"ann"}`)) + ".",
			b64([]byte(`{"alg":"RS256","kid":"`+strings.Repeat("k", 1000)+`"}`)) + "." + b64(random(500<<10)) + "." + b64(random(256))},
		"a grant": {jws(`{"alg":"EdDSA","kid":"g1","typ":"berth-grant+jwt"}`)},
		"a private key as PEM": {string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: ec})),
			string(must(json.Marshal(string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: ec}))))), "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk="},
		"a private key as JWK": {`{"kty":"OKP","crv":"Ed25519","d":"` + b64(priv.Seed()) + `","x":"` + b64(random(32)) + `"}`},
	}
	for _, kind := range []nkeys.PrefixByte{nkeys.PrefixByteUser, nkeys.PrefixByteAccount, nkeys.PrefixByteOperator, nkeys.PrefixByteServer, nkeys.PrefixByteCluster} {
		out["a seed of a NATS key"] = append(out["a seed of a NATS key"], string(must(must(nkeys.CreatePair(kind)).Seed())))
	}
	out["a seed of a NATS key"] = append(out["a seed of a NATS key"], string(must(must(nkeys.CreateCurveKeys()).Seed())))
	return out
}

// TestEveryPlantedSecretIsFound in the ways in which one ends up in a file.
func TestEveryPlantedSecretIsFound(t *testing.T) {
	around := map[string]func(string) []byte{
		"alone":    func(s string) []byte { return []byte(s) },
		"log line": func(s string) []byte { return fmt.Appendf(nil, "level=ERROR msg=%q token=%s other=1\n", "x", s) },
		"JSON": func(s string) []byte {
			return must(json.Marshal(map[string]any{"authorization": "Bearer " + strings.ReplaceAll(s, "\n", "")}))
		},
		"protobuf": func(s string) []byte { return must(proto.Marshal(&identityv1.Envelope{Verb: "open", Token: s})) },
		"binary":   func(s string) []byte { return append(append(random(70000), s...), random(70000)...) },
		"base64": func(s string) []byte {
			return fmt.Appendf(nil, `{"body":"%s"}`, base64.StdEncoding.EncodeToString([]byte(`{"x":"`+s+`"}`)))
		},
		"base64 of protobuf": func(s string) []byte {
			return []byte(b64(must(proto.Marshal(&identityv1.Envelope{RequestId: "r", Token: s}))))
		},
	}
	for what, secrets := range plants() {
		for i, secret := range secrets {
			for how, put := range around {
				if how == "JSON" && (what == "a private key as JWK" || strings.HasPrefix(secret, `"`)) {
					continue // quoted twice
				}
				found := must((&Scanner{}).Reader("f", bytes.NewReader(put(secret))))
				if !has(found, what) {
					t.Errorf("%s %d, %s: not found (%v)", what, i, how, found)
				}
				for _, f := range found {
					if strings.Contains(f.String(), secret[10:20]) {
						t.Errorf("the finding repeats the secret")
					}
				}
			}
		}
	}
}

func has(found []Finding, what string) bool {
	for _, f := range found {
		if f.What == what || f.What == what+" inside base64" {
			return true
		}
	}
	return false
}

// TestASecretAtTheEdgeOfAWindowIsFound: a file is read in pieces.
func TestASecretAtTheEdgeOfAWindowIsFound(t *testing.T) {
	token := jws(`{"alg":"RS256"}`)
	for _, at := range []int{window - 100, window, window + overlap - 50, window + overlap, 2*window + overlap - 3} {
		r := io.MultiReader(io.LimitReader(zeros{}, int64(at)), strings.NewReader(token), io.LimitReader(zeros{}, window))
		found := must((&Scanner{}).Reader("f", r))
		if len(found) != 1 || found[0].Offset != int64(at) {
			t.Errorf("at %d: %v", at, found)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestWhatIsNoSecretIsNotFound: what Berth's logs and stores are full of.
func TestWhatIsNoSecretIsNotFound(t *testing.T) {
	user := must(nkeys.CreateUser())
	box := must(seal.RandomBox())
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: random(600)})
	for _, text := range []string{
		must(user.PublicKey()), box.Public(), string(cert), "-----BEGIN PUBLIC KEY-----\nMCow",
		string(ids.DeriveSessionKey(random(32), "i", "t", "s", "n")), "S" + strings.Repeat("A", 57), strings.ToUpper(hex.EncodeToString(random(64))),
		"www.example.com/a.b.c", "eyJ.eyJ.eyJ", b64([]byte(`{"no":"header"}`)) + "." + b64(random(40)) + "." + b64(random(40)),
		b64(random(4000)), `the file begins with -----BEGIN PRIVATE KEY-----`, `{"d":"short","kty":"OKP"}`, "go1.26.6 SUCCESS v1.2.3",
		`{"kty":"OKP","x":"` + b64(random(32)) + `"}`, "",
	} {
		if found := must((&Scanner{}).Reader("f", strings.NewReader(text))); len(found) > 0 {
			t.Errorf("%.60q: %v", text, found)
		}
	}
	if found := must((&Scanner{}).Reader("f", bytes.NewReader(random(8<<20)))); len(found) > 0 {
		t.Errorf("random bytes: %v", found)
	}
}

func TestRegisteredValuesAreFoundInEveryForm(t *testing.T) {
	s, secret := &Scanner{}, random(32)
	if err := s.Register("the platform's key", secret); err != nil {
		t.Fatal(err)
	}
	for how, form := range map[string]string{"raw": string(secret), "hex": hex.EncodeToString(secret), "HEX": fmt.Sprintf("%X", secret),
		"base64": base64.StdEncoding.EncodeToString(secret), "base64url": b64(secret),
		"inside base64": base64.StdEncoding.EncodeToString(append(random(31), append(secret, random(40)...)...))} {
		found := must(s.Reader("f", strings.NewReader("x "+form+" y")))
		if len(found) == 0 || !strings.HasPrefix(found[0].What, "the platform's key") {
			t.Errorf("%s: %v", how, found)
		}
	}
	if s.Register("short", []byte("abc")) == nil {
		t.Error("a value of three bytes was registered")
	}
}

// TestAnInstallationIsSearchedWhole: secrets are where they belong and nowhere
// else, also if the folder changes meanwhile.
func TestAnInstallationIsSearchedWhole(t *testing.T) {
	dir := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	key, seed := base64.StdEncoding.EncodeToString(random(32)), string(must(must(nkeys.CreateUser()).Seed()))
	hostKey := b64(random(32))
	put("keys/identity-session.json", `{"keys":[{"version":1,"secret":"`+key+`"}]}`)
	put("keys/svc-identity.nk", seed)
	put("clients/fe-acme-web.json", `{"seed":"`+seed+`","url":"nats://127.0.0.1:4222"}`)
	put("tls/ca.key", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: random(120)})))
	put("host/local/host.key", hostKey)
	put("host/local/disks/1/file", jws(`{"alg":"RS256"}`)) // a user's own
	put("up.log", "all is well")
	put("up.json", `{"URL":"nats://127.0.0.1:4222"}`)
	if err := os.Symlink(filepath.Join(dir, "keys"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if found, err := Installation(dir); err != nil || len(found) > 0 {
		t.Fatalf("where they belong: %v, %v", found, err)
	}
	rawKey := must(base64.StdEncoding.DecodeString(key))
	for path, text := range map[string]string{
		"up.log":                             "secret=" + key,
		"log/host-1.log":                     "seed " + seed,
		"bus/jetstream/BERTH_AUDIT/msgs.blk": "\x00\x01" + jws(`{"alg":"EdDSA","typ":"berth-grant+jwt"}`) + "\x00",
		"spans.json":                         `{"token":"` + jws(`{"alg":"RS256"}`) + `"}`,
		"scheduler/raft.db":                  "\x00" + string(rawKey),
		"host/local/crash":                   "goroutine 1:\n" + hex.EncodeToString(rawKey),
		"host/local/run/x/session.json":      hostKey,
	} {
		had, err := os.ReadFile(filepath.Join(dir, path))
		put(path, string(had)+text)
		if found, ferr := Installation(dir); ferr != nil || len(found) == 0 || found[0].File != path {
			t.Errorf("%s: %v, %v", path, found, ferr)
		}
		if err != nil {
			had = nil
		}
		put(path, string(had))
	}
}

func FuzzScan(f *testing.F) {
	for _, secrets := range plants() {
		for _, s := range secrets {
			f.Add([]byte(s[:min(len(s), 4096)]))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, x := range (&Scanner{}).scan(b) {
			if x.Offset < 0 || x.Offset >= int64(len(b)) || x.What == "" {
				t.Fatalf("%+v in %d bytes", x, len(b))
			}
		}
	})
}

// BenchmarkScan is how fast the store of a run is read: logs and random bytes.
func BenchmarkScan(b *testing.B) {
	line := []byte(`{"time":"2026-01-02T03:04:05Z","level":"INFO","msg":"woken","session":"` + string(ids.DeriveSessionKey(nil, "", "", "", "")) + `","body":"` + b64(random(300)) + `"}` + "\n")
	data := append(bytes.Repeat(line, 8192), random(4<<20)...)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		(&Scanner{}).scan(data)
	}
}
