package certs

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	rootLife = 10 * 365 * 24 * time.Hour
	// LeafLife is how long a certificate of the built-in authority lasts; it is
	// renewed when two thirds are over.
	LeafLife = 30 * 24 * time.Hour
	skew     = time.Hour // clocks that go behind
)

// CA is the built-in authority. Its folder is read by whoever issues
// certificates; other processes need the bundle and their own certificate. It
// sees what another process rotated. Safe for concurrent use.
type CA struct {
	dir string

	mu   sync.Mutex
	seen stamp
	now  authority
}

// authority is one content of the folder: the root that signs, the roots that
// it replaced and that are trusted as long as their certificates live, and
// itself signed by the last of them, for who does not know it yet.
type authority struct {
	key     crypto.Signer
	root    *x509.Certificate
	crossed *x509.Certificate
	older   []*x509.Certificate
}

// Folder is where the authority of a state folder lies.
func Folder(dir string) string { return filepath.Join(dir, "tls") }

func (c *CA) file() string { return filepath.Join(c.dir, "ca", "ca.pem") }

// BundleFile is where the trusted roots are, for --tlsca and the like.
func (c *CA) BundleFile() string { return filepath.Join(c.dir, "ca.pem") }

// OpenCA opens the authority in a folder, and makes it the first time. Of
// several processes that make it at once one wins.
func OpenCA(dir string, now time.Time) (*CA, error) {
	c := &CA{dir: dir}
	err := c.refresh()
	if errors.Is(err, fs.ErrNotExist) {
		if err = c.create(now); err == nil {
			err = c.refresh()
		}
	}
	if err != nil {
		return nil, errs.E("open the certificate authority", errkind.Invalid, dir, err)
	}
	if _, err := os.Stat(c.BundleFile()); err != nil {
		if err := c.writeBundle(now); err != nil {
			return nil, errs.E("open the certificate authority", errkind.Unavailable, dir, err)
		}
	}
	return c, nil
}

// Readable reports why the authority in a folder cannot be opened: fs.ErrNotExist, there is none, or
// fs.ErrPermission.
func Readable(dir string) error {
	f, err := os.Open((&CA{dir: dir}).file())
	if err != nil {
		return err
	}
	return f.Close()
}

func (c *CA) create(now time.Time) error {
	if err := os.MkdirAll(filepath.Dir(c.file()), 0o700); err != nil {
		return err
	}
	a, err := newAuthority(now)
	if err != nil {
		return err
	}
	raw, err := a.encode()
	if err != nil {
		return err
	}
	tmp, err := temporary(c.file(), raw)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	// A link, unlike a rename, never replaces what another process made.
	if err := os.Link(tmp, c.file()); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

func newAuthority(now time.Time) (authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, err
	}
	t, err := rootTemplate(now)
	if err != nil {
		return authority{}, err
	}
	raw, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return authority{}, err
	}
	root, err := x509.ParseCertificate(raw)
	return authority{key: key, root: root}, err
}

func rootTemplate(now time.Time) (*x509.Certificate, error) {
	n, err := serial()
	return &x509.Certificate{SerialNumber: n, Subject: pkix.Name{Organization: []string{"Berth"}, CommonName: fmt.Sprintf("Berth root %x", n.Bytes()[:4])},
		NotBefore: now.Add(-skew), NotAfter: now.Add(rootLife), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, MaxPathLen: 1}, err
}

func serial() (*big.Int, error) {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return n.SetBit(n, 126, 1), nil
}

// Rotate makes a new root, which signs from now on. Who trusts only the one of
// before believes it too, because that one signed it; its key is gone then.
func (c *CA) Rotate(now time.Time) error {
	const op = "rotate the certificate authority"
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.refreshLocked(); err != nil {
		return errs.E(op, errkind.Invalid, c.dir, err)
	}
	old := c.now
	next, err := newAuthority(now)
	if err != nil {
		return errs.E(op, errkind.Internal, c.dir, err)
	}
	n, err := serial()
	if err != nil {
		return errs.E(op, errkind.Internal, c.dir, err)
	}
	t := *next.root
	t.SerialNumber, t.MaxPathLen, t.MaxPathLenZero = n, 0, true
	raw, err := x509.CreateCertificate(rand.Reader, &t, old.root, next.root.PublicKey, old.key)
	if err != nil {
		return errs.E(op, errkind.Internal, c.dir, err)
	}
	if next.crossed, err = x509.ParseCertificate(raw); err != nil {
		return errs.E(op, errkind.Internal, c.dir, err)
	}
	next.older = append([]*x509.Certificate{old.root}, old.trusted(now)[1:]...)
	if raw, err = next.encode(); err == nil {
		err = replace(c.file(), raw)
	}
	if err == nil {
		err = c.refreshLocked()
	}
	if err == nil {
		err = replace(c.BundleFile(), c.now.bundle(now))
	}
	if err != nil {
		return errs.E(op, errkind.Unavailable, c.dir, err)
	}
	return nil
}

