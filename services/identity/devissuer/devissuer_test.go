package devissuer

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// run starts an issuer and returns a function that stops it.
func run(t *testing.T, dir string) func() {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{Dir: dir, Tenants: []ids.Tenant{"acme", "globex"}}, bustest.Log(t), func() { close(ready) })
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func verify(t *testing.T, dir string, of ids.Tenant, token string) error {
	t.Helper()
	url, err := URL(dir, of)
	if err != nil {
		t.Fatal(err)
	}
	p, err := oidc.NewProvider(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Verifier(&oidc.Config{ClientID: Audience}).Verify(t.Context(), token)
	return err
}

func TestTokensAreThoseOfARealIssuer(t *testing.T) {
	dir := t.TempDir()
	defer run(t, dir)()
	token, err := Mint(dir, User{Tenant: "acme", Subject: "alice"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(t, dir, "acme", token); err != nil {
		t.Error(err)
	}
	if err := verify(t, dir, "globex", token); err == nil {
		t.Error("a token of one tenant is good at another's issuer")
	}
	old, err := Mint(dir, User{Tenant: "acme", Subject: "alice", TTL: time.Minute}, time.Now().Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(t, dir, "acme", old); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an expired token: %v", err)
	}
}

func TestAddressOutlivesARestart(t *testing.T) {
	dir := t.TempDir()
	run(t, dir)()
	first, err := URL(dir, "acme")
	if err != nil {
		t.Fatal(err)
	}
	defer run(t, dir)()
	if again, err := URL(dir, "acme"); err != nil || again != first {
		t.Errorf("%s, then %s, %v", first, again, err)
	}
}

func TestNothingElseIsServed(t *testing.T) {
	dir := t.TempDir()
	defer run(t, dir)()
	a, err := Address(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/", "/acme", "/acme/token", "/none/jwks", "/acme/jwks/../../dev-issuer-key.json", "/acme/authorize"} {
		resp, err := http.Get("http://" + a + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	resp, err := http.Post("http://"+a+"/acme/jwks", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		t.Error("POST is served")
	}
}

func TestAPortTakenIsOneSentence(t *testing.T) {
	dir := t.TempDir()
	a, err := Address(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", a)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = Run(t.Context(), Config{Dir: dir}, bustest.Log(t), func() { t.Error("it started") })
	if !errs.Is(err, errkind.Unavailable) || !strings.Contains(err.Error(), "taken") {
		t.Error(err)
	}
}

func TestMintNeedsTheKeyFile(t *testing.T) {
	dir := t.TempDir()
	if _, err := Mint(dir, User{Tenant: "acme", Subject: "alice"}, time.Now()); err == nil {
		t.Error("made a token without a key")
	}
	run(t, dir)()
	if err := os.Chmod(filepath.Join(dir, keyFile), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Mint(dir, User{Tenant: "acme", Subject: "alice"}, time.Now()); !errs.Is(err, errkind.Denied) {
		t.Errorf("a key file that others can read: %v", err)
	}
	for _, u := range []User{{Tenant: "../x", Subject: "a"}, {Tenant: "acme"}} {
		if _, err := Mint(dir, u, time.Now()); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%+v: %v", u, err)
		}
	}
}
