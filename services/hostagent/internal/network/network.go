// Package network gives each sandbox of a host a link of its own: a routed veth or tap whose host's end lies
// in a namespace of the host's that has no other way out, the router. It guarantees that a sandbox reaches
// nothing but the gate's doors there, and those only while its link is bound and the host's lease holds, which
// is a set element that the kernel lets time out; that a packet with another source than the link's address is
// dropped; and that links are found again after a restart by the kernel's state alone.
package network

import (
	"net/netip"
)

// Addresses of the router, the same for every sandbox on every host. They mean nothing outside.
var (
	Gateway4 = netip.MustParseAddr("100.64.0.1")
	Gateway6 = netip.MustParseAddr("fd62:6572:7468::1")
	// Sandboxes have one address of each.
	Sandboxes4 = netip.MustParsePrefix("100.64.0.0/10")
	Sandboxes6 = netip.MustParsePrefix("fd62:6572:7468:1::/64")
	// Names are what the gate's resolver answers with.
	Names4 = netip.MustParsePrefix("198.18.0.0/15")
	Names6 = netip.MustParsePrefix("fd62:6572:7468:f::/64")
)

// Ports of the gate's doors in the router.
const (
	TransparentPort = 15001 // of TCP to any address, as it came (tproxy)
	ConnectPort     = 3128  // HTTP proxy at the gateway
	SocksPort       = 1080  // SOCKS5 at the gateway
	DNSPort         = 53    // UDP and TCP at the gateway
)

// Link is one sandbox's link. It can be written to a record and read back.
type Link struct {
	// Sandbox is whose it is.
	Sandbox string `json:"sandbox"`
	// Router is the path of the router's namespace; Name the host's end in there.
	Router string `json:"router"`
	Name   string `json:"name"`
	// Tap: the end is a tap device, for a driver that gives its descriptor to a machine (OpenTap). Else it is
	// one end of a veth, and Peer, the other end, waits in the router to be plugged into a sandbox (Plug).
	Tap  bool   `json:"tap,omitempty"`
	Peer string `json:"peer,omitempty"`
	// Addresses of the sandbox, host prefixes, and the hardware addresses of both ends.
	Address4 netip.Prefix `json:"address4"`
	Address6 netip.Prefix `json:"address6"`
	MAC      string       `json:"mac"`
	HostMAC  string       `json:"host_mac"`
	MTU      int          `json:"mtu"`
}
