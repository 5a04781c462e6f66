package policy

import (
	"errors"
	"strings"
)

// maxPath is the longest path that is judged.
const maxPath = 8192

var (
	errPathStart   = errors.New("the path does not begin with /")
	errPathLong    = errors.New("the path is too long")
	errPathByte    = errors.New("the path holds what must be percent-encoded, or a backslash")
	errPathEscape  = errors.New("the path holds a broken or ambiguous percent-encoding")
	errPathClimbs  = errors.New("the path climbs out by encoded separators or parameters")
	errPathControl = errors.New("the path holds an encoded control character")
)

// CanonicalPath is the one form of the path of a request, without its query, as it is judged and sent on:
// percent-encodings of plain characters are resolved, others are in capitals, and what some clients leave
// plain is encoded; then dot segments are resolved.
// What servers read in different ways is an error: backslashes, encodings of encodings of separators, dot
// segments that show only when an encoded slash is read as one, or before a semicolon. An encoded slash
// stays encoded. CanonicalPath of what it returned is the same. "*" (of OPTIONS) stays as it is.
func CanonicalPath(raw string) (string, error) {
	if raw == "*" {
		return raw, nil
	}
	if raw == "" || raw[0] != '/' {
		return "", errPathStart
	}
	if len(raw) > maxPath {
		return "", errPathLong
	}
	path, err := canonicalEscapes(raw)
	if err != nil {
		return "", err
	}
	path = resolveDots(path)
	if strings.ContainsAny(path, "%;") && climbs(path) {
		return "", errPathClimbs
	}
	return path, nil
}

// canonicalEscapes returns raw itself when nothing is to change.
func canonicalEscapes(raw string) (string, error) {
	var b strings.Builder
	from := 0
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c <= ' ' || c >= 0x7f || c == '\\' || c == '?' || c == '#' {
			return "", errPathByte
		}
		text, took := "", 1
		switch {
		case c == '%':
			var err error
			if text, err = canonicalEscape(raw[i:]); err != nil {
				return "", err
			}
			took = 3
		case strings.IndexByte("\"<>^`{|}", c) >= 0:
			text = escape(c)
		default:
			continue
		}
		if text != raw[i:i+took] {
			b.WriteString(raw[from:i])
			b.WriteString(text)
			from = i + took
		}
		i += took - 1
	}
	if from == 0 {
		return raw, nil
	}
	b.WriteString(raw[from:])
	return b.String(), nil
}

// canonicalEscape is the first percent-encoding of s.
func canonicalEscape(s string) (string, error) {
	if len(s) < 3 || unhex(s[1]) < 0 || unhex(s[2]) < 0 {
		return "", errPathEscape
	}
	c := byte(unhex(s[1])<<4 | unhex(s[2]))
	switch {
	case c < ' ' || c == 0x7f:
		return "", errPathControl
	case c == '\\':
		return "", errPathEscape
	case c == '%' && encodesSeparator(s[3:]):
		return "", errPathEscape
	case unreserved(c):
		return string(rune(c)), nil
	}
	return escape(c), nil
}

func escape(c byte) string {
	const digits = "0123456789ABCDEF"
	return string([]byte{'%', digits[c>>4], digits[c&15]})
}

// encodesSeparator reports whether what stands behind an encoded percent sign would be a separator, a dot
// or NUL once it is decoded again, however often.
func encodesSeparator(s string) bool {
	for len(s) >= 2 {
		if unhex(s[0]) < 0 || unhex(s[1]) < 0 {
			return false
		}
		switch c := unhex(s[0])<<4 | unhex(s[1]); {
		case c == '/' || c == '\\' || c == '.' || c == ';' || c < ' ':
			return true
		case c != '%':
			return false
		}
		s = s[2:]
	}
	return false
}

// resolveDots removes dot segments as RFC 3986 does; an empty segment is one.
func resolveDots(path string) string {
	if !strings.Contains(path, "/.") {
		return path
	}
	var out []string
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		last := i == len(segments)-1
		switch s {
		case ".":
		case "..":
			if len(out) > 0 {
				out = out[:len(out)-1]
			}
		default:
			out = append(out, s)
			continue
		}
		if last {
			out = append(out, "")
		}
	}
	return "/" + strings.Join(out, "/")
}

// climbs reports whether a server that reads an encoded slash as one, or takes off what follows a
// semicolon, would see a dot segment.
func climbs(path string) bool {
	for s := range strings.SplitSeq(strings.ReplaceAll(path, "%2F", "/"), "/") {
		s, _, _ = strings.Cut(s, ";")
		s, _, _ = strings.Cut(s, "%3B")
		if s == "." || s == ".." {
			return true
		}
	}
	return false
}

// looseReading is how a server reads a path that decodes slashes and takes several for one.
func looseReading(path string) string {
	if strings.Contains(path, "%2F") {
		path = strings.ReplaceAll(path, "%2F", "/")
	}
	for strings.Contains(path, "//") {
		path = strings.ReplaceAll(path, "//", "/")
	}
	return path
}

// below reports whether path is prefix, or lies below it at the border of a segment.
func below(path, prefix string) bool {
	return strings.HasPrefix(path, prefix) && (len(path) == len(prefix) || prefix[len(prefix)-1] == '/' || path[len(prefix)] == '/')
}

// belowAny reports whether path lies below one of the prefixes: in every reading, or in any. Where any is
// enough, as in a denial, there are more of them: see deniedBelow.
func belowAny(path string, prefixes []string, anyReading bool) bool {
	if anyReading {
		return deniedBelow(path, prefixes)
	}
	loose := looseReading(path)
	for _, p := range prefixes {
		if below(path, p) && below(loose, p) {
			return true
		}
	}
	return false
}

// deniedBelow is belowAny of a denial: servers that take off what follows a semicolon in a segment, or tell no
// capital from a small letter, must not let through what is denied.
func deniedBelow(path string, prefixes []string) bool {
	loose := looseReading(path)
	readings := []string{strings.ToLower(path), strings.ToLower(loose), strings.ToLower(looseReading(withoutParameters(loose)))}
	for _, p := range prefixes {
		p = strings.ToLower(p)
		for _, r := range readings {
			if below(r, p) {
				return true
			}
		}
	}
	return false
}

// withoutParameters is path with each segment ended at its first semicolon, encoded or not.
func withoutParameters(path string) string {
	if !strings.Contains(path, ";") && !strings.Contains(path, "%3B") {
		return path
	}
	segments := strings.Split(path, "/")
	for i, s := range segments {
		s, _, _ = strings.Cut(s, ";")
		segments[i], _, _ = strings.Cut(s, "%3B")
	}
	return strings.Join(segments, "/")
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

func unreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0
}
