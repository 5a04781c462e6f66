package main

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/services/identity/tokencore"
	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	verifyTime = 2 * time.Second
	distinct   = 500 // tokens of one round, so that none is verified twice by one verifier
	issuer     = "https://idp.example"
)

// verify measures one core, for each algorithm that is allowed by default: tokens seen for the first time, and
// one that is sent again and again.
func (b *bench) verify(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	ec, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	rs, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		alg jose.SignatureAlgorithm
		key crypto.Signer
	}{{jose.EdDSA, ed}, {jose.ES256, ec}, {jose.RS256, rs}} {
		if err := b.algorithm(ctx, dir, c.alg, c.key); err != nil {
			return fmt.Errorf("%s: %w", c.alg, err)
		}
	}
	return nil
}

func (b *bench) algorithm(ctx context.Context, dir string, alg jose.SignatureAlgorithm, key crypto.Signer) error {
	list, err := mint(alg, key)
	if err != nil {
		return err
	}
	set, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "one", Use: "sig"}}})
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "jwks.json")
	if err := os.WriteFile(file, set, 0o600); err != nil {
		return err
	}
	bare, err := rate(ctx, func() (int, error) { return len(list), bareVerify(list, alg, key.Public()) })
	if err != nil {
		return err
	}
	fresh, err := rate(ctx, func() (int, error) {
		v, err := tokencore.New([]tokencore.Issuer{{URL: issuer, JWKSFile: file}})
		if err != nil {
			return 0, err
		}
		return len(list), verifyAll(ctx, v, list)
	})
	if err != nil {
		return err
	}
	v, err := tokencore.New([]tokencore.Issuer{{URL: issuer, JWKSFile: file}})
	if err != nil {
		return err
	}
	again, err := rate(ctx, func() (int, error) { return len(list), verifyAll(ctx, v, list) })
	if err != nil {
		return err
	}
	peer := "go-jose parses and verifies the same tokens"
	b.set.Add(figures.Result{Name: fmt.Sprintf("verifications a second on one core, %s, new tokens", alg), Value: fresh, Unit: "1/s", Floor: bare, FloorOf: peer}, atLeast(0.5))
	b.set.Add(figures.Result{Name: fmt.Sprintf("verifications a second on one core, %s, tokens sent again", alg), Value: again, Unit: "1/s", Floor: bare, FloorOf: peer}, atLeast(1))
	return nil
}

func mint(alg jose.SignatureAlgorithm, key crypto.Signer) ([]string, error) {
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: jose.JSONWebKey{Key: key, KeyID: "one"}}, (&jose.SignerOptions{}).WithType("JWT"))
	if err != nil {
		return nil, err
	}
	list := make([]string, distinct)
	for i := range list {
		now := time.Now()
		claims, err := json.Marshal(map[string]any{"iss": issuer, "sub": fmt.Sprint("user-", i), "aud": "berth", "iat": now.Unix(),
			"exp": now.Add(time.Hour).Unix(), "groups": []string{"staff"}, "plan": "team"})
		if err != nil {
			return nil, err
		}
		jws, err := signer.Sign(claims)
		if err != nil {
			return nil, err
		}
		if list[i], err = jws.CompactSerialize(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func bareVerify(list []string, alg jose.SignatureAlgorithm, key crypto.PublicKey) error {
	for _, token := range list {
		jws, err := jose.ParseSigned(token, []jose.SignatureAlgorithm{alg})
		if err != nil {
			return err
		}
		if _, err := jws.Verify(key); err != nil {
			return err
		}
	}
	return nil
}

func verifyAll(ctx context.Context, v *tokencore.Verifier, list []string) error {
	for _, token := range list {
		if _, err := v.Verify(ctx, token); err != nil {
			return err
		}
	}
	return nil
}

// rate runs f, on one goroutine, and returns how many a second it did.
func rate(ctx context.Context, f func() (int, error)) (float64, error) {
	n, began := 0, time.Now()
	for time.Since(began) < verifyTime && ctx.Err() == nil {
		did, err := f()
		if err != nil {
			return 0, err
		}
		n += did
	}
	return float64(n) / time.Since(began).Seconds(), ctx.Err()
}
