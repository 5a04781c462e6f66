package subjects

import (
	"fmt"
	"strings"

	"github.com/berth-dev/berth/schemas/ids"
)

// Role is the part that a bus identity plays.
type Role string

// The roles of bus identities.
const (
	RoleService  Role = "service"  // one of the services, "svc-<service>"
	RoleHost     Role = "host"     // the hostagent of one host, "host-<host>"
	RoleGate     Role = "gate"     // the egress of one host, "gate-<host>"
	RoleFrontend Role = "frontend" // a tenant's program, "fe-<tenant>-<frontend>"
	RoleOperator Role = "operator" // a person or tool that runs the platform
	RoleKeeper   Role = "keeper"   // declares streams and consumers, "bus-keeper"
	RoleCallout  Role = "callout"  // identity, where it answers the servers who may log in, "identity-callout"
	RoleWarden   Role = "warden"   // identity, where it ends connections, "identity-warden"
)

// gatePrefix begins the names of gates; no host may have a name that begins so.
const gatePrefix = ids.GatePrefix

// Caller is one bus identity. Its zero value is nobody. Callers compare by ==.
type Caller struct {
	Role     Role
	Service  string
	Host     ids.Host
	Tenant   ids.Tenant
	Frontend ids.Frontend
}

// Service is the identity of a service; hostagent has one per host instead.
func Service(name string) Caller { return Caller{Role: RoleService, Service: tok(name)} }

// Host is the identity of the hostagent of h.
func Host(h ids.Host) Caller { return Caller{Role: RoleHost, Host: name(h)} }

// Gate is the identity of what lets traffic out of the sandboxes of h.
func Gate(h ids.Host) Caller { return Caller{Role: RoleGate, Host: name(h)} }

// Frontend is the identity of a tenant's frontend.
func Frontend(t ids.Tenant, f ids.Frontend) Caller {
	return Caller{Role: RoleFrontend, Tenant: name(t), Frontend: name(f)}
}

// Operator is the identity of operators.
func Operator() Caller { return Caller{Role: RoleOperator} }

// Keeper is the identity that declares streams, buckets and consumers.
func Keeper() Caller { return Caller{Role: RoleKeeper} }

// Callout is the identity that answers the bus's own question who may log in. It is in an account of
// its own and neither hears nor says anything else.
func Callout() Caller { return Caller{Role: RoleCallout} }

// Warden is the identity that lists connections and ends them. It is in the bus's system account and
// neither hears nor says anything else.
func Warden() Caller { return Caller{Role: RoleWarden} }

// Name is the identity's unique name. A dash inside a tenant is doubled, so
// that no two frontends share a name: tenant "a-b" and frontend "c" is
// "fe-a--b-c", tenant "a" and frontend "b-c" is "fe-a-b-c".
func (c Caller) Name() string {
	switch c.Role {
	case RoleService:
		return "svc-" + c.Service
	case RoleHost:
		return "host-" + string(c.Host)
	case RoleGate:
		return gatePrefix + string(c.Host)
	case RoleFrontend:
		return "fe-" + strings.ReplaceAll(string(c.Tenant), "-", "--") + "-" + string(c.Frontend)
	case RoleOperator:
		return "operator"
	case RoleKeeper:
		return "bus-keeper"
	case RoleCallout:
		return "identity-callout"
	case RoleWarden:
		return "identity-warden"
	}
	return ""
}

func (c Caller) String() string { return c.Name() }

// IsZero reports whether c is nobody.
func (c Caller) IsZero() bool { return c == Caller{} }

// Token is how the caller stands at the end of an RPC subject; a frontend
// takes two tokens, its tenant and its own name.
func (c Caller) Token() string {
	switch c.Role {
	case RoleService:
		return c.Service
	case RoleHost:
		return string(c.Host)
	case RoleGate:
		return gatePrefix + string(c.Host)
	case RoleFrontend:
		return string(c.Tenant) + "." + string(c.Frontend)
	case RoleOperator:
		return "operator"
	case RoleKeeper:
		return "keeper"
	case RoleCallout, RoleWarden: // they call no method of Berth
		return c.Name()
	}
	return ""
}

// Inbox is the prefix of every reply subject of the caller, without a dot at
// the end.
func (c Caller) Inbox() string { return "_INBOX." + c.Name() }

// InInbox reports whether a reply subject lies inside the caller's own inbox.
func (c Caller) InInbox(reply string) bool {
	rest, ok := strings.CutPrefix(reply, c.Inbox()+".")
	return ok && rest != "" && !strings.ContainsAny(rest, "*> \t\r\n") && !strings.Contains("."+rest+".", "..")
}

// ParseName reads what Name wrote.
func ParseName(s string) (Caller, error) {
	bad := fmt.Errorf("%w: %.140q is no bus identity (svc-<service>, host-<host>, gate-<host>, fe-<tenant>-<frontend>, operator or bus-keeper)", ids.ErrInvalid, s)
	switch {
	case s == "operator":
		return Operator(), nil
	case s == "bus-keeper":
		return Keeper(), nil
	case s == "identity-callout":
		return Callout(), nil
	case s == "identity-warden":
		return Warden(), nil
	case strings.HasPrefix(s, "svc-"):
		if !knownService(s[4:]) {
			return Caller{}, bad
		}
		return Service(s[4:]), nil
	case strings.HasPrefix(s, "host-"):
		h, err := ids.ParseHost(s[5:])
		return Caller{Role: RoleHost, Host: h}, joinBad(bad, err)
	case strings.HasPrefix(s, gatePrefix):
		h, err := ids.ParseHost(s[len(gatePrefix):])
		return Caller{Role: RoleGate, Host: h}, joinBad(bad, err)
	case strings.HasPrefix(s, "fe-"):
		t, f, ok := splitFrontend(s[3:])
		if !ok {
			return Caller{}, bad
		}
		c := Caller{Role: RoleFrontend, Tenant: t, Frontend: f}
		if c.Name() != s {
			return Caller{}, bad
		}
		return c, nil
	}
	return Caller{}, bad
}

func joinBad(bad, err error) error {
	if err == nil {
		return nil
	}
	return bad
}

// splitFrontend undoes the doubling of dashes: the first single dash ends the
// tenant.
func splitFrontend(s string) (ids.Tenant, ids.Frontend, bool) {
	var tenant strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '-' {
			tenant.WriteByte(s[i])
			continue
		}
		if i+1 < len(s) && s[i+1] == '-' {
			tenant.WriteByte('-')
			i++
			continue
		}
		t, err1 := ids.ParseTenant(tenant.String())
		f, err2 := ids.ParseFrontend(s[i+1:])
		return t, f, err1 == nil && err2 == nil
	}
	return "", "", false
}

func knownService(s string) bool {
	for _, svc := range Services {
		if svc == s {
			return true
		}
	}
	return false
}

// tok returns s, which must be one subject token: a builder that is handed
// anything else is a defect of its caller, and a subject of another shape
// would be worse than a stop.
func tok[T ~string](s T) string {
	if !ids.IsToken(string(s)) {
		panic(fmt.Sprintf("subjects: %q is not a subject token", string(s)))
	}
	return string(s)
}

func name[T ~string](s T) T { return T(tok(s)) }

func orNone[T ~string](s T) string {
	if s == "" {
		return ids.None
	}
	return tok(s)
}
