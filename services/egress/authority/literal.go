package authority

import (
	"net/netip"
	"strconv"
	"strings"
)

func literal(s string) error {
	return &Error{Text: short(s) + " is an address, not a host name", Literal: true}
}

// ParseLiteral reads an address as the most lenient parser would: IPv6 with or without brackets and zone,
// and IPv4 in one to four parts, each decimal, octal or hexadecimal, also with a dot at the end. It serves
// to say what something is that is refused; nothing is dialled by it.
func ParseLiteral(s string) (netip.Addr, bool) {
	t := strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if strings.ContainsRune(t, ':') {
		t, _, _ = strings.Cut(t, "%") // a zone may hold anything
		a, err := netip.ParseAddr(t)
		return a, err == nil
	}
	return aton(strings.TrimSuffix(t, "."))
}

// aton is inet_aton: the last part fills what the others leave.
func aton(s string) (netip.Addr, bool) {
	parts := strings.Split(s, ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var v uint64
	for i, p := range parts {
		n, ok := number(p)
		last := i == len(parts)-1
		if !ok || !last && n > 0xff || last && n >= 1<<(8*(5-len(parts))) {
			return netip.Addr{}, false
		}
		if last {
			v |= n
		} else {
			v |= n << (8 * (3 - i))
		}
	}
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)}), true
}

func number(s string) (uint64, bool) {
	base := 10
	switch {
	case s == "":
		return 0, false
	case len(s) > 1 && (strings.HasPrefix(s, "0x") || strings.HasPrefix(s, "0X")):
		if s, base = s[2:], 16; s == "" {
			return 0, true // some take this for 0
		}
	case len(s) > 1 && s[0] == '0':
		s, base = s[1:], 8
	}
	for _, c := range s {
		if c == '+' || c == '-' || c == '_' {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(s, base, 64)
	if err != nil && base == 8 {
		n, err = strconv.ParseUint(s, 10, 64) // some read no octal
	}
	return n, err == nil
}
