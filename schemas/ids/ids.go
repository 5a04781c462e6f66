// Package ids holds the identifiers that cross Berth's wire, each a type of
// its own. It guarantees that a value returned by a Parse function is one
// subject token ([a-z0-9_-], at most 63 characters), so that it can stand in
// a bus subject, a file name and a log line without quoting, and that parsing
// what String returned gives the same value again.
package ids

import (
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
)

// MaxToken is the longest token in characters.
const MaxToken = 63

// ErrInvalid is the error that every Parse function of this package wraps.
var ErrInvalid = errors.New("invalid identifier")

// None stands in a subject where a tenant or a session is not known.
const None = "none"

// Tenant is a customer of the platform.
type Tenant string

// Frontend is one program of a tenant that asks for sessions.
type Frontend string

// Host is one machine that runs sandboxes.
type Host string

// Template names an image, an isolation tier and sizes.
type Template string

// SessionName tells the sessions of one principal apart.
type SessionName string

// RequestID makes a request idempotent within (session key, verb).
type RequestID string

// ExecKey makes the start of a process in a sandbox idempotent.
type ExecKey string

// StreamID names one data-plane stream between a client and a host.
type StreamID string

// SandboxID is one incarnation of a session's compute on one host.
type SandboxID string

// KeyID names a signing or sealing key.
type KeyID string

// Issuer names an entry of the issuer registry (not the issuer's URL).
type Issuer string

// DefaultSession is the session that a principal has unless it names another.
const DefaultSession SessionName = "default"

// reserved words never name a tenant, frontend or host: they are services,
// roles or placeholders in subjects.
var reserved = map[string]bool{
	None: true, "identity": true, "lifecycle": true, "scheduler": true, "pool": true,
	"hostagent": true, "host": true, "egress": true, "gate": true, "credentials": true,
	"metering": true, "operator": true, "bus": true, "keeper": true,
}

// ParseTenant reads a tenant.
func ParseTenant(s string) (Tenant, error) { return parseName[Tenant]("tenant", s) }

// ParseFrontend reads a frontend.
func ParseFrontend(s string) (Frontend, error) { return parseName[Frontend]("frontend", s) }

// GatePrefix begins the bus names of gates, so that no host's name begins with it.
const GatePrefix = "gate-"

// ParseHost reads a host id.
func ParseHost(s string) (Host, error) {
	if strings.HasPrefix(s, GatePrefix) {
		return "", fmt.Errorf("%w: %.64q is no name of a host: those that begin with %s are gates", ErrInvalid, s, GatePrefix)
	}
	return parseName[Host]("host", s)
}

// ParseTemplate reads a template name.
func ParseTemplate(s string) (Template, error) { return parseToken[Template]("template", s) }

// ParseSessionName reads a session name.
func ParseSessionName(s string) (SessionName, error) {
	return parseToken[SessionName]("session name", s)
}

// ParseRequestID reads a request id.
func ParseRequestID(s string) (RequestID, error) { return parseToken[RequestID]("request id", s) }

// ParseExecKey reads an exec key.
func ParseExecKey(s string) (ExecKey, error) { return parseToken[ExecKey]("exec key", s) }

// ParseStreamID reads a stream id.
func ParseStreamID(s string) (StreamID, error) { return parseToken[StreamID]("stream id", s) }

// ParseSandboxID reads a sandbox id.
func ParseSandboxID(s string) (SandboxID, error) { return parseToken[SandboxID]("sandbox id", s) }

// ParseKeyID reads a key id.
func ParseKeyID(s string) (KeyID, error) { return parseToken[KeyID]("key id", s) }

// ParseIssuer reads the name of a registered issuer.
func ParseIssuer(s string) (Issuer, error) { return parseToken[Issuer]("issuer name", s) }

func (t Tenant) String() string      { return string(t) }
func (f Frontend) String() string    { return string(f) }
func (h Host) String() string        { return string(h) }
func (t Template) String() string    { return string(t) }
func (n SessionName) String() string { return string(n) }
func (r RequestID) String() string   { return string(r) }
func (k ExecKey) String() string     { return string(k) }
func (s StreamID) String() string    { return string(s) }
func (s SandboxID) String() string   { return string(s) }
func (k KeyID) String() string       { return string(k) }
func (i Issuer) String() string      { return string(i) }

// NewRequestID makes a random request id.
func NewRequestID() RequestID { return RequestID("r" + random()) }

// NewExecKey makes a random exec key.
func NewExecKey() ExecKey { return ExecKey("x" + random()) }

// NewStreamID makes a random stream id.
func NewStreamID() StreamID { return StreamID("d" + random()) }

// NewSandboxID makes a random sandbox id.
func NewSandboxID() SandboxID { return SandboxID("b" + random()) }

// NewWarmID makes a random name for a sandbox that is nobody's yet; it keeps it when it is claimed.
func NewWarmID() SandboxID { return SandboxID("w" + random()) }

// IsWarm reports whether the name is of a sandbox that was prepared before it had a session.
func (s SandboxID) IsWarm() bool { return len(s) == 27 && s[0] == 'w' }

// IsToken reports whether s is one subject token: 1 to 63 of [a-z0-9_-].
func IsToken(s string) bool {
	if s == "" || len(s) > MaxToken {
		return false
	}
	for i := 0; i < len(s); i++ {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return true
}

var lower32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// random returns 26 characters that hold 128 random bits.
func random() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return lower32.EncodeToString(b[:])
}

func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

func alnum(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }

func parseToken[T ~string](what, s string) (T, error) {
	if s == "" {
		return "", fmt.Errorf("%w: %s is empty", ErrInvalid, what)
	}
	if len(s) > MaxToken {
		return "", fmt.Errorf("%w: %s is %d characters long, at most %d are allowed", ErrInvalid, what, len(s), MaxToken)
	}
	if !IsToken(s) {
		return "", fmt.Errorf("%w: %s %q may hold only a-z, 0-9, _ and -", ErrInvalid, what, s)
	}
	return T(s), nil
}

// parseName reads a token that also forms the name of a bus identity: it
// begins and ends with a letter or digit, so that two of them joined by a
// dash can be told apart again, and it is no reserved word.
func parseName[T ~string](what, s string) (T, error) {
	t, err := parseToken[T](what, s)
	if err != nil {
		return "", err
	}
	if !alnum(s[0]) || !alnum(s[len(s)-1]) {
		return "", fmt.Errorf("%w: %s %q must begin and end with a letter or digit", ErrInvalid, what, s)
	}
	if reserved[s] {
		return "", fmt.Errorf("%w: %s %q is a reserved word", ErrInvalid, what, s)
	}
	return t, nil
}
