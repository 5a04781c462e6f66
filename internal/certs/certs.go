// Package certs is how Berth's processes show who they are and whom they trust
// on a connection: a built-in certificate authority, certificates in files, and
// the SPIFFE workload API. It guarantees TLS 1.3 and nothing below; that every
// handshake uses the certificate and the roots as they are at that moment, so
// that a renewal or a new root needs no restart; that what is half written or
// cannot be read leaves in use what was read before; and that keys are readable
// by their owner only.
//
// A certificate names its holder by a SPIFFE ID: spiffe://<domain>/<role>/<name>,
// or spiffe://<domain>/berth/<role>/<name> where others share the domain.
package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

// Domain is the trust domain of the built-in authority.
const Domain = "berth"

// Roles of the holders of certificates.
const (
	RoleBus       = "nats"      // a server of the bus
	RoleScheduler = "scheduler" // a replica of the scheduler
	RoleService   = "service"   // any service, as a client of the bus
	RoleHost      = "host"      // a host, as a client of the bus
	RoleGate      = "gate"      // the gate of a host, as a client of the bus
)

// Source gives what a process shows and trusts, as it is now. It is safe for
// concurrent use, and cheap enough to be asked at every handshake.
type Source interface {
	// Certificate is nil without an error when there is none to show.
	Certificate() (*tls.Certificate, error)
	Roots() (*x509.CertPool, error)
}

// Accept says why the holder of a certificate, which a trusted root signed, is
// not the one that is meant.
type Accept func(*x509.Certificate) error

// Peer is who a certificate names.
type Peer struct{ Domain, Role, Name string }

// URI is the SPIFFE ID.
func (p Peer) URI() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: p.Domain, Path: "/" + p.Role + "/" + p.Name}
}

// PeerOf reads the SPIFFE ID of a certificate that was verified; ok is false
// when it has none that Berth's processes have, or more than one.
func PeerOf(c *x509.Certificate) (p Peer, ok bool) {
	if len(c.URIs) != 1 {
		return p, false
	}
	u := c.URIs[0]
	if u.Scheme != "spiffe" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.ContainsAny(u.EscapedPath(), "%\\") {
		return p, false
	}
	parts := strings.Split(strings.TrimPrefix(u.Path, "/"), "/")
	if len(parts) == 3 && parts[0] == "berth" {
		parts = parts[1:]
	}
	if len(parts) != 2 || parts[0] == "" || parts[1] == "" {
		return p, false
	}
	return Peer{u.Host, parts[0], parts[1]}, true
}

// Only accepts certificates of a role, and of one name if that is not empty.
func Only(role, name string) Accept {
	return func(c *x509.Certificate) error {
		p, ok := PeerOf(c)
		if !ok || p.Role != role || name != "" && p.Name != name {
			return fmt.Errorf("the certificate names %s, not %s", told(c), strings.TrimSuffix(role+" "+name, " "))
		}
		return nil
	}
}

func told(c *x509.Certificate) string {
	if len(c.URIs) > 0 {
		return fmt.Sprintf("%.200q", c.URIs[0].String())
	}
	return fmt.Sprintf("%.200q", append(c.DNSNames, c.Subject.CommonName))
}

// Server is for listeners. Clients that show a certificate, as auth demands or
// allows, must have one of a trusted root.
func Server(s Source, auth tls.ClientAuthType, accept ...Accept) *tls.Config {
	each := func() (*tls.Config, error) {
		c := &tls.Config{MinVersion: tls.VersionTLS13, ClientAuth: auth, SessionTicketsDisabled: true,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return shown(s) },
			VerifyConnection: func(cs tls.ConnectionState) error {
				if len(cs.PeerCertificates) == 0 {
					return nil // where one is demanded the handshake has failed already
				}
				return acceptable(s, cs.PeerCertificates[0], accept)
			}}
		if auth == tls.NoClientCert {
			return c, nil
		}
		var err error
		c.ClientCAs, err = trusted(s)
		return c, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, ClientAuth: auth, SessionTicketsDisabled: true,
		GetCertificate:     func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return shown(s) },
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return each() }}
}

