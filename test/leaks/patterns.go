package leaks

import (
	"bytes"
	"encoding/base32"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"iter"
	"regexp"
	"strings"
)

// all yields every place of what in b.
func all(b, what []byte) iter.Seq[int] {
	return func(yield func(int) bool) {
		for from := 0; ; {
			i := bytes.Index(b[from:], what)
			if i < 0 || !yield(from+i) {
				return
			}
			from += i + 1
		}
	}
}

var alphabet, urlAlphabet, seedAlphabet = set("+/", true), set("-_", true), set("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", false)

// kinds are the second letters of seeds: server, cluster, operator, account, user, curve.
var kinds = set("NCOAUX", false)

func set(more string, alnum bool) (out [256]bool) {
	if alnum {
		more += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	}
	for _, c := range []byte(more) {
		out[c] = true
	}
	return out
}

// run is how many bytes at the beginning of b are of an alphabet.
func run(b []byte, of *[256]bool) int {
	n := 0
	for n < len(b) && of[b[n]] {
		n++
	}
	return n
}

// leastPart is the shortest payload and signature of a token that counts.
const leastPart = 8

// tokens finds JSON Web Signatures, and JSON Web Encryptions, in their compact
// form. What stands before the header may be glued to it.
func tokens(b []byte) (out []Finding) {
	until := 0                                                          // a token may look as if another began inside it
	for _, begin := range []string{"eyJ", "eyA", "ewo", "ewk", "ew0"} { // {" and { with white space
		for i := range all(b, []byte(begin)) {
			if begin == "eyJ" && i < until {
				continue
			}
			what, n := token(b[i:])
			if n > 0 {
				out = append(out, Finding{Offset: int64(i), What: what})
				until = i + n
			}
		}
	}
	return out
}

// token says what token b begins with, and how long it is; 0 for none.
func token(b []byte) (what string, length int) {
	n := run(b, &urlAlphabet)
	if n > 4096 || n == len(b) || b[n] != '.' {
		return "", 0
	}
	raw, err := base64.RawURLEncoding.DecodeString(string(b[:n]))
	var header struct{ Alg, Typ string }
	if err != nil || json.Unmarshal(raw, &header) != nil || header.Alg == "" {
		return "", 0
	}
	p := run(b[n+1:], &urlAlphabet)
	at := n + 1 + p
	if p < leastPart || at >= len(b) || b[at] != '.' {
		return "", 0
	}
	sig := run(b[at+1:], &urlAlphabet)
	switch {
	case sig < leastPart && !strings.EqualFold(header.Alg, "none"):
		return "", 0
	case strings.HasPrefix(header.Typ, "berth-grant"):
		what = "a grant"
	default:
		what = "a token"
	}
	return what, at + 1 + sig
}

const seedLen = 58

// seeds finds seeds of NATS keys of every kind, by their check sum.
func seeds(b []byte) (out []Finding) {
	for i := 0; i+seedLen <= len(b); i++ {
		if b[i] != 'S' || !kinds[b[i+1]] || run(b[i:i+seedLen], &seedAlphabet) != seedLen {
			continue
		}
		raw, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(string(b[i : i+seedLen]))
		if err == nil && len(raw) == 36 && crc16(raw[:34]) == binary.LittleEndian.Uint16(raw[34:]) {
			out = append(out, Finding{Offset: int64(i), What: "a seed of a NATS key"})
		}
	}
	return out
}

// crc16 is CRC-16/XMODEM, the check sum of NATS keys.
func crc16(b []byte) (crc uint16) {
	for _, c := range b {
		crc ^= uint16(c) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc
}

var pemBegin = regexp.MustCompile(`^-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----\s*[A-Za-z0-9+/=\\]`)

func pemKeys(b []byte) (out []Finding) {
	for i := range all(b, []byte("-----BEGIN ")) {
		// As text of JSON, a line feed is written with a backslash.
		if pemBegin.Match(b[i:min(len(b), i+128)]) {
			out = append(out, Finding{Offset: int64(i), What: "a private key as PEM"})
		}
	}
	return out
}

var jwkSecret = regexp.MustCompile(`^"d"\s*:\s*"[A-Za-z0-9_-]{42,}"`)

// jwks finds the private member of a JSON Web Key.
func jwks(b []byte) (out []Finding) {
	for i := range all(b, []byte(`"d"`)) {
		if jwkSecret.Match(b[i:min(len(b), i+1024)]) && bytes.Contains(b[max(0, i-1024):min(len(b), i+1024)], []byte(`"kty"`)) {
			out = append(out, Finding{Offset: int64(i), What: "a private key as JWK"})
		}
	}
	return out
}

// leastRun is the shortest text in base64 that is looked into.
const leastRun = 40

// runs yields the texts in base64, of either alphabet, with where they begin.
func runs(b []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		for _, of := range []*[256]bool{&alphabet, &urlAlphabet} {
			for i := 0; i < len(b); {
				n := run(b[i:], of)
				// Without either alphabet's own letters it was seen with the first.
				again := of == &urlAlphabet && n >= leastRun && !bytes.ContainsAny(b[i:i+n], "-_")
				if n >= leastRun && !again && !yield(i, b[i:i+n]) {
					return
				}
				i += n + 1
			}
		}
	}
}

// decode reads base64 of either alphabet from a place on; it need not be whole.
func decode(text []byte, from int) []byte {
	text = text[min(from, len(text)):]
	if len(text)%4 == 1 {
		text = text[:len(text)-1]
	}
	enc := base64.RawStdEncoding
	if bytes.ContainsAny(text, "-_") {
		enc = base64.RawURLEncoding
	}
	out := make([]byte, enc.DecodedLen(len(text)))
	n, _ := enc.Decode(out, text)
	return out[:n]
}
