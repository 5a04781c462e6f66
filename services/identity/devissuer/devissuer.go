// Package devissuer is a small but real OIDC issuer for one machine: a
// discovery document and a key set for each tenant on a loopback address. It
// guarantees that nobody gets a token over the network: there is no token
// endpoint, and tokens are made by Mint, which needs the key file that only
// its owner can read. Its address is chosen once and kept, because users'
// sessions hang on the issuer's URL. It is not for production.
package devissuer

import (
	"context"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/identity"
)

// Audience is the aud claim of every token made here.
const Audience = "berth"

// GroupsClaim lists a user's groups; users of AdminGroup are administrators of
// their tenant.
const (
	GroupsClaim = "groups"
	AdminGroup  = "administrators"
)

// DefaultTTL is how long a token lives unless Mint is told otherwise.
const DefaultTTL = time.Hour

const (
	keyFile     = "dev-issuer-key.json"
	addressFile = "dev-issuer.json"
	tenantsFile = "dev-issuer-tenants.json"
	discovery   = "/.well-known/openid-configuration"
)

// Config says where the issuer keeps its key and its address, and for whom it
// issues.
type Config struct {
	Dir     string
	Tenants []ids.Tenant
}

// Run serves until ctx ends and calls ready once it listens. A port that was
// taken by another program since the last start is refused in one sentence.
func Run(ctx context.Context, cfg Config, log *slog.Logger, ready func()) error {
	keys, err := keyfile.Open(filepath.Join(cfg.Dir, keyFile))
	if err != nil {
		return err
	}
	address, err := Address(cfg.Dir)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return errs.Errorf("start the dev issuer", errkind.Unavailable,
			"%s is taken by another program; end it, or remove %s to choose another address, which gives every user new sessions",
			address, filepath.Join(cfg.Dir, addressFile))
	}
	if err := record(cfg); err != nil {
		_ = l.Close()
		return errs.E("start the dev issuer", errkind.Unavailable, "", err)
	}
	srv := &http.Server{Handler: handler("http://"+address, keys, cfg.Tenants), ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	ready()
	select {
	case err := <-done:
		return errs.E("serve the dev issuer", errkind.Internal, "", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		_ = srv.Close() // idle or slow readers of public documents
	}
	<-done
	return nil
}

// record has Serves know whom the issuer that was started last issues for.
func record(cfg Config) error {
	raw, err := json.Marshal(cfg.Tenants)
	if err != nil {
		return err
	}
	tmp := filepath.Join(cfg.Dir, "."+tenantsFile)
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(cfg.Dir, tenantsFile))
}

// Serves reports whether the issuer of dir has a tenant. One that recorded none may have every tenant.
func Serves(dir string, t ids.Tenant) bool {
	var all []ids.Tenant
	raw, err := os.ReadFile(filepath.Join(dir, tenantsFile))
	return err != nil || json.Unmarshal(raw, &all) != nil || slices.Contains(all, t)
}

type address struct {
	Listen string `json:"listen"`
}

// Address returns where the issuer of dir listens, and chooses a free port of
// the loopback address the first time.
func Address(dir string) (string, error) {
	const op = "choose the address of the dev issuer"
	path := filepath.Join(dir, addressFile)
	if a, err := readAddress(path); !errors.Is(err, fs.ErrNotExist) {
		return a, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", errs.E(op, errkind.Unavailable, "", err)
	}
	chosen := l.Addr().String()
	_ = l.Close()
	raw, err := json.Marshal(address{chosen})
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return "", errs.E(op, errkind.Unavailable, "", err)
	}
	f, err := os.CreateTemp(dir, ".dev-issuer-*") // mode 0600
	if err != nil {
		return "", errs.E(op, errkind.Unavailable, "", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(raw, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return "", errs.E(op, errkind.Unavailable, "", err)
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", errs.E(op, errkind.Unavailable, "", err)
	}
	return readAddress(path)
}

func readAddress(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", errs.E("read the address of the dev issuer", errkind.Unavailable, "", err)
	}
	var a address
	if err := json.Unmarshal(raw, &a); err != nil {
		return "", errs.E("read the address of the dev issuer", errkind.DataLoss, path, err)
	}
	host, _, err := net.SplitHostPort(a.Listen)
	if err != nil || !net.ParseIP(host).IsLoopback() {
		return "", errs.Errorf("read the address of the dev issuer", errkind.Invalid, "%s names no loopback address", path)
	}
	return a.Listen, nil
}

// URL is the issuer of a tenant's users.
func URL(dir string, t ids.Tenant) (string, error) {
	a, err := Address(dir)
	return "http://" + a + "/" + string(t), err
}

