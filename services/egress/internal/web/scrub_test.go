package web

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"html"
	"io"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"
)

// encodings are how an endpoint may show what it got, by the standard library alone.
func encodings(secret string, before, after string) []string {
	j, _ := json.Marshal(before + secret + after)
	whole := before + secret + after
	return []string{
		whole, base64.StdEncoding.EncodeToString([]byte(whole)), base64.URLEncoding.EncodeToString([]byte(whole)),
		base64.RawURLEncoding.EncodeToString([]byte(whole)), hex.EncodeToString([]byte(whole)),
		strings.ToUpper(hex.EncodeToString([]byte(whole))), url.QueryEscape(whole), url.PathEscape(whole),
		strings.ToLower(url.QueryEscape("x"+after)) + before + lowerEscapes(url.QueryEscape(secret)),
		string(j), strings.ReplaceAll(string(j), "/", `\/`), html.EscapeString(whole),
		base64.StdEncoding.EncodeToString([]byte(before + ":" + secret)),
	}
}

func lowerEscapes(s string) string {
	b := []byte(s)
	for i := range b {
		if b[i] == '%' && i+2 < len(b) {
			copy(b[i+1:], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// cores is what must not be left of any encoding: the secret, or what all base64 texts of it share.
func leaks(secret, text string) string {
	for _, p := range spellings([]byte(secret)) {
		if i := findFold(text, p); i >= 0 {
			return text[i : i+len(p.text)]
		}
	}
	return ""
}

func findFold(text string, p *pattern) int {
	for i := 0; i+len(p.text) <= len(text); i++ {
		if p.prefixOf([]byte(text[i : i+len(p.text)])) {
			return i
		}
	}
	return -1
}

func scrubAll(s *scrubber, r io.Reader, size int) string {
	st := &scrubStream{scrubber: s}
	var all []byte
	b := make([]byte, size)
	for {
		n, err := r.Read(b)
		all = append(all, st.feed(b[:n], nil)...)
		if err != nil {
			return string(append(all, st.rest(nil)...))
		}
	}
}

func TestNoEncodingSurvives(t *testing.T) {
	s := newScrubber([]byte(theSecret))
	for _, before := range []string{"", "x", "ab", "abc"} {
		for i, text := range encodings(theSecret, before, "tail") {
			if leaks(theSecret, text) == "" {
				t.Fatalf("encoding %d is not known: %s", i, text)
			}
			for size := 1; size < len(text)+8; size++ {
				out := scrubAll(s, strings.NewReader("head "+text+" end"), size)
				if len(out) != len(text)+9 || !strings.HasPrefix(out, "head ") || !strings.HasSuffix(out, " end") {
					t.Fatalf("%q became %q", text, out)
				}
				if leaks(theSecret, out) != "" || strings.Count(out, "*") < 6 {
					t.Fatalf("encoding %d in pieces of %d: %s", i, size, out)
				}
			}
		}
	}
}

func TestRepeatedAndOverlappingSecretsAreMasked(t *testing.T) {
	s := newScrubber([]byte("abababab"))
	for size := 1; size < 12; size++ {
		out := scrubAll(s, strings.NewReader("-ababababab-abababab"), size)
		if strings.Trim(out, "-*ab") != "" || strings.Count(out, "a")+strings.Count(out, "b") > 8 || strings.Contains(out, "abab") {
			t.Fatalf("pieces of %d: %s", size, out)
		}
	}
}

func TestEndOfAMessageIsNotHeldBack(t *testing.T) {
	st := &scrubStream{scrubber: newScrubber([]byte("secret-value-1234"))}
	for _, part := range []string{"data: s\n\n", "ends with s", "se", "x"} {
		if out := st.feed([]byte(part), nil); string(out) != part {
			t.Fatalf("%q of %q left", out, part)
		}
	}
	if out := string(st.feed([]byte("secret-val"), nil)); strings.Contains(out, "secret") {
		t.Fatalf("%q left", out)
	}
	if out := string(st.feed([]byte("ue-1234."), nil)); strings.Contains(out, "value") || !strings.HasSuffix(out, "*.") {
		t.Fatalf("%q left", out)
	}
}

// FuzzScrub: no encoding of a secret survives in any pieces, and nothing else changes.
func FuzzScrub(f *testing.F) {
	f.Add("secret-value", "before", "after", uint64(1))
	f.Add(theSecret, "\x00\xff", "s3cr=t/Val", uint64(2))
	f.Add("aaaaaaaa", "aaaa", "aaaaaaaaa", uint64(3))
	f.Add("%41%41%41%41", `\u0041`, "%41", uint64(4))
	f.Fuzz(func(t *testing.T, secret, before, after string, seed uint64) {
		if len(secret) < 8 || len(secret) > 200 || !printable([]byte(secret)) || len(before)+len(after) > 2000 {
			return
		}
		rnd := rand.New(rand.NewPCG(seed, 1))
		s := newScrubber([]byte(secret))
		for i, text := range encodings(secret, before, after) {
			text = before + text + after
			out := ""
			st := &scrubStream{scrubber: s}
			for left := text; ; {
				n := rnd.IntN(len(left) + 1)
				out += string(st.feed([]byte(left[:n]), nil))
				if left = left[n:]; left == "" {
					break
				}
			}
			out += string(st.rest(nil))
			whole, _ := s.text(text)
			if len(out) != len(text) || leaks(secret, whole) != "" && !strings.Contains(secret, "**") {
				t.Fatalf("encoding %d: %q became %q", i, text, whole)
			}
			for j := range out {
				switch {
				case out[j] == whole[j]:
				case out[j] == text[j] && whole[j] == '*': // left before it was known, a few bytes at most
				default:
					t.Fatalf("byte %d of %q: %q, and at once %q", j, text, out, whole)
				}
			}
			if leak := leaks(secret, out); leak != "" && !strings.Contains(secret, "**") {
				t.Fatalf("encoding %d: %q is left in %q", i, leak, out)
			}
		}
	})
}

func TestOneByteAtATimeShowsAFewBytesAtMost(t *testing.T) {
	s := newScrubber([]byte("secret-value-1234"))
	out := scrubAll(s, iotest.OneByteReader(strings.NewReader("xx secret-value-1234 yy")), 64)
	if strings.Count(out, "*") < len("secret-value-1234")-s.shown || !strings.HasSuffix(out, "* yy") {
		t.Fatal(out)
	}
}

func BenchmarkScrub(b *testing.B) {
	s := newScrubber([]byte("sk-live-0123456789abcdefghijklmnopqrstuvwxyz"))
	random, text := make([]byte, 16<<10), bytes.Repeat([]byte(`{"id":"msg_01","text":"the quick brown fox jumps"},`), 400)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range random {
		random[i] = byte(rnd.Uint32())
	}
	for name, in := range map[string][]byte{"random": random, "json": text} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			st := &scrubStream{scrubber: s}
			out := make([]byte, 0, 64<<10)
			for b.Loop() {
				st.feed(in, out)
			}
		})
	}
}
