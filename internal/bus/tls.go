package bus

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// tlsTimeout bounds a client's handshake; the login comes after it.
const tlsTimeout = 5 * time.Second

// renewEvery is how often client files are looked at; those that are good stay
// as they are.
const renewEvery = time.Minute

// WithTLS has the connection show and trust what a source gives, a SPIFFE
// agent's for one, instead of what is in the login.
func WithTLS(s certs.Source) Option { return func(o *options) { o.source = s } }

// ServerTLS is the configuration of a server's port for clients: TLS 1.3.
//
// A client's certificate is verified if it shows one and is not demanded: RFC
// 8446 section 4.4.2.4 leaves that to the server, and frontends, users and
// operators show who they are after the handshake, by an nkey's signature over
// the server's nonce or by a token, and are let in by that alone. Services and
// hosts in processes of their own show certificates besides.
func ServerTLS(s certs.Source) *tls.Config { return certs.Server(s, tls.VerifyClientCertIfGiven) }

// transport puts TLS into the server's options; without a listener there is none.
func (cfg ServerConfig) transport(o *server.Options) error {
	if cfg.Port == 0 {
		return nil
	}
	if cfg.TLS == nil || cfg.TLS.MinVersion < tls.VersionTLS13 || len(cfg.TLS.Certificates) == 0 && cfg.TLS.GetCertificate == nil {
		return errors.New("clients of other processes are served over TLS 1.3 only, and there is no certificate for it")
	}
	o.TLSConfig, o.TLSTimeout = cfg.TLS, tlsTimeout.Seconds()
	return nil
}

// ownTLS is for a server that is configured with no certificate of its own: it
// gets one of the authority in dir, and another before that ends.
func (cfg EmbeddedConfig) ownTLS() (*tls.Config, error) {
	if cfg.TLS != nil || cfg.Port == 0 {
		return cfg.TLS, nil
	}
	ca, err := certs.OpenCA(certs.Folder(cfg.Dir), time.Now())
	if err != nil {
		return nil, err
	}
	return ServerTLS(ca.Source(ServerLeaf(orDefault(cfg.Name, "berth"), cfg.Host, cfg.Advertise))), nil
}

// ServerLeaf is what a server's certificate names: its own name, this machine,
// and where clients reach it, of which each may have a port.
func ServerLeaf(name string, addrs ...string) certs.Leaf {
	l := certs.Leaf{Role: certs.RoleBus, Name: name}
	add := func(host string) {
		switch ip, err := netip.ParseAddr(host); {
		case host == "":
		case err != nil && !slices.Contains(append(l.DNS, name), host):
			l.DNS = append(l.DNS, host)
		case err == nil && ip.IsUnspecified():
			l.DNS, l.IPs = append(l.DNS, machine()...), append(l.IPs, interfaces()...)
		case err == nil && !slices.Contains(l.IPs, ip.Unmap()):
			l.IPs = append(l.IPs, ip.Unmap())
		}
	}
	for _, own := range []string{"localhost", "127.0.0.1", "::1"} {
		add(own)
	}
	for _, a := range addrs {
		if host, _, err := net.SplitHostPort(a); err == nil {
			a = host
		}
		add(a)
	}
	return l
}

func machine() []string {
	if name, err := os.Hostname(); err == nil && name != "localhost" {
		return []string{name}
	}
	return nil
}

func interfaces() (out []netip.Addr) {
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p.Addr().Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// shower gives logins what they verify the bus by and what they show it.
type shower struct {
	ca     *certs.CA
	bundle string
	now    time.Time
}

func newShower(dir string, now time.Time) (*shower, error) {
	ca, err := certs.OpenCA(certs.Folder(dir), now)
	if err == nil {
		err = ca.Sync(now)
	}
	if err != nil {
		return nil, err
	}
	bundle, err := ca.Bundle(now)
	return &shower{ca, string(bundle), now}, err
}

// shown keeps the certificate that a login has as long as it is fresh.
func (s *shower) shown(l, had Login, c subjects.Caller) (Login, error) {
	l.CA = s.bundle
	leaf, ok := clientLeaf(c)
	if !ok {
		return l, nil
	}
	if both := []byte(had.Cert + had.Key); s.ca.Fresh(both, leaf, s.now) {
		l.Cert, l.Key = had.Cert, had.Key
		return l, nil
	}
	raw, err := s.ca.Issue(leaf, s.now)
	if err != nil {
		return l, err
	}
	l.Cert, l.Key = certs.Split(raw)
	return l, nil
}

// clientLeaf is what the certificate of a caller names; frontends, users and
// operators have none.
func clientLeaf(c subjects.Caller) (certs.Leaf, bool) {
	l := certs.Leaf{Role: string(c.Role), ClientOnly: true}
	switch c.Role {
	case subjects.RoleService:
		l.Name = c.Service
	case subjects.RoleHost, subjects.RoleGate:
		l.Name = string(c.Host)
	case subjects.RoleFrontend, subjects.RoleOperator:
		return l, false
	default:
		l.Name = c.Name()
	}
	return l, l.Name != ""
}

// renewLogins keeps the client files' certificates and roots good until ctx ends.
func (e *Embedded) renewLogins(ctx context.Context) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		e.mu.Lock()
		_, err := EnsureKeys(e.dir, e.clientURL(), e.known)
		e.mu.Unlock()
		if err != nil {
			e.log.Warn("client files cannot be renewed; they are tried again", "error", err)
		}
	}
}

// transport is the client's side: TLS 1.3 always, but in memory. What the login
// says is read at each reconnect, so that it may be renewed.
func (l Login) transport(o options) []nats.Option {
	if o.server != nil {
		return nil
	}
	return []nats.Option{func(n *nats.Options) error {
		n.Secure, n.TLSConfig = true, &tls.Config{MinVersion: tls.VersionTLS13}
		if o.source != nil {
			n.TLSConfig = certs.Client(o.source, certs.Only(certs.RoleBus, ""))
			return nil
		}
		n.RootCAsCB = func() (*x509.CertPool, error) {
			now := l.renewed()
			if now.CA == "" {
				return nil, nil // the machine's own roots
			}
			return certs.Pool([]byte(now.CA))
		}
		if l.Cert != "" {
			n.TLSCertCB = func() (tls.Certificate, error) {
				now := l.renewed()
				pair, err := certs.Pair([]byte(now.Cert), []byte(now.Key))
				if err != nil {
					return tls.Certificate{}, fmt.Errorf("the certificate of the login %s cannot be used: %w", l.Name, err)
				}
				return *pair, nil
			}
		}
		return nil
	}}
}

// renewed is the login as its file has it now, or as it was if that is gone.
func (l Login) renewed() Login {
	if l.path == "" {
		return l
	}
	now, err := ReadLogin(l.path)
	if err != nil || now.Name != l.Name || (now.Cert == "") != (l.Cert == "") {
		return l
	}
	return now
}

// dialURL is where a connection goes; the address says nothing in memory, and
// must not ask for TLS there.
func dialURL(login Login, o options) string {
	if o.server != nil {
		return "nats://memory"
	}
	return cmp.Or(strings.TrimSpace(login.URL), nats.DefaultURL)
}