// Entry registers a tenant's issuer with identity.
func Entry(dir string, t ids.Tenant, plan string) (identity.Issuer, error) {
	url, err := URL(dir, t)
	return identity.Issuer{Issuer: url, Audience: Audience, Tenant: string(t), Plan: plan, Algorithms: []string{string(jose.EdDSA)},
		GroupsClaim: GroupsClaim, AdminGroups: []string{AdminGroup}}, err
}

// User is whom a token is made for.
type User struct {
	Tenant  ids.Tenant
	Subject string
	TTL     time.Duration // default DefaultTTL
	// Groups go into the claim GroupsClaim; AdminGroup makes an administrator
	// of the tenant.
	Groups []string
}

// Mint makes a token of a tenant's user, valid from now. It needs the key
// file and the address that Run made, not a running issuer.
func Mint(dir string, u User, now time.Time) (string, error) {
	const op = "make dev token"
	if _, err := ids.ParseTenant(string(u.Tenant)); err != nil {
		return "", errs.E(op, errkind.Invalid, "", err)
	}
	if u.Subject == "" || len(u.Subject) > 255 {
		return "", errs.E(op, errkind.Invalid, "", "the user's name must be 1 to 255 bytes long")
	}
	if u.TTL <= 0 {
		u.TTL = DefaultTTL
	}
	claims := map[string]any{"sub": u.Subject, "iat": now.Unix(), "exp": now.Add(u.TTL).Unix()}
	if len(u.Groups) > 0 {
		claims[GroupsClaim] = u.Groups
	}
	return sign(op, dir, u.Tenant, claims)
}

// sign makes a token of a tenant's issuer with these claims.
func sign(op, dir string, t ids.Tenant, claims map[string]any) (string, error) {
	keys, err := keyfile.Read(filepath.Join(dir, keyFile))
	if err != nil {
		return "", errs.Wrap(op, "", err)
	}
	listen, err := readAddress(filepath.Join(dir, addressFile))
	if err != nil {
		return "", errs.Wrap(op, "", err)
	}
	key := jose.JSONWebKey{Key: secret(keys.Newest(), t), KeyID: kid(keys.Newest())}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.EdDSA, Key: key}, (&jose.SignerOptions{}).WithType("JWT"))
	if err != nil {
		return "", errs.E(op, errkind.Internal, "", err)
	}
	claims["iss"], claims["aud"] = "http://"+listen+"/"+string(t), Audience
	raw, err := json.Marshal(claims)
	if err != nil {
		return "", errs.E(op, errkind.Internal, "", err)
	}
	jws, err := signer.Sign(raw)
	if err != nil {
		return "", errs.E(op, errkind.Internal, "", err)
	}
	return jws.CompactSerialize()
}

// secret is a tenant's signing key: each tenant has one of its own, so that
// a token of one issuer is never good for another.
func secret(k keyfile.Key, t ids.Tenant) ed25519.PrivateKey {
	mac := hmac.New(sha256.New, k.Secret)
	mac.Write([]byte("berth/v1/dev-issuer/" + string(t)))
	return ed25519.NewKeyFromSeed(mac.Sum(nil))
}

func kid(k keyfile.Key) string { return "dev-" + strconv.FormatUint(uint64(k.Version), 10) }

// handler serves documents that anyone may read, and nothing else.
func handler(base string, keys keyfile.Keys, tenants []ids.Tenant) http.Handler {
	mux := http.NewServeMux()
	for _, t := range tenants {
		issuer := base + "/" + string(t)
		doc := map[string]any{
			"issuer": issuer, "jwks_uri": issuer + "/jwks", "response_types_supported": []string{"id_token"},
			"subject_types_supported": []string{"public"}, "id_token_signing_alg_values_supported": []string{string(jose.EdDSA)},
		}
		set := jose.JSONWebKeySet{}
		for _, k := range keys {
			set.Keys = append(set.Keys, jose.JSONWebKey{Key: secret(k, t).Public(), KeyID: kid(k), Algorithm: string(jose.EdDSA), Use: "sig"})
		}
		mux.HandleFunc("GET /"+string(t)+discovery, serveJSON(doc))
		mux.HandleFunc("GET /"+string(t)+"/jwks", serveJSON(set))
	}
	return mux
}

func serveJSON(v any) http.HandlerFunc {
	raw, err := json.Marshal(v)
	return func(w http.ResponseWriter, _ *http.Request) {
		if err != nil {
			http.Error(w, fmt.Sprintf("encode: %v", err), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "max-age=60")
		_, _ = w.Write(raw)
	}
}
