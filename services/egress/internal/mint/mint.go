// Package mint makes the certificates by which a gate opens TLS where a rule asks for it. It guarantees that
// its private keys never leave memory, that a certificate names exactly one canonical host and lives at most
// a day, and that the authority above it issues no other authority.
package mint

import (
	"crypto/tls"

	"github.com/berth-dev/berth/services/egress/authority"
)

// Minter makes leaf certificates.
type Minter interface {
	// Leaf is a certificate for name with its chain; an error while there is no authority.
	Leaf(name authority.Name) (*tls.Certificate, error)
}
