// Package ca is a small certificate authority for the members of a cluster on one machine: mutual TLS
// between replicas and between bus servers. It guarantees that keys are readable by their owner only,
// that a certificate names one member and its addresses, that one which ends soon is replaced when it
// is asked for, and that the authority's own key never changes once it was made.
package ca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	authorityLife = 10 * 365 * 24 * time.Hour
	memberLife    = 365 * 24 * time.Hour
	// renewBefore is how long before its end a member's certificate is replaced.
	renewBefore = memberLife / 3
	skew        = time.Hour // clocks that go behind
)

// Authority signs the members' certificates.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Pair is where a member's certificate, its key, and the certificate that it trusts are.
type Pair struct{ Cert, Key, CA string }

// Open opens the authority in a folder, and makes it the first time.
func Open(dir string, now time.Time) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the certificate authority: %w", err)
	}
	a := &Authority{dir: dir}
	var err error
	a.cert, a.key, err = read(a.path("ca"))
	if errors.Is(err, fs.ErrNotExist) {
		err = a.make(now)
	}
	if err != nil {
		return nil, fmt.Errorf("open the certificate authority %s: %w", dir, err)
	}
	return a, nil
}

func (a *Authority) make(now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	t, err := template("berth cluster", now, authorityLife)
	if err != nil {
		return err
	}
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage = true, true, x509.KeyUsageCertSign
	t.MaxPathLenZero = true
	raw, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return err
	}
	if a.cert, err = x509.ParseCertificate(raw); err != nil {
		return err
	}
	a.key = key
	return write(a.path("ca"), raw, key)
}

// Member returns a certificate that names a member and its addresses, for both ends of a connection.
func (a *Authority) Member(name string, now time.Time, addrs ...netip.Addr) (Pair, error) {
	p := Pair{Cert: a.path(name) + ".pem", Key: a.path(name) + ".key", CA: a.path("ca") + ".pem"}
	if cert, _, err := read(a.path(name)); err == nil && a.fits(cert, name, now, addrs) {
		return p, nil
	}
	fail := func(err error) (Pair, error) {
		return Pair{}, fmt.Errorf("make the certificate of %s: %w", name, err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	t, err := template(name, now, memberLife)
	if err != nil {
		return fail(err)
	}
	t.DNSNames, t.IPAddresses = []string{name}, ips(addrs)
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	raw, err := x509.CreateCertificate(rand.Reader, t, a.cert, key.Public(), a.key)
	if err != nil {
		return fail(err)
	}
	if err := write(a.path(name), raw, key); err != nil {
		return fail(err)
	}
	return p, nil
}

// fits reports whether a certificate of before still says what it must, and for long enough.
func (a *Authority) fits(c *x509.Certificate, name string, now time.Time, addrs []netip.Addr) bool {
	same := slices.EqualFunc(c.IPAddresses, ips(addrs), func(x, y net.IP) bool { return x.Equal(y) })
	return same && slices.Equal(c.DNSNames, []string{name}) && c.CheckSignatureFrom(a.cert) == nil &&
		now.After(c.NotBefore) && now.Before(c.NotAfter.Add(-renewBefore))
}

func (a *Authority) path(name string) string { return filepath.Join(a.dir, name) }

func ips(addrs []netip.Addr) (out []net.IP) {
	for _, a := range addrs {
		out = append(out, a.AsSlice())
	}
	return out
}

func template(name string, now time.Time, life time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-skew), NotAfter: now.Add(life)}, err
}

func read(path string) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	raw, err := block(path+".pem", "CERTIFICATE")
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("%s.pem: %w", path, err)
	}
	if raw, err = block(path+".key", "EC PRIVATE KEY"); err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(raw)
	if err != nil {
		return nil, nil, fmt.Errorf("%s.key: %w", path, err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, nil, fmt.Errorf("%s.key is not the key of %s.pem", path, path)
	}
	return cert, key, nil
}

func block(path, kind string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	b, _ := pem.Decode(raw)
	if b == nil || b.Type != kind {
		return nil, fmt.Errorf("%s holds no %s", path, kind)
	}
	return b.Bytes, nil
}

// write writes the key before the certificate: what a death in between leaves is made again.
func write(path string, cert []byte, key *ecdsa.PrivateKey) error {
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	// Of an earlier pair nothing may be taken for a part of this one.
	if err := os.Remove(path + ".pem"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, f := range []struct {
		path, kind string
		raw        []byte
	}{{path + ".key", "EC PRIVATE KEY", raw}, {path + ".pem", "CERTIFICATE", cert}} {
		if err := replace(f.path, pem.EncodeToMemory(&pem.Block{Type: f.kind, Bytes: f.raw})); err != nil {
			return err
		}
	}
	return nil
}

func replace(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
