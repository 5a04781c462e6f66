package wire

import (
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// Text is a string of any bytes, such as a file name or an argument. In JSON it
// is a string when it is valid UTF-8 and {"b64": "..."} otherwise, so that no
// byte is ever replaced.
type Text string

type rawText struct {
	B64 []byte `json:"b64"`
}

// MarshalJSON implements json.Marshaler.
func (t Text) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(t)) {
		return json.Marshal(string(t))
	}
	return json.Marshal(rawText{B64: []byte(t)})
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Text) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		var raw rawText
		if err := json.Unmarshal(b, &raw); err != nil {
			return fmt.Errorf("wire: text: %w", err)
		}
		*t = Text(raw.B64)
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("wire: text: %w", err)
	}
	*t = Text(s)
	return nil
}

// Texts converts plain strings.
func Texts(in []string) []Text {
	out := make([]Text, len(in))
	for i, s := range in {
		out[i] = Text(s)
	}
	return out
}

// Strings converts back to plain strings.
func Strings(in []Text) []string {
	out := make([]string, len(in))
	for i, t := range in {
		out[i] = string(t)
	}
	return out
}
