// Package web carries HTTP between a sandbox and a host that it may reach: HTTP/1.1, HTTP/2 and WebSocket,
// plain or within TLS that the gate opened. It guarantees that every request is judged by itself, that what
// could be read in two ways is refused, that requests are written anew, that a refusal explains itself to the
// person it hits, and that a secret which is put in leaves neither in an answer nor in a log.
package web

import (
	"context"
	"net"
	"net/netip"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/internal/session"
)

// Conn is a connection of a sandbox on which HTTP comes.
type Conn struct {
	net.Conn
	Session session.Session
	Door    string // transparent, connect or socks5
	// Name and Port that the connection is for, which every request's Host or :authority must name. An empty
	// Name: an explicit proxy's requests in absolute form, each for its own.
	Name authority.Name
	Port uint16
	// Secure: TLS was opened by the gate; ALPN is what it agreed on.
	Secure bool
	ALPN   string
}

// Secrets finds what rules put in.
type Secrets interface {
	// Reveal is the tenant's secret of the session, with the hosts that it may be sent to.
	Reveal(ctx context.Context, s session.Session, name string) (Secret, error)
}

// Secret is one. It prints as nothing.
type Secret struct {
	Value []byte
	Hosts []authority.Name
}

// String implements fmt.Stringer.
func (Secret) String() string { return "secret" }

// GoString implements fmt.GoStringer.
func (Secret) GoString() string { return "secret" }

// Upstream dials and, for Secure, does TLS with the host's certificate verified against the name.
type Upstream interface {
	Dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (net.Conn, netip.Addr, error)
}
