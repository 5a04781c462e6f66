package errs

import (
	"strings"
	"testing"
)

// FuzzFromHeader: whatever an answer's header says is one error of a known
// kind, and goes on to the next hop as one line.
func FuzzFromHeader(f *testing.F) {
	f.Add("404", "there is no such session", "s1")
	f.Add("-1", "", "")
	f.Add("99999999999999999999", "a\r\nNats-Service-Error-Code: 0", "\x00")
	f.Fuzz(func(t *testing.T, code, text, id string) {
		err := FromHeader("ask", map[string][]string{HeaderCode: {code}, HeaderText: {text}, HeaderID: {id}})
		if err == nil {
			if code != "" || text != "" {
				t.Fatal("a failure was taken for success")
			}
			return
		}
		h := map[string][]string{}
		ToHeader(err, h)
		for k, v := range h {
			if len(v) != 1 || strings.ContainsAny(v[0], "\r\n\x00") || len(v[0]) > maxText+8 {
				t.Fatalf("%s: %.200q", k, v)
			}
		}
		if again := FromHeader("ask", h); Kind(again) != Kind(err) {
			t.Fatalf("kind %v became %v", Kind(err), Kind(again))
		}
	})
}