// Client is for connections to whom accept means: the other side is known by
// its certificate's SPIFFE ID, not by its address.
func Client(s Source, accept ...Accept) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetClientCertificate: showing(s),
		// The roots may change while the configuration stays: what crypto/tls
		// would check against fixed ones is checked here.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies
		VerifyConnection: func(cs tls.ConnectionState) error {
			return verify(s, cs, x509.ExtKeyUsageServerAuth, accept)
		}}
}

// ByName is for connections to others' servers, which are known by the host
// name or the IP address that was dialed. A source without roots has the
// machine's own.
func ByName(s Source, host string) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host, GetClientCertificate: showing(s),
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies, by roots that may change
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 {
				return errors.New("the other side shows no certificate")
			}
			roots, err := s.Roots()
			if err != nil {
				return err
			}
			return verifyBy(s, cs, x509.VerifyOptions{Roots: roots, DNSName: host, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, nil)
		}}
}

func showing(s Source) func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		cert, err := s.Certificate()
		if cert == nil {
			cert = &tls.Certificate{}
		}
		return cert, err
	}
}

// Mutual is for processes that are listeners and callers of each other.
func Mutual(s Source, accept ...Accept) *tls.Config {
	server, out := Server(s, tls.RequireAndVerifyClientCert, accept...), Client(s, accept...)
	out.ClientAuth, out.SessionTicketsDisabled = server.ClientAuth, true
	out.GetCertificate, out.GetConfigForClient = server.GetCertificate, server.GetConfigForClient
	return out
}

// Reloads reports whether a configuration is one of Mutual: it shows and
// demands certificates although no field of it holds any.
func Reloads(c *tls.Config) bool {
	return c.GetConfigForClient != nil && c.GetClientCertificate != nil && c.VerifyConnection != nil
}

func shown(s Source) (*tls.Certificate, error) {
	cert, err := s.Certificate()
	if err == nil && cert == nil {
		err = errors.New("there is no certificate to show")
	}
	return cert, err
}

func verify(s Source, cs tls.ConnectionState, usage x509.ExtKeyUsage, accept []Accept) error {
	if len(cs.PeerCertificates) == 0 {
		return errors.New("the other side shows no certificate")
	}
	roots, err := trusted(s)
	if err != nil {
		return err
	}
	return verifyBy(s, cs, x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}, accept)
}

// trusted never is the machine's own roots: whoever a public authority knows is not one of Berth's.
func trusted(s Source) (*x509.CertPool, error) {
	roots, err := s.Roots()
	if err == nil && roots == nil {
		err = errors.New("there are no roots to verify the other side's certificate by")
	}
	return roots, err
}

func verifyBy(s Source, cs tls.ConnectionState, o x509.VerifyOptions, accept []Accept) error {
	o.Intermediates = x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		o.Intermediates.AddCert(c)
	}
	leaf := cs.PeerCertificates[0]
	if _, err := leaf.Verify(o); err != nil {
		return err
	}
	return acceptable(s, leaf, accept)
}

// acceptable also refuses another trust domain than the process's own.
func acceptable(s Source, leaf *x509.Certificate, accept []Accept) error {
	for _, a := range accept {
		if err := a(leaf); err != nil {
			return err
		}
	}
	own, err := s.Certificate()
	if err != nil || own == nil || own.Leaf == nil || len(accept) == 0 {
		return err
	}
	mine, ok := PeerOf(own.Leaf)
	theirs, also := PeerOf(leaf)
	if ok && also && mine.Domain != theirs.Domain {
		return fmt.Errorf("the certificate is of the trust domain %.80q, not %.80q", theirs.Domain, mine.Domain)
	}
	return nil
}
