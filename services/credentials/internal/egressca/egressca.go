// Package egressca is the cell's authority for certificates that gates show to sandboxes whose TLS they
// open. It guarantees that a root is for nothing but issuing authorities of gates, that what it issues for a
// gate lives a week, names its host, is for servers only and issues no other authority, and that a root
// which was read back is the one that was written.
package egressca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

const (
	rootLife = 10 * 365 * 24 * time.Hour
	gateLife = 7 * 24 * time.Hour
	// slow is how much a clock may be behind.
	slow      = 5 * time.Minute
	rootName  = "Berth egress root"
	maxPublic = 512
)

// ErrKey is the error for a public key that is none, or not of the one kind that is issued for.
var ErrKey = errors.New("the public key is no ECDSA key on P-256 in PKIX form")

// Root is one root of the cell. Its private key prints as nothing.
type Root struct {
	Cert *x509.Certificate
	// From is when it begins to sign; it is told to gates before that.
	From time.Time
	key  *ecdsa.PrivateKey
}

// stored is a root as it is encrypted.
type stored struct {
	Cert []byte    `json:"cert"`
	Key  []byte    `json:"key"` // PKCS 8
	From time.Time `json:"from"`
}

// NewRoot makes the n-th root of the cell, which signs from a time on.
func NewRoot(n int, now, from time.Time) (Root, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Root{}, fmt.Errorf("make a root: %w", err)
	}
	name := rootName
	if n > 1 {
		name = fmt.Sprintf("%s %d", rootName, n)
	}
	tmpl := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-slow), NotAfter: now.Add(rootLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLen: 1, KeyUsage: x509.KeyUsageCertSign,
	}
	cert, err := issue(tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return Root{}, fmt.Errorf("make a root: %w", err)
	}
	return Root{Cert: cert, From: from, key: key}, nil
}

func issue(tmpl, parent *x509.Certificate, public *ecdsa.PublicKey, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Issue makes the authority of a host's gate for its public key (PKIX, DER) and returns the certificate. The
// error is ErrKey for a key that is not taken.
func (r Root) Issue(public []byte, host ids.Host, now time.Time) (*x509.Certificate, error) {
	if len(public) > maxPublic {
		return nil, ErrKey
	}
	parsed, err := x509.ParsePKIXPublicKey(public)
	key, ok := parsed.(*ecdsa.PublicKey)
	if err != nil || !ok || key.Curve != elliptic.P256() || key.Equal(&r.key.PublicKey) {
		return nil, ErrKey
	}
	end := now.Add(gateLife)
	if r.Cert.NotAfter.Before(end) {
		end = r.Cert.NotAfter
	}
	cert, err := issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "Berth egress of host " + string(host)}, NotBefore: now.Add(-slow), NotAfter: end,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, r.Cert, key, r.key)
	if err != nil {
		return nil, fmt.Errorf("issue the authority of a gate: %w", err)
	}
	return cert, nil
}

// Encode writes a root with its private key, to be encrypted.
func (r Root) Encode() ([]byte, error) {
	key, err := x509.MarshalPKCS8PrivateKey(r.key)
	if err != nil {
		return nil, fmt.Errorf("write a root: %w", err)
	}
	return json.Marshal(stored{r.Cert.Raw, key, r.From.UTC()})
}

// Decode reads what Encode wrote. The error says nothing of what was in it.
func Decode(raw []byte) (Root, error) {
	bad := errors.New("the root is malformed")
	var s stored
	if json.Unmarshal(raw, &s) != nil {
		return Root{}, bad
	}
	cert, err := x509.ParseCertificate(s.Cert)
	if err != nil {
		return Root{}, bad
	}
	parsed, err := x509.ParsePKCS8PrivateKey(s.Key)
	key, ok := parsed.(*ecdsa.PrivateKey)
	if err != nil || !ok || !key.PublicKey.Equal(cert.PublicKey) || !cert.IsCA {
		return Root{}, bad
	}
	return Root{Cert: cert, From: s.From, key: key}, nil
}

// String names the root.
func (r Root) String() string { return r.Cert.Subject.CommonName }

// GoString names the root, so that %#v prints no secret either.
func (r Root) GoString() string { return r.String() }

const (
	// renewAhead is how long before the end of the last root the next one is made, and tellAhead how long
	// gates, and by them sandboxes, know it before it signs.
	renewAhead = 365 * 24 * time.Hour
	tellAhead  = 30 * 24 * time.Hour
)

// Next says whether the cell needs another root, given those it has in order, and when that is to sign.
func Next(roots []Root, now time.Time) (from time.Time, needed bool) {
	if len(roots) == 0 {
		return now, true
	}
	last := roots[len(roots)-1].Cert.NotAfter
	switch {
	case !now.Before(last):
		return now, true
	case last.Sub(now) < renewAhead:
		return now.Add(tellAhead), true
	}
	return time.Time{}, false
}

// Live are the roots that have not expired, the one that signs now first. None if all have.
func Live(roots []Root, now time.Time) []Root {
	var out []Root
	for _, r := range roots {
		switch {
		case !now.Before(r.Cert.NotAfter):
		case !r.From.After(now) || len(out) == 0:
			out = append([]Root{r}, out...)
		default:
			out = append(out, r)
		}
	}
	return out
}
