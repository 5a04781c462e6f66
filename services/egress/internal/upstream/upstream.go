// Package upstream reaches what a sandbox was allowed to reach. It guarantees that a name is looked up when
// it is dialled and not before, that every address is checked against what no sandbox may reach before it is
// dialled, and that the address which was checked is the one that is dialled.
package upstream

import (
	"context"
	"net"
	"net/netip"

	"github.com/berth-dev/berth/services/egress/authority"
)

// Dialer dials. Errors are *session.Refusal with reason private, unresolved or unreachable.
type Dialer interface {
	// Dial looks name up and dials the first address that answers; allowed are private ranges that the
	// operator let this rule reach.
	Dial(ctx context.Context, name authority.Name, port uint16, allowed []netip.Prefix) (net.Conn, netip.Addr, error)
}
