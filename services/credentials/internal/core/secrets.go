package core

import (
	"slices"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Bounds of a tenant's secrets.
const (
	minSecret    = 8
	maxSecret    = 8192
	maxHosts     = 32
	maxHostBytes = 2048 // of all hosts of a secret
	maxHostName  = 253
	MaxSecrets   = 256 // of one tenant
)

// PutSecret: an operator stores or replaces a secret.
type PutSecret struct {
	Tenant ids.Tenant
	Name   string
	Value  []byte
	Hosts  []string
}

// RemoveSecret: an operator destroys one.
type RemoveSecret struct {
	Tenant ids.Tenant
	Name   string
}

// Reveal: the gate of a host asks for a secret of the session's tenant. Record is what scheduler says of the
// session at this moment.
type Reveal struct {
	Host    ids.Host
	Session Session
	Record  Record
	Name    string
}

func (PutSecret) event()    {}
func (RemoveSecret) event() {}
func (Reveal) event()       {}

// StoreSecret: encrypt and store a secret, then destroy the one it replaces. Hosts are sorted.
type StoreSecret struct {
	Tenant ids.Tenant
	Name   string
	Hosts  []string
}

// DestroySecret: overwrite and remove a secret.
type DestroySecret struct {
	Tenant ids.Tenant
	Name   string
}

// GiveSecret: read a secret and seal it to the gate.
type GiveSecret struct {
	Tenant ids.Tenant
	Name   string
}

func (StoreSecret) command()   {}
func (DestroySecret) command() {}
func (GiveSecret) command()    {}

// ofTenant is what an audit record of no session is about.
func ofTenant(t ids.Tenant) Session { return Session{Generation: Generation{Tenant: t}} }

var anOperator = "operator"

func putSecret(s State, e PutSecret) (State, []Command, error) {
	if err := checkName(e.Name); err != nil {
		return s, nil, err
	}
	if n := len(e.Value); n < minSecret || n > maxSecret {
		return s, nil, refuse(errkind.Invalid, "the value of a secret is %d to %d bytes long, this one %d", minSecret, maxSecret, n)
	}
	for i, c := range e.Value {
		if c < ' ' || c > '~' {
			return s, nil, refuse(errkind.Invalid, "the value of a secret is printable ASCII; byte %d is not (a line end at the end of a file is one)", i+1)
		}
	}
	hosts, err := checkHosts(e.Hosts)
	if err != nil {
		return s, nil, err
	}
	return s, []Command{
		StoreSecret{e.Tenant, e.Name, hosts},
		Audit{What: "stored", Session: ofTenant(e.Tenant), Actor: Actor{Tenant: e.Tenant, Role: anOperator},
			Reason: "secret " + e.Name + " for " + strings.Join(hosts, ", ")},
	}, nil
}

func removeSecret(s State, e RemoveSecret) (State, []Command, error) {
	if err := checkName(e.Name); err != nil {
		return s, nil, err
	}
	return s, []Command{
		DestroySecret{e.Tenant, e.Name},
		Audit{What: "removed", Session: ofTenant(e.Tenant), Actor: Actor{Tenant: e.Tenant, Role: anOperator}, Reason: "secret " + e.Name},
	}, nil
}

func reveal(s State, e Reveal) (State, []Command, error) {
	if err := checkName(e.Name); err != nil {
		return s, nil, err
	}
	err := s.owns(e.Host, e.Session, e.Record)
	if err == nil && e.Record.Ending {
		err = &Refusal{errkind.StaleEpoch, "the session is going to sleep"}
	}
	if err != nil {
		return s, []Command{RefusedSecret(e, err.Reason)}, err
	}
	return s, []Command{
		GiveSecret{e.Session.Tenant, e.Name},
		Audit{What: "revealed", Session: e.Session, Reason: "secret " + e.Name + " to the gate of host " + string(e.Host)},
	}, nil
}

// RefusedSecret records that a gate did not get a secret.
func RefusedSecret(e Reveal, reason string) Audit {
	return Audit{What: "refused", Session: e.Session, Reason: "secret " + e.Name + " for the gate of host " + string(e.Host) + ": " + reason}
}

func checkName(name string) error {
	ok := name != "" && len(name) <= ids.MaxToken && name[0] != '-' && name[0] != '_'
	for _, c := range []byte(name) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_')
	}
	if !ok {
		// It is not repeated: who mixes up name and value finds it in no log.
		return refuse(errkind.Invalid, "the name of a secret is 1 to %d of a-z, 0-9, - and _, and begins with a letter or digit", ids.MaxToken)
	}
	return nil
}

// checkHosts returns the hosts in order, each once.
func checkHosts(hosts []string) ([]string, error) {
	total := 0
	for i, h := range hosts {
		if !canonicalHost(h) {
			return nil, refuse(errkind.Invalid, "host %d of the secret is no canonical name: lower-case letters, digits and - (others as xn--), at least two labels, no address, port, * or dot at the end", i+1)
		}
		total += len(h)
	}
	out := slices.Compact(slices.Sorted(slices.Values(hosts)))
	switch {
	case len(out) == 0:
		return nil, refuse(errkind.Invalid, "a secret needs at least one host that it may be sent to")
	case len(out) > maxHosts || total > maxHostBytes:
		return nil, refuse(errkind.Invalid, "a secret has at most %d hosts, of %d characters together", maxHosts, maxHostBytes)
	}
	return out, nil
}

// canonicalHost reports whether a name is written in the one form that egress compares.
func canonicalHost(name string) bool {
	labels := strings.Split(name, ".")
	if len(name) > maxHostName || len(labels) < 2 {
		return false
	}
	for _, l := range labels {
		if !hostLabel(l) {
			return false
		}
	}
	last := labels[len(labels)-1] // a number there would make it an address
	_, err := strconv.ParseUint(last, 0, 64)
	return err != nil && last[0] > '9' && !strings.HasPrefix(last, "0x")
}

func hostLabel(l string) bool {
	if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
		return false
	}
	for _, c := range []byte(l) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return len(l) < 4 || l[2:4] != "--" || l[:2] == "xn"
}