// trusted are the roots, the one that signs first. One of before is trusted
// until no certificate that it signed can be alive.
func (a authority) trusted(now time.Time) []*x509.Certificate {
	out := []*x509.Certificate{a.root}
	after := a.root // what replaced the next one
	for _, o := range a.older {
		if now.Before(after.NotBefore.Add(skew + LeafLife)) {
			out = append(out, o)
		}
		after = o
	}
	return out
}

func (a authority) bundle(now time.Time) []byte {
	var out bytes.Buffer
	for _, r := range a.trusted(now) {
		_ = pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: r.Raw}) // to memory
	}
	return out.Bytes()
}

// Roots are the trusted roots, the one that signs first.
func (c *CA) Roots(now time.Time) ([]*x509.Certificate, error) {
	a, err := c.current()
	if err != nil {
		return nil, err
	}
	return a.trusted(now), nil
}

// Bundle is the trusted roots as PEM.
func (c *CA) Bundle(now time.Time) ([]byte, error) {
	a, err := c.current()
	if err != nil {
		return nil, err
	}
	return a.bundle(now), nil
}

// Sync has the file of the roots be true; it is replaced only when it must be.
func (c *CA) Sync(now time.Time) error {
	if err := c.writeBundle(now); err != nil {
		return errs.E("write the trusted roots", errkind.Unavailable, c.dir, err)
	}
	return nil
}

// writeBundle replaces the file of the roots if it says something else.
func (c *CA) writeBundle(now time.Time) error {
	want, err := c.Bundle(now)
	if err != nil {
		return err
	}
	if have, err := os.ReadFile(c.BundleFile()); err == nil && bytes.Equal(have, want) {
		return nil
	}
	return replace(c.BundleFile(), want)
}

func (c *CA) current() (authority, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.refreshLocked()
	if err != nil && c.now.root != nil {
		err = nil // what was read before stays in use
	}
	return c.now, err
}

func (c *CA) refresh() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refreshLocked()
}

func (c *CA) refreshLocked() error {
	seen, err := stampOf(c.file())
	if err != nil || seen == c.seen {
		return err
	}
	if st, err := os.Stat(c.file()); err != nil || st.Mode().Perm()&0o077 != 0 {
		return errors.Join(err, fmt.Errorf("%s can be read or written by others; it must be of mode 0600", c.file()))
	}
	raw, err := readPEM(c.file())
	if err != nil {
		return err
	}
	a, err := decode(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", c.file(), err)
	}
	c.seen, c.now = seen, a
	return nil
}

// encode has everything in one file, which is replaced in one step.
func (a authority) encode() ([]byte, error) {
	raw, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	blocks := []*pem.Block{{Type: "PRIVATE KEY", Bytes: raw}, {Type: "CERTIFICATE", Bytes: a.root.Raw}}
	if a.crossed != nil {
		blocks = append(blocks, &pem.Block{Type: "CERTIFICATE", Bytes: a.crossed.Raw})
	}
	for _, o := range a.older {
		blocks = append(blocks, &pem.Block{Type: "CERTIFICATE", Bytes: o.Raw})
	}
	for _, b := range blocks {
		if err := pem.Encode(&out, b); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

func decode(raw []byte) (a authority, err error) {
	pair, err := tls.X509KeyPair(raw, raw)
	if err != nil {
		return a, fmt.Errorf("it holds no root with its key: %w", err)
	}
	var ok bool
	if a.key, ok = pair.PrivateKey.(crypto.Signer); !ok {
		return a, errors.New("its key cannot sign")
	}
	for i, der := range pair.Certificate {
		cert, err := x509.ParseCertificate(der)
		switch {
		case err != nil:
			return a, err
		case !cert.IsCA:
			return a, errors.New("it holds a certificate that is no root")
		case i == 0:
			a.root = cert
		case bytes.Equal(cert.RawSubjectPublicKeyInfo, a.root.RawSubjectPublicKeyInfo):
			a.crossed = cert
		default:
			a.older = append(a.older, cert)
		}
	}
	return a, nil
}
