// Package platformtest has fakes of key services for tests. They speak as much
// of the protocol as the drivers use and are no proof that the real services
// answer alike. Keys are random and end with the test.
package platformtest

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// Token is what the fake of Vault wants.
const Token = "test-token"

// Fake is a key service with one key.
type Fake struct {
	URL string // of the server
	// Calls counts what reached the service.
	Calls atomic.Int64

	// Serve answers as usual; for Fail, which may only want to do something first.
	Serve http.HandlerFunc

	fail atomic.Pointer[func(http.ResponseWriter, *http.Request)]
	aead cipher.AEAD
}

// Fail answers every request with do; nil: as usual.
func (f *Fake) Fail(do func(http.ResponseWriter, *http.Request)) {
	if do == nil {
		f.fail.Store(nil)
		return
	}
	f.fail.Store(&do)
}

// Answer is for Fail: the same status and body each time.
func Answer(status int, body string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

func start(t testing.TB, serve func(*Fake, http.ResponseWriter, *http.Request)) *Fake {
	t.Helper()
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	f := &Fake{}
	f.Serve = func(w http.ResponseWriter, r *http.Request) { serve(f, w, r) }
	if f.aead, err = cipher.NewGCMWithRandomNonce(block); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.Calls.Add(1)
		// A server notices that a client has gone only once the body was read.
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		if do := f.fail.Load(); do != nil {
			(*do)(w, r)
			return
		}
		f.Serve(w, r)
	}))
	t.Cleanup(srv.Close)
	f.URL = srv.URL
	return f
}

// Vault starts a fake of Vault's transit engine with the key "berth", and
// points the environment at it.
func Vault(t *testing.T) *Fake {
	f := start(t, (*Fake).transit)
	for name, value := range map[string]string{"VAULT_SERVER_URL": f.URL, "VAULT_SERVER_TOKEN": Token,
		"VAULT_ADDR": "", "VAULT_TOKEN": "", "VAULT_AGENT_ADDR": "", "VAULT_NAMESPACE": ""} {
		t.Setenv(name, value)
	}
	return f
}

func (f *Fake) transit(w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, why string) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]any{"errors": []string{why}})
	}
	var in struct{ Plaintext, Ciphertext string }
	if r.Header.Get("X-Vault-Token") != Token {
		refuse(http.StatusForbidden, "permission denied")
		return
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		refuse(http.StatusBadRequest, err.Error())
		return
	}
	out := map[string]string{}
	switch r.URL.Path {
	case "/v1/transit/encrypt/berth":
		plain, err := base64.StdEncoding.DecodeString(in.Plaintext)
		if err != nil {
			refuse(http.StatusBadRequest, err.Error())
			return
		}
		out["ciphertext"] = "vault:v1:" + base64.StdEncoding.EncodeToString(f.aead.Seal(nil, nil, plain, nil))
	case "/v1/transit/decrypt/berth":
		raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(in.Ciphertext, "vault:v1:"))
		if err != nil {
			refuse(http.StatusBadRequest, "invalid ciphertext: could not decode base64")
			return
		}
		plain, err := f.aead.Open(nil, nil, raw, nil)
		if err != nil {
			refuse(http.StatusBadRequest, "cipher: message authentication failed")
			return
		}
		out["plaintext"] = base64.StdEncoding.EncodeToString(plain)
	default:
		refuse(http.StatusBadRequest, "encryption key not found")
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"data": out})
}

// KMS starts a fake of AWS KMS and returns it with the URL of its key;
// credentials of no use are put into the environment.
func KMS(t *testing.T) (*Fake, string) {
	f := start(t, (*Fake).kms)
	for name, value := range map[string]string{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
		"AWS_SESSION_TOKEN": "", "AWS_PROFILE": "", "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"} {
		t.Setenv(name, value)
	}
	return f, "awskms://alias/berth?region=eu-central-1&endpoint=" + f.URL
}

func (f *Fake) kms(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-amz-json-1.1")
	refuse := func(kind string) {
		w.WriteHeader(http.StatusBadRequest)
		_ = json.NewEncoder(w).Encode(map[string]string{"__type": kind})
	}
	var in struct {
		KeyID                     string `json:"KeyId"`
		Plaintext, CiphertextBlob []byte
	}
	if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
		refuse("ValidationException")
		return
	}
	out := map[string]any{"KeyId": "arn:aws:kms:eu-central-1:111122223333:key/berth"}
	switch r.Header.Get("X-Amz-Target") {
	case "TrentService.Encrypt":
		if in.KeyID != "alias/berth" {
			refuse("NotFoundException")
			return
		}
		out["CiphertextBlob"] = f.aead.Seal(nil, nil, in.Plaintext, nil)
	case "TrentService.Decrypt":
		plain, err := f.aead.Open(nil, nil, in.CiphertextBlob, nil)
		if err != nil {
			refuse("InvalidCiphertextException")
			return
		}
		out["Plaintext"] = plain
	default:
		refuse("UnknownOperationException")
		return
	}
	_ = json.NewEncoder(w).Encode(out)
}
