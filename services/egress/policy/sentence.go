package policy

import (
	"fmt"
	"strings"
)

// dns is the protocol of records of questions for a name; no rule names it.
const dns Protocol = "dns"

// String is a request as a person writes it.
func (r Request) String() string {
	host := string(r.Name)
	switch {
	case host == "":
		return "a host" // it named none, or one of many
	case r.Protocol == dns:
		return "the name " + host
	}
	standard := r.Protocol == HTTP && r.Port == 80 || (r.Protocol == HTTPS || r.Protocol == TLS) && r.Port == 443
	if r.Port != 0 && !standard {
		host = fmt.Sprintf("%s:%d", host, r.Port)
	}
	switch {
	case r.Protocol == "":
		return host
	case r.opaque():
		return fmt.Sprintf("%s to %s", strings.ToUpper(string(r.Protocol)), host)
	}
	text := fmt.Sprintf("%s://%s%s", r.Protocol, host, r.Path)
	if r.Method != "" {
		text = r.Method + " " + text
	}
	return text
}

// because says what a reason means, after "was not let out: ".
var because = map[Reason]string{
	NoPolicy:    "nothing may leave this sandbox: it has no egress policy",
	NoRule:      "no rule allows this host",
	BadPort:     "this host is allowed, but not on this port",
	BadMethod:   "this host is allowed, but not with this method",
	BadPath:     "this host is allowed, but not below this path",
	Protocols:   "this host is allowed, but not by this protocol",
	BadName:     "this is no host name",
	Literal:     "hosts are reached by name, not by address",
	Mismatch:    "the names in the connection do not agree on one host",
	NoName:      "TLS names no host (SNI)",
	Hidden:      "TLS hides which host it is for",
	Private:     "the name leads to an address that no sandbox may reach",
	Unresolved:  "the name leads nowhere",
	Unreachable: "nobody answers there",
	Certificate: "the certificate there is not the host's",
	Malformed:   "the request breaks the rules of its protocol, or could be read in two ways",
	Upgrade:     "a connection may be upgraded to WebSocket only",
	Credentials: "credentials of its own are not let through here",
	Placeholder: "the placeholder of a secret was sent to a host that it is not for",
	SecretAway:  "the secret that belongs to it could not be had",
	Echo:        "the answer held a secret",
	Rate:        "there were more requests than the rule allows; try again later",
	Bytes:       "the rule's bytes of the day are used up",
	AuditAway:   "it could not be recorded",
	NoLease:     "the host has lost its lease",
	Revoked:     "it was allowed and is not any more",
	NoIdentity:  "it came from no sandbox that is anybody's",
}

// Sentence is what a person reads of a decision, with whom to ask.
func Sentence(r Request, d Decision) string { return sentence(r.String(), d) }

func sentence(what string, d Decision) string {
	if d.Allowed {
		return fmt.Sprintf("%s is allowed by rule %s of the %s policy.", what, d.Rule, LayerName(d.Layer))
	}
	why, ok := because[d.Reason]
	if !ok {
		why = "it is not allowed"
	}
	if d.Rule != "" {
		by := fmt.Sprintf("rule %s of the %s policy", d.Rule, LayerName(d.Layer))
		if d.Reason == DeniedRule {
			why = by + " denies it"
		} else {
			why += " (" + by + ")"
		}
	}
	text := fmt.Sprintf("%s was not let out: %s.", what, why)
	if !asking(d.Reason) {
		return text
	}
	if d.Ask != "" {
		return text + " If it is needed, ask " + d.Ask + "."
	}
	return text + " If it is needed, ask whoever runs this platform for you."
}

// asking reports whether somebody could allow it.
func asking(r Reason) bool {
	switch r {
	case Unresolved, Unreachable, Certificate, Malformed, Rate, AuditAway, NoLease, NoIdentity, BadName, NoName, Hidden, Mismatch, Upgrade, Echo:
		return false
	}
	return true
}
