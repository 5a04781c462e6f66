// Package policy decides what may leave a sandbox. It guarantees that a policy which was read is complete
// and canonical (what is not is an error with its line), that everything is denied which no rule allows,
// that of the layers of a session a denial of any wins, and that a decision depends on its arguments alone.
// How to write one: docs/howto/egress.md.
package policy

import (
	"net/netip"

	"github.com/berth-dev/berth/services/egress/authority"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// Protocol is how a request goes.
type Protocol string

// The protocols that rules name. A rule for HTTPS holds for WebSocket over TLS too, one for HTTP for
// WebSocket without.
const (
	HTTP  Protocol = "http"
	HTTPS Protocol = "https"
	TLS   Protocol = "tls" // passed through, judged by its names alone; seen inside only where other rules need it
	TCP   Protocol = "tcp" // any bytes, by explicit host and port
)

// Reason of a decision, for programs. Append-only.
type Reason string

// The reasons.
const (
	Allowed     Reason = "allowed"
	NoPolicy    Reason = "no_policy"   // no layer has a policy
	NoRule      Reason = "no_rule"     // none allows it
	DeniedRule  Reason = "denied"      // a rule denies it
	BadPort     Reason = "port"        // the host is allowed, on another port
	BadMethod   Reason = "method"      // the host is allowed, with other methods
	BadPath     Reason = "path"        // the host is allowed, below other paths
	BadName     Reason = "name"        // what was asked for is no host name
	Literal     Reason = "literal"     // an address instead of a name
	Mismatch    Reason = "mismatch"    // CONNECT, SNI, Host and certificate do not name one host
	NoName      Reason = "no_name"     // TLS without SNI
	Hidden      Reason = "hidden"      // TLS that hides whom it is for (ECH)
	Private     Reason = "private"     // the name leads to an address that nobody allowed
	Unresolved  Reason = "unresolved"  // the name leads nowhere
	Unreachable Reason = "unreachable" // nobody answers there
	Certificate Reason = "certificate" // the certificate there is not the host's
	Malformed   Reason = "malformed"   // the request breaks the protocol's rules, or could be read in two ways
	Upgrade     Reason = "upgrade"     // to something else than WebSocket
	Credentials Reason = "credentials" // of the sandbox's own, where the rule lets none through
	Placeholder Reason = "placeholder" // of a secret, sent elsewhere than where it belongs
	SecretAway  Reason = "secret_away" // it could not be had
	Echo        Reason = "echo"        // the answer held a secret and could not be scrubbed
	Rate        Reason = "rate"        // more requests than the rule allows
	Bytes       Reason = "bytes"       // more bytes a day than the rule allows
	Protocols   Reason = "protocol"    // the host is allowed, by another protocol
	AuditAway   Reason = "audit_away"  // it could not be recorded
	NoLease     Reason = "no_lease"    // the host's lease has ended
	Revoked     Reason = "revoked"     // it was allowed and is not any more
	NoIdentity  Reason = "no_identity" // it came over no link that is somebody's
)

// Request is what is judged.
type Request struct {
	Name     authority.Name
	Port     uint16
	Protocol Protocol
	// Method and Path of HTTP and HTTPS: the path as it is sent on, without the query, dot segments
	// resolved; both empty for TLS and TCP.
	Method string
	Path   string
}

// Decision on a request.
type Decision struct {
	Allowed bool
	Reason  Reason
	// Rule that decided, its layer and the generation of its policy; empty if none did. Generation is then
	// that of the newest policy in force.
	Rule       string
	Layer      egressv1.Layer
	Generation uint64
	// Reported is a rule in report-only mode that would have denied what is allowed, or have allowed what is
	// denied.
	Reported string
	// Ask is whom to ask, from the most specific policy that says so.
	Ask string
	// What holds for an allowed one.
	Grant
}

// Grant is what an allowing rule says besides.
type Grant struct {
	// Addresses that the operator allows the name to lead to though they are private.
	Addresses []netip.Prefix
	Inject    []Injection
	// RefuseCredentials: those that the gate did not put in itself are refused.
	RefuseCredentials bool
	// Limit of the rule, over all that the session does by it.
	Limit Limit
}

// Limit of one rule for one session; 0: none.
type Limit struct {
	RequestsPerSecond float64
	Burst             int
	BytesPerDay       uint64
	Connections       int
}

// Injection is a secret that the gate puts in.
type Injection struct {
	Secret string // name of the tenant's secret
	// Header, or Query, that carries it.
	Header string
	Query  string
	// Format of the value, with {secret} in it once; by default "Bearer {secret}" for the header
	// Authorization, else the secret alone. Never empty in what was read.
	Format string
	// Placeholder that the sandbox may send in its place; by default BERTH_SECRET_<NAME>. Never empty in what
	// was read.
	Placeholder string
}

// Need is what a connection to a host and port takes, before anything of it was read.
type Need int

// The needs.
const (
	Refuse    Need = iota // nothing to there could be allowed
	Pass                  // the names decide: TLS is passed through, and judged as the protocol TLS
	Intercept             // HTTP is read and each request judged: within TLS, which is opened here, or plain
	Raw                   // bytes as they are, judged as the protocol TCP
)
