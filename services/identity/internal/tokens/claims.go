package tokens

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Claim is a claim that is text, such as the plan; false when the token has
// no such claim or it is something else.
func (t Token) Claim(name string) (string, bool) {
	var s *string
	if raw, ok := t.claims[name]; !ok || json.Unmarshal(raw, &s) != nil || s == nil {
		return "", false
	}
	return *s, true
}

// Has tells whether the token has a claim of that name, whatever it is.
func (t Token) Has(name string) bool {
	_, ok := t.claims[name]
	return ok
}

// List is a claim that is a list of texts, such as the groups. One text counts
// as a list of one, as with aud; nil when the token has no such claim or it is
// something else, also in part.
func (t Token) List(name string) []string {
	if s, ok := t.Claim(name); ok {
		return []string{s}
	}
	var list []*string
	if raw, ok := t.claims[name]; !ok || json.Unmarshal(raw, &list) != nil || slices.Contains(list, nil) {
		return nil
	}
	out := make([]string, 0, len(list))
	for _, s := range list {
		out = append(out, *s)
	}
	return out
}

// actingIn is who acts for the subject: the sub of the outermost act claim
// (RFC 8693, 4.1); those nested in it are history and prove nothing. A token
// whose act claim names nobody is refused, so that it never counts as one
// that the user holds alone.
func actingIn(claims map[string]json.RawMessage) (string, error) {
	raw, ok := claims["act"]
	if !ok {
		return "", nil
	}
	act, err := object(raw)
	if err != nil {
		return "", errors.New("the token's act claim is no object")
	}
	sub, ok := Token{claims: act}.Claim("sub")
	if !ok || sub == "" {
		return "", errors.New("the token's act claim names nobody")
	}
	return sub, nil
}

// read are the names in a token that something here goes by.
var read = []string{"iss", "sub", "aud", "exp", "nbf", "iat", "act", "alg", "kid", "crit", "b64", "typ"}

// object reads a JSON object in which every name, at any depth, stands once.
// Parsers differ in which of two they take, so that two would mean two things.
// A name that only differs by case from one that is read is refused too.
func object(raw []byte) (map[string]json.RawMessage, error) {
	if err := unique(raw); err != nil {
		return nil, err
	}
	var out map[string]json.RawMessage
	if err := json.Unmarshal(raw, &out); err != nil || out == nil {
		return nil, errors.New("no JSON object")
	}
	for name := range out {
		for _, r := range read {
			if name != r && strings.EqualFold(name, r) {
				return nil, fmt.Errorf("a name is %s in other letters", r)
			}
		}
	}
	return out, nil
}

// unique refuses JSON with a name that stands twice in one object.
func unique(raw []byte) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	type level struct {
		names map[string]bool // nil in a list
		value bool            // a value comes next, not a name
	}
	var open []level
	for {
		tok, err := dec.Token()
		if err != nil {
			break // also its regular end; Unmarshal finds what else is wrong
		}
		if d, ok := tok.(json.Delim); ok && (d == '}' || d == ']') {
			open = open[:len(open)-1]
		} else {
			if n := len(open); n > 0 && open[n-1].names != nil {
				top := &open[n-1]
				if name, ok := tok.(string); ok && !top.value {
					if top.names[name] {
						return errors.New("a name stands twice in one object")
					}
					top.names[name], top.value = true, true
					continue
				}
				top.value = false
			}
			switch tok {
			case json.Delim('{'):
				open = append(open, level{names: map[string]bool{}})
			case json.Delim('['):
				open = append(open, level{})
			}
		}
	}
	return nil
}
