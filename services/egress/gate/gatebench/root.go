package gatebench

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"time"
)

// root stands in for the cell's.
type root struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newRoot() (*root, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a root: %w", err)
	}
	r := &root{key: key}
	r.cert = &x509.Certificate{Subject: pkix.Name{CommonName: "bench root"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, MaxPathLen: 1, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, r.cert, r.cert, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make a root: %w", err)
	}
	if r.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("make a root: %w", err)
	}
	return r, nil
}

// issue is a mint.Fetch.
func (r *root) issue(_ context.Context, public []byte) (certificate []byte, roots [][]byte, err error) {
	key, err := x509.ParsePKIXPublicKey(public)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{Subject: pkix.Name{CommonName: "bench gate"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(12 * time.Hour), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, r.cert, key, r.key)
	return der, [][]byte{r.cert.Raw}, err
}
