// Package spiffe has a fleet's SPIFFE agent say what a process shows and trusts,
// instead of files. It guarantees that what the agent renews is used at the next
// handshake, without a restart, that only certificates of the process's own trust
// domain are trusted, and that an agent which is away for a while changes nothing.
package spiffe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// openTime is what an agent gets to give the first certificate.
const openTime = 30 * time.Second

// Source is a certs.Source of the SPIFFE workload API.
type Source struct{ x509 *workloadapi.X509Source }

// Open connects to the agent at addr, for example unix:///run/spire/agent.sock,
// and waits until it has given a certificate.
func Open(ctx context.Context, addr string) (*Source, error) {
	const op = "ask the SPIFFE agent for a certificate"
	if err := workloadapi.ValidateAddress(addr); err != nil {
		return nil, errs.E(op, errkind.Invalid, addr, err)
	}
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	s, err := workloadapi.NewX509Source(ctx, workloadapi.WithClientOptions(workloadapi.WithAddr(addr)))
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, addr, err)
	}
	return &Source{s}, nil
}

// Certificate implements certs.Source.
func (s *Source) Certificate() (*tls.Certificate, error) {
	svid, err := s.x509.GetX509SVID()
	if err != nil {
		return nil, errs.E("read the SPIFFE certificate", errkind.Unavailable, "", err)
	}
	out := &tls.Certificate{PrivateKey: svid.PrivateKey, Leaf: svid.Certificates[0]}
	for _, c := range svid.Certificates {
		out.Certificate = append(out.Certificate, c.Raw)
	}
	return out, nil
}

// Roots implements certs.Source.
func (s *Source) Roots() (*x509.CertPool, error) {
	const op = "read the SPIFFE trust bundle"
	svid, err := s.x509.GetX509SVID()
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	bundle, err := s.x509.GetX509BundleForTrustDomain(svid.ID.TrustDomain())
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, svid.ID.TrustDomain().Name(), err)
	}
	pool := x509.NewCertPool()
	for _, c := range bundle.X509Authorities() {
		pool.AddCert(c)
	}
	return pool, nil
}

// Close ends the connection to the agent.
func (s *Source) Close() error { return s.x509.Close() }
