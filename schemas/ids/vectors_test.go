package ids

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// vector is one row of schemas/testdata/session-keys.json; key is in hex, the
// other fields are the UTF-8 text of the JSON strings.
type vector struct{ About, Key, Issuer, Tenant, Subject, Name, Want string }

func vectors(t testing.TB) (out []vector) {
	t.Helper()
	raw, err := os.ReadFile("../testdata/session-keys.json")
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	if err != nil || len(out) == 0 {
		t.Fatalf("%d vectors: %v", len(out), err)
	}
	return out
}

// TestSessionKeysAreThoseOfTheFormula: the vectors were not made by this
// package but with this Python, which is the whole formula:
//
//	import hmac, hashlib, struct, base64
//	def session_key(k, issuer, tenant, subject, name):  # k bytes, the others str
//	    m = b""
//	    for f in ("session", issuer, tenant, subject, name):
//	        m += struct.pack(">I", len(f.encode())) + f.encode()
//	    mac = hmac.new(k, m, hashlib.sha256).digest()
//	    return "s" + base64.b32encode(mac).decode().lower().rstrip("=")
func TestSessionKeysAreThoseOfTheFormula(t *testing.T) {
	seen := map[string]string{}
	for _, v := range vectors(t) {
		key, err := hex.DecodeString(v.Key)
		if err != nil {
			t.Fatal(err)
		}
		got := DeriveSessionKey(key, v.Issuer, Tenant(v.Tenant), v.Subject, SessionName(v.Name))
		if string(got) != v.Want {
			t.Errorf("%s: got %s, want %s", v.About, got, v.Want)
		}
		if _, err := ParseSessionKey(v.Want); err != nil {
			t.Errorf("%s: %v", v.About, err)
		}
		if other := seen[v.Want]; other != "" {
			t.Errorf("%q and %q are one session", v.About, other)
		}
		seen[v.Want] = v.About
	}
}

// principal is all that enters a session key, but for the derivation key.
type principal struct{ issuer, tenant, subject, name string }

func (p principal) key(k []byte) SessionKey {
	return DeriveSessionKey(k, p.issuer, Tenant(p.tenant), p.subject, SessionName(p.name))
}

func (p *principal) fields() []*string {
	return []*string{&p.issuer, &p.tenant, &p.subject, &p.name}
}

func principals() *rapid.Generator[principal] {
	text := rapid.OneOf(rapid.String(), rapid.StringMatching(`[ab.]{0,4}`), rapid.StringMatching("[aA\u0430\u00e9\u0065\u0301\u200d .*>\x00]{0,5}"),
		rapid.SampledFrom([]string{"", "default", "session", "alice@example.com", "https://a.example", "https://a.example/"}))
	return rapid.Custom(func(t *rapid.T) principal {
		return principal{text.Draw(t, "issuer"), text.Draw(t, "tenant"), text.Draw(t, "subject"), text.Draw(t, "name")}
	})
}

// TestDifferentPrincipalsNeverShareASession: the key is the same exactly if
// every field is the same, byte for byte.
func TestDifferentPrincipalsNeverShareASession(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := principals().Draw(t, "a"), principals().Draw(t, "b")
		if (a.key([]byte("k")) == b.key([]byte("k"))) != (a == b) {
			t.Fatalf("%q and %q", a, b)
		}
	})
}

// canonical forms that other systems take for the same text. None is here.
var canonical = map[string]func(string) string{
	"lower case":         strings.ToLower,
	"upper case":         strings.ToUpper,
	"trimmed":            strings.TrimSpace,
	"no slash at end":    func(s string) string { return strings.TrimSuffix(s, "/") },
	"valid UTF-8":        func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") },
	"composed":           func(s string) string { return strings.ReplaceAll(s, "e\u0301", "\u00e9") },
	"decomposed":         func(s string) string { return strings.ReplaceAll(s, "\u00e9", "e\u0301") },
	"no joiners":         func(s string) string { return strings.ReplaceAll(s, "\u200d", "") },
	"Latin":              func(s string) string { return strings.ReplaceAll(s, "\u0430", "a") },
	"no bytes of zero":   func(s string) string { return strings.ReplaceAll(s, "\x00", "") },
	"cut at a zero byte": func(s string) string { head, _, _ := strings.Cut(s, "\x00"); return head },
	"before the at sign": func(s string) string { head, _, _ := strings.Cut(s, "@"); return head },
	"no dots":            func(s string) string { return strings.ReplaceAll(s, ".", "") },
}

// TestNothingIsMadeCanonical: a spelling that another system folds into one is
// another principal here.
func TestNothingIsMadeCanonical(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := principals().Draw(t, "principal")
		for what, fold := range canonical {
			for i := range p.fields() {
				q := p
				f := q.fields()[i]
				*f = fold(*f)
				if (q.key([]byte("k")) == p.key([]byte("k"))) != (q == p) {
					t.Fatalf("%s of field %d: %q and %q", what, i, p, q)
				}
			}
		}
	})
}

// TestNoByteMovesBetweenFields: what is cut from the end of one field and put
// before the next, with or without a length of its own, is another principal.
func TestNoByteMovesBetweenFields(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := principals().Draw(t, "principal")
		i := rapid.IntRange(0, 2).Draw(t, "field")
		q := p
		f := q.fields()
		n := rapid.IntRange(0, len(*f[i])).Draw(t, "bytes")
		moved := (*f[i])[len(*f[i])-n:]
		*f[i] = strings.TrimSuffix(*f[i], moved)
		var length []byte
		if rapid.Bool().Draw(t, "with a length") {
			length = binary.BigEndian.AppendUint32(nil, uint32(n))
		}
		*f[i+1] = string(length) + moved + *f[i+1]
		if (q.key([]byte("k")) == p.key([]byte("k"))) != (q == p) {
			t.Fatalf("%q and %q", p, q)
		}
	})
}

// TestEveryByteOfEveryFieldCounts: changing any one byte of a field or of the
// derivation key changes the session.
func TestEveryByteOfEveryFieldCounts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := principals().Draw(t, "principal")
		k := rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "k")
		was := p.key(k)
		for i := range p.fields() {
			q := p
			f := q.fields()[i]
			if *f == "" {
				continue
			}
			b := []byte(*f)
			b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] ^= byte(rapid.IntRange(1, 255).Draw(t, "bits"))
			if *f = string(b); q.key(k) == was {
				t.Fatalf("%q and %q (valid text: %v)", p, q, utf8.ValidString(*f))
			}
		}
		k[rapid.IntRange(0, 31).Draw(t, "at")] ^= 1
		if p.key(k) == was {
			t.Fatal("the derivation key does not count")
		}
	})
}
