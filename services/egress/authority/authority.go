// Package authority has the one form of a destination that Berth compares: of a policy's rule, a DNS
// question, CONNECT, SOCKS5, SNI, a certificate, the Host field and what is dialled. It guarantees that two
// spellings of one host have one Name, that what is no host name for certain is refused and never
// repaired, and that the Name which was judged is the very text that is looked up and dialled.
package authority

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// Name is a canonical host name: lower-case ASCII, A-labels (xn--) where there are others, no dot at the
// end, at least two labels, no address in any spelling. Only Parse makes one.
type Name string

// String implements fmt.Stringer.
func (n Name) String() string { return string(n) }

// The longest of a name and of a label, in bytes, and of what is looked at.
const (
	maxName  = 253
	maxLabel = 63
	maxInput = 1024
)

// Error says why a text is no host name.
type Error struct {
	Text string
	// Literal: it is an address, or some parser takes it for one.
	Literal bool
}

// Error implements error.
func (e *Error) Error() string { return e.Text }

func bad(format string, args ...any) error { return &Error{Text: fmt.Sprintf(format, args...)} }

// profile maps other scripts as a look-up does, without the transitional exceptions. What it makes is
// checked again as if it had been written so.
var profile = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.StrictDomainName(true), idna.BidiRule(),
	idna.CheckJoiners(true), idna.CheckHyphens(false), idna.ValidateLabels(true))

// Parse reads a host name from outside. Errors are *Error.
func Parse(s string) (Name, error) {
	if err := readable(s); err != nil {
		return "", err
	}
	if _, is := ParseLiteral(s); is {
		return "", literal(s)
	}
	s = strings.TrimSuffix(lower(s), ".")
	if !ascii(s) {
		mapped, err := profile.ToASCII(s)
		if err != nil {
			return "", bad("%s is no host name: %s", short(s), plainCause(err))
		}
		if _, is := ParseLiteral(mapped); is {
			return "", literal(s)
		}
		s = mapped
	}
	if err := check(s); err != nil {
		return "", err
	}
	return Name(s), nil
}

// ParseStrict reads a name that must be written canonically, as in a policy: what is not is an error that
// says how it would be.
func ParseStrict(s string) (Name, error) {
	n, err := Parse(s)
	if err != nil {
		return "", err
	}
	if string(n) != s {
		return "", bad("%s is not how this name is written: write %s", short(s), n)
	}
	return n, nil
}

// readable refuses bytes that stand in no host name, however it is spelled.
func readable(s string) error {
	switch {
	case s == "":
		return bad("there is no host name")
	case len(s) > maxInput:
		return bad("a host name has no %d bytes", len(s))
	case !utf8.ValidString(s):
		return bad("%s is no text", short(s))
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < utf8.RuneSelf && c != '.' && !ldh(lowerByte(c)) {
			if _, is := ParseLiteral(s); is {
				return literal(s)
			}
			return bad("%s is no host name: %s is not allowed in one", short(s), strconv.QuoteRuneToGraphic(rune(c)))
		}
	}
	return nil
}

// check holds ASCII in lower case to the rules of names.
func check(s string) error {
	if len(s) > maxName {
		return bad("%s is longer than %d bytes", short(s), maxName)
	}
	labels := strings.Split(s, ".")
	for _, l := range labels {
		if err := checkLabel(s, l); err != nil {
			return err
		}
	}
	last := labels[len(labels)-1]
	if c := last[0]; c < 'a' || c > 'z' {
		return bad("%s is no host name: its last label begins with no letter", short(s)) // nor may anybody read a number in it
	}
	if len(labels) < 2 {
		return bad("%s has one label: a host name has two or more", short(s))
	}
	return nil
}

func checkLabel(s, l string) error {
	switch {
	case l == "":
		return bad("%s has an empty label", short(s))
	case len(l) > maxLabel:
		return bad("%s has a label of more than %d bytes", short(s), maxLabel)
	case l[0] == '-' || l[len(l)-1] == '-':
		return bad("%s has a label that begins or ends with -", short(s))
	}
	for i := 0; i < len(l); i++ {
		if !ldh(l[i]) {
			return bad("%s is no host name: %s is not allowed in one", short(s), strconv.QuoteToGraphic(l[i:i+1]))
		}
	}
	if strings.HasPrefix(l, "xn--") && !punycode(l) {
		return bad("%s has a label that stands for no text in the one right way: %s", short(s), l)
	}
	return nil
}

// punycode reports whether an A-label is what its own text is written as.
func punycode(l string) bool {
	text, err := profile.ToUnicode(l)
	if err != nil || ascii(text) {
		return false
	}
	back, err := profile.ToASCII(text)
	return err == nil && back == l
}

// SplitHostPort reads host:port as of CONNECT; the port is needed. Errors are *Error.
func SplitHostPort(s string) (Name, uint16, error) {
	n, port, err := SplitHost(s, 0)
	if err == nil && port == 0 {
		return "", 0, bad("%s names no port", short(s))
	}
	return n, port, err
}

// SplitHost reads host or host:port as of a Host field; without a port it is the one given.
func SplitHost(s string, without uint16) (Name, uint16, error) {
	host, port := s, without
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !bareIPv6(s) {
		p, err := ParsePort(s[i+1:])
		if err != nil {
			return "", 0, err
		}
		host, port = s[:i], p
	}
	n, err := Parse(host)
	if err != nil {
		return "", 0, err
	}
	return n, port, nil
}

// bareIPv6 reports whether the last colon parts no port off.
func bareIPv6(s string) bool {
	return strings.HasSuffix(s, "]") || !strings.HasPrefix(s, "[") && strings.Count(s, ":") > 1
}

// ParsePort reads a port in the one way in which it is written.
func ParsePort(s string) (uint16, error) {
	if s == "" || len(s) > 5 || s[0] == '0' {
		return 0, bad("%s is no port", short(s))
	}
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return 0, bad("%s is no port", short(s))
		}
	}
	p, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, bad("%s is no port", short(s))
	}
	return uint16(p), nil
}

func ldh(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' }

func ascii(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

func lowerByte(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// lower changes ASCII only; other letters are the profile's.
func lower(s string) string {
	for i := 0; i < len(s); i++ {
		if s[i] != lowerByte(s[i]) {
			b := []byte(s)
			for j := i; j < len(b); j++ {
				b[j] = lowerByte(b[j])
			}
			return string(b)
		}
	}
	return s
}

// short is a text as it is told in an error.
func short(s string) string {
	if len(s) > 80 {
		s = strings.ToValidUTF8(s[:80], "") + "..."
	}
	return strconv.QuoteToASCII(s)
}

func plainCause(err error) string { return strings.TrimPrefix(err.Error(), "idna: ") }
