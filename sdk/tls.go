package sdk

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
)

// secure has the connection be TLS 1.3, and read the client file again at each
// reconnect, so that a new root or certificate needs no restart.
func (c Config) secure(o *nats.Options) error {
	o.Secure, o.TLSConfig = true, &tls.Config{MinVersion: tls.VersionTLS13}
	o.RootCAsCB = func() (*x509.CertPool, error) {
		now := c.renewed()
		if now.CA == "" {
			return nil, nil // the machine's own roots
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM([]byte(now.CA)) {
			return nil, errors.New("the roots of the bus hold no certificate")
		}
		return pool, nil
	}
	if c.Cert != "" {
		o.TLSCertCB = func() (tls.Certificate, error) {
			now := c.renewed()
			pair, err := tls.X509KeyPair([]byte(now.Cert), []byte(now.Key))
			if err != nil {
				return pair, fmt.Errorf("the certificate of %s cannot be used: %w", c.Name, err)
			}
			return pair, nil
		}
	}
	return nil
}

// renewed has the roots and the certificate that the client file has now, or
// those of before if it is gone.
func (c Config) renewed() Config {
	if c.transport == "" {
		return c
	}
	if f, err := ReadClientFile(c.transport); err == nil && f.Name == c.Name && f.CA != "" {
		c.CA = f.CA
		if f.Cert != "" {
			c.Cert, c.Key = f.Cert, f.Key
		}
	}
	return c
}
