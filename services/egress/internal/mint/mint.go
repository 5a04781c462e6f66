// Package mint makes the certificates by which a gate opens TLS where a rule asks for it. It guarantees that
// its private keys never leave memory, that a certificate names exactly one canonical host and lives at most
// a day and no longer than the authority above it, and that this authority issues no other authority: one
// that could is refused when it comes.
package mint

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
)

// Minter makes leaf certificates.
type Minter interface {
	// Leaf is a certificate for name with its chain; an error while there is no authority.
	Leaf(name authority.Name) (*tls.Certificate, error)
}

const (
	leafAhead = 23 * time.Hour // from now to the end of a leaf
	leafBack  = time.Hour      // for clocks that are slow; with leafAhead a day
	keyLife   = 24 * time.Hour // of the leaves' key
	// A cached leaf is given out while it lives for longer than this.
	leafLeft   = leafAhead / 2
	mostLeaves = 4096
	// maxCommonName is the longest CN by RFC 5280; a longer name stands in the SAN alone, as it counts.
	maxCommonName = 64
)

var errNone = errors.New("the gate has no authority to open TLS with yet")

// Fetch has an authority issued for a public key (PKIX, DER). It returns the certificate and the cell's
// roots, DER, the one that signed it among them.
type Fetch func(ctx context.Context, publicKey []byte) (certificate []byte, roots [][]byte, err error)

// Authority is a Minter that renews itself. Its methods are safe for concurrent use.
type Authority struct {
	now   func() time.Time
	log   *slog.Logger
	ready chan struct{} // closed once there is an authority

	mu    sync.Mutex
	cur   *issuer
	key   *ecdsa.PrivateKey // of the leaves
	keyAt time.Time
	fault error // of the last fetch

	leaves *leaves
}

// issuer is one intermediate with its key.
type issuer struct {
	key   *ecdsa.PrivateKey
	cert  *x509.Certificate
	roots []byte // PEM
}

// New starts to fetch an authority and returns; the fetching ends with ctx. Each fetch is for a new key. An
// authority is renewed when half of its life is over; what fails is logged when it changes, and tried again with
// growing pauses.
func New(ctx context.Context, fetch Fetch, now func() time.Time, log *slog.Logger) *Authority {
	a := &Authority{now: now, log: log, ready: make(chan struct{}), leaves: newLeaves(mostLeaves)}
	go a.keep(ctx, fetch)
	return a
}

// Ready is closed once there is an authority.
func (a *Authority) Ready() <-chan struct{} { return a.ready }

// Roots are the cell's roots that sandboxes have to trust, PEM; empty while there is no authority.
func (a *Authority) Roots() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cur == nil {
		return nil
	}
	return a.cur.roots
}

// Left is how long the authority there is holds yet; 0 while there is none.
func (a *Authority) Left() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cur == nil {
		return 0
	}
	return max(a.cur.cert.NotAfter.Sub(a.now()), 0)
}

// Err says why there is no authority, or why the one there is was not renewed; nil if all is well.
func (a *Authority) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cur == nil && a.fault == nil {
		return errNone
	}
	return a.fault
}

// Leaf implements Minter. Requests for one name wait for one certificate.
func (a *Authority) Leaf(name authority.Name) (*tls.Certificate, error) {
	now := a.now()
	return a.leaves.get(name, now, func() (*tls.Certificate, error) { return a.issue(name, now) })
}

func (a *Authority) issue(name authority.Name, now time.Time) (*tls.Certificate, error) {
	if name == "" || strings.ContainsAny(string(name), "* \x00") {
		return nil, errors.New("a certificate is for one host name only")
	}
	by, key, err := a.parts(now)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		NotBefore: later(now.Add(-leafBack), by.cert.NotBefore), NotAfter: earlier(now.Add(leafAhead), by.cert.NotAfter),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true, DNSNames: []string{string(name)},
	}
	if len(name) <= maxCommonName {
		template.Subject = pkix.Name{CommonName: string(name)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, &key.PublicKey, by.key)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der, by.cert.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

// parts are the authority of now and the key of the leaves, which is made anew each day.
func (a *Authority) parts(now time.Time) (*issuer, *ecdsa.PrivateKey, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.cur == nil:
		return nil, nil, errNone
	case !now.Before(a.cur.cert.NotAfter):
		return nil, nil, errors.New("the gate's authority has expired and could not be renewed")
	}
	if a.key == nil || now.Sub(a.keyAt) >= keyLife {
		key, err := newKey()
		if err != nil {
			return nil, nil, err
		}
		a.key, a.keyAt = key, now
	}
	return a.cur, a.key, nil
}

func newKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return key, nil
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

func inPEM(certs []*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return out
}
