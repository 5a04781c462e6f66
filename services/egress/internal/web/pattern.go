package web

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"net/url"
	"strings"
)

// pattern is one spelling of a secret. Where fold is set, a letter counts in either case.
type pattern struct {
	text []byte // lower case where fold is set
	fold []bool
}

func (p *pattern) at(i int, c byte) bool {
	return c == p.text[i] || p.fold[i] && c|0x20 == p.text[i]
}

// prefixOf reports whether b, which is shorter than the pattern, begins it.
func (p *pattern) prefixOf(b []byte) bool {
	for i, c := range b {
		if !p.at(i, c) {
			return false
		}
	}
	return true
}

// spellings are the ways in which an answer may show a value: as it is, in base64 at any offset, in
// hexadecimal, percent-encoded, escaped for JSON or HTML.
func spellings(value []byte) []*pattern {
	v := string(value)
	texts := []string{v, url.QueryEscape(v), url.PathEscape(v), html.EscapeString(v), jsonText(v, true), jsonText(v, false),
		strings.ReplaceAll(jsonText(v, true), "/", `\/`), strings.ReplaceAll(jsonText(v, false), "/", `\/`)}
	for offset := range 3 {
		texts = append(texts, base64At(base64.RawStdEncoding, value, offset), base64At(base64.RawURLEncoding, value, offset))
	}
	seen := map[string]bool{}
	var all []*pattern
	add := func(text string, escapes string) {
		if !seen[text] {
			seen[text] = true
			all = append(all, fold(text, escapes))
		}
	}
	for i, t := range texts {
		if i == 0 || i >= 8 {
			add(t, "") // as it is
		} else {
			add(t, `%\`)
		}
	}
	h := hex.EncodeToString(value)
	if !seen[h] {
		p := fold(h, "")
		for i, c := range p.text {
			p.fold[i] = c >= 'a' && c <= 'f'
		}
		all = append(all, p)
	}
	add(everyByte(value, "%%%02x"), `%`)
	add(everyByte(value, `\u%04x`), `\`)
	add(everyByte(value, `\x%02x`), `\`)
	add(strings.Join(strings.Split(v, ""), "\x00"), "") // UTF-16, either order
	return all
}

func everyByte(value []byte, format string) string {
	var b strings.Builder
	for _, c := range value {
		fmt.Fprintf(&b, format, c)
	}
	return b.String()
}

// fold makes a pattern in which the hexadecimal digits of escapes count in either case.
func fold(text, escapes string) *pattern {
	p := &pattern{text: []byte(text), fold: make([]bool, len(text))}
	for i := 0; i < len(text); i++ {
		if !strings.Contains(escapes, text[i:i+1]) || escapes == "" {
			continue
		}
		digits := 0
		switch {
		case text[i] == '%' && i+2 < len(text):
			digits = 2
		case text[i] == '\\' && i+5 < len(text) && text[i+1] == 'u':
			digits, i = 4, i+1
		case text[i] == '\\' && i+3 < len(text) && text[i+1] == 'x':
			digits, i = 2, i+1
		}
		for ; digits > 0 && i+1 < len(text); digits-- {
			i++
			c := p.text[i] | 0x20
			if c >= 'a' && c <= 'f' {
				p.text[i], p.fold[i] = c, true
			}
		}
	}
	return p
}

func jsonText(v string, escape bool) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(escape)
	if e.Encode(v) != nil {
		return v
	}
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimSuffix(b.String(), "\n"), `"`), `"`)
}

// base64At are the characters of a base64 text that value alone decides when it begins at this offset of a
// group of three bytes.
func base64At(enc *base64.Encoding, value []byte, offset int) string {
	padded := append(make([]byte, offset), value...)
	text := enc.EncodeToString(padded)
	first := (offset*8 + 5) / 6
	last := len(padded) * 8 / 6
	return text[first:last]
}
