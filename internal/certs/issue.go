package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Leaf says what a certificate is to name.
type Leaf struct {
	Role, Name string
	DNS        []string
	IPs        []netip.Addr
	// ClientOnly certificates name no address and are worth nothing to a listener.
	ClientOnly bool
}

func (l Leaf) dns() []string {
	if l.ClientOnly {
		return nil
	}
	return append([]string{l.Name}, l.DNS...)
}

func (l Leaf) usage() []x509.ExtKeyUsage {
	if l.ClientOnly {
		return []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
}

func (l Leaf) ips() (out []net.IP) {
	for _, a := range l.IPs {
		out = append(out, a.Unmap().AsSlice())
	}
	return out
}

func (l Leaf) validate() error {
	for _, s := range []string{l.Role, l.Name} {
		if len(s) == 0 || len(s) > 128 {
			return errors.New("a role and a name of 1 to 128 characters are needed")
		}
		for _, r := range s {
			if (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_' {
				return fmt.Errorf("%.80q has other characters than a-z, 0-9, - and _", s)
			}
		}
	}
	return nil
}

// Issue signs a certificate for both ends of a connection and returns it as
// PEM with its key and its chain, in one piece that can be replaced in one step.
func (c *CA) Issue(l Leaf, now time.Time) ([]byte, error) {
	const op = "issue a certificate"
	if err := l.validate(); err != nil {
		return nil, errs.E(op, errkind.Invalid, l.Name, err)
	}
	a, err := c.current()
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, l.Name, err)
	}
	out, err := a.issue(l, now)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, l.Name, err)
	}
	return out, nil
}

func (a authority) issue(l Leaf, now time.Time) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	n, err := serial()
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{SerialNumber: n, Subject: pkix.Name{CommonName: l.Name}, NotBefore: now.Add(-skew), NotAfter: now.Add(LeafLife),
		URIs: []*url.URL{Peer{Domain, l.Role, l.Name}.URI()}, DNSNames: l.dns(), IPAddresses: l.ips(), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: l.usage()}
	der, err := x509.CreateCertificate(rand.Reader, t, a.root, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, b := range append(a.chain(der), &pem.Block{Type: "PRIVATE KEY", Bytes: raw}) {
		if err := pem.Encode(&out, b); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

func (a authority) chain(leaf []byte) []*pem.Block {
	out := []*pem.Block{{Type: "CERTIFICATE", Bytes: leaf}}
	if a.crossed != nil {
		out = append(out, &pem.Block{Type: "CERTIFICATE", Bytes: a.crossed.Raw})
	}
	return out
}

// Split parts what Issue returned into the certificate with its chain, and the key.
func Split(pemData []byte) (cert, key string) {
	for rest := pemData; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			return cert, key
		}
		if text := string(pem.EncodeToMemory(b)); b.Type == "CERTIFICATE" {
			cert += text
		} else {
			key += text
		}
	}
}

// Fresh reports whether a certificate, as Issue returned it, is of the root
// that signs now, names the same, and has a third of its life before it.
func (c *CA) Fresh(pemData []byte, l Leaf, now time.Time) bool {
	a, err := c.current()
	if err != nil {
		return false
	}
	pair, err := Pair(pemData, pemData)
	return err == nil && a.fresh(pair.Leaf, l, now)
}

func (a authority) fresh(x *x509.Certificate, l Leaf, now time.Time) bool {
	p, ok := PeerOf(x)
	return ok && p == Peer{Domain, l.Role, l.Name} && slices.Equal(x.DNSNames, l.dns()) && slices.Equal(x.ExtKeyUsage, l.usage()) &&
		slices.EqualFunc(x.IPAddresses, l.ips(), func(x, y net.IP) bool { return x.Equal(y) }) &&
		x.CheckSignatureFrom(a.root) == nil && !now.Before(x.NotBefore) && now.Before(x.NotAfter.Add(-LeafLife/3))
}

// Keep has a file hold a fresh certificate with its key, and the bundle beside
// the authority be true; both are replaced in one step each, and only when they
// must be.
func (c *CA) Keep(path string, l Leaf, now time.Time) error {
	if err := c.Sync(now); err != nil {
		return err
	}
	if have, err := os.ReadFile(path); err == nil && c.Fresh(have, l, now) {
		return nil
	}
	raw, err := c.Issue(l, now)
	if err != nil {
		return err
	}
	if err := replace(path, raw); err != nil {
		return errs.E("write a certificate", errkind.Unavailable, path, err)
	}
	return nil
}

// Path is where the certificate of a name lies beside the authority.
func (c *CA) Path(name string) string { return filepath.Join(c.dir, name+".pem") }

// Source issues itself a certificate when the one that it has is not fresh.
// Its key is in memory only.
func (c *CA) Source(l Leaf) Source { return &issued{ca: c, leaf: l, clock: time.Now} }

type issued struct {
	ca    *CA
	leaf  Leaf
	clock func() time.Time

	mu   sync.Mutex
	pair *tls.Certificate
}

func (s *issued) Certificate() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	a, err := s.ca.current()
	if err != nil {
		return nil, err
	}
	if s.pair != nil && a.fresh(s.pair.Leaf, s.leaf, now) {
		return s.pair, nil
	}
	raw, err := s.ca.Issue(s.leaf, now)
	if err != nil {
		return nil, err
	}
	s.pair, err = Pair(raw, raw)
	return s.pair, err
}

func (s *issued) Roots() (*x509.CertPool, error) {
	roots, err := s.ca.Roots(s.clock())
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	for _, r := range roots {
		pool.AddCert(r)
	}
	return pool, nil
}

// temporary writes a synced file of mode 0600 beside path.
func temporary(path string, data []byte) (string, error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

func replace(path string, data []byte) error {
	tmp, err := temporary(path, data)
	if err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return nil
}
