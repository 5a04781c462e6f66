// Package session holds what a gate knows of the sandboxes of its host: whose traffic comes from which
// address, what its policy says now, which names it was told, and what it has open. It guarantees that a
// connection is registered under exactly the binding that its address had when it came, and that what is
// open when a binding, a policy or the lease ends is judged again and reset if it is not allowed any more.
package session

import (
	"net/netip"

	"github.com/berth-dev/berth/services/egress/authority"
	"github.com/berth-dev/berth/services/egress/policy"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// Session is one binding. Its methods are safe for concurrent use.
type Session interface {
	// Binding is whose it is; not to be changed.
	Binding() *egressv1.Binding
	// Policy in force now; never nil: without one everything is denied.
	Policy() *policy.Policy
	// NameOf is the name that a synthetic address stands for in this session.
	NameOf(netip.Addr) (authority.Name, bool)
	// Open registers a connection or a request by what it was allowed as. It refuses with a *Refusal when the
	// lease, the binding, the audit log, the rule's limits or the policy as it is now say no. Live.Close must
	// be called.
	Open(policy.Request, policy.Decision, func()) (Live, error)
	// Note records what was judged: the audit record (whose session, actor, host and times it fills in), the
	// event and the notice. An error means that it could not be recorded: what was allowed must not go on.
	Note(*egressv1.Record) error
}

// Live is something that is open. The function given to Open resets it, from another goroutine, at most
// once, when it is not allowed any more.
type Live interface {
	// Bytes counts what went out and came in; it refuses with a *Refusal once the rule's bytes are used up.
	Bytes(out, in int) error
	// Unrecorded says that its record could not be kept: Close then leaves in the audit log that it is open,
	// for the next start to record.
	Unrecorded()
	// Close ends it. It comes after Note: until then the audit log has that it is open.
	Close()
}

// Refusal says why something is not let out.
type Refusal struct {
	Reason policy.Reason
	Text   string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Text }

// Finder finds the session of an address.
type Finder interface {
	// ByAddress is the session that the host's kernel lets use this source address.
	ByAddress(netip.Addr) (Session, bool)
}
