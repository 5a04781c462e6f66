package tokens

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/go-jose/go-jose/v4"
)

const (
	// maxAnswer bounds what is read of an issuer's answer, unpacked.
	maxAnswer = 1 << 20
	// maxKeys bounds a key set.
	maxKeys = 128
	// RSA keys outside these bounds, in bits, are not used: shorter ones can
	// be broken, longer ones make a verification expensive.
	minRSA, maxRSA = 2048, 8192
	maxRedirects   = 3
)

// guarded is a client that reads no answer beyond its bound and follows no
// redirect to where somebody can listen in.
func guarded(client *http.Client) *http.Client {
	c := *client
	c.Transport = bounded{client.Transport}
	c.CheckRedirect = func(r *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects {
			return errors.New("too many redirects")
		}
		return checkFetch(r.URL.String())
	}
	return &c
}

// bounded bounds the bodies of answers.
type bounded struct{ next http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	next := b.next
	if next == nil {
		next = http.DefaultTransport
	}
	resp, err := next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	resp.Body = &body{ReadCloser: resp.Body, left: maxAnswer}
	return resp, nil
}

type body struct {
	io.ReadCloser
	left int
}

func (b *body) Read(p []byte) (int, error) {
	if b.left <= 0 {
		// It may end exactly here.
		if n, err := b.ReadCloser.Read(make([]byte, 1)); n == 0 {
			return 0, err
		}
		return 0, fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// get reads one answer.
func get(ctx context.Context, client *http.Client, address string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	req.Header.Set("Cache-Control", "no-cache")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the answer is %s", resp.Status)
	}
	return io.ReadAll(resp.Body)
}

// parseJWKS reads the keys of a set that signatures may be verified with:
// public ones for signing. Others are left out, as RFC 7517 section 5 asks.
func parseJWKS(raw []byte) ([]jose.JSONWebKey, error) {
	if len(raw) > maxAnswer {
		return nil, fmt.Errorf("the key set is longer than %d bytes", maxAnswer)
	}
	members, err := object(raw)
	if err != nil {
		return nil, fmt.Errorf("the key set is no JSON object whose names stand once: %w", err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(members["keys"], &list); err != nil {
		return nil, errors.New("the key set has no list of keys")
	}
	if len(list) > maxKeys {
		return nil, fmt.Errorf("the key set has %d keys, at most %d are read", len(list), maxKeys)
	}
	keys := []jose.JSONWebKey{}
	for _, raw := range list {
		var k jose.JSONWebKey
		if err := k.UnmarshalJSON(raw); err == nil && signs(k) {
			keys = append(keys, k)
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("the key set holds no public signing key")
	}
	return keys, nil
}

func signs(k jose.JSONWebKey) bool {
	if !k.Valid() || k.Use != "" && k.Use != "sig" {
		return false
	}
	switch key := k.Key.(type) {
	case *rsa.PublicKey:
		n := key.N.BitLen()
		return minRSA <= n && n <= maxRSA
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return true
	}
	return false
}
