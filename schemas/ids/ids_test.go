package ids

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// parsers of every identifier that is a token, as func(string) (string, error).
var parsers = map[string]func(string) (string, error){
	"tenant":       text(ParseTenant),
	"frontend":     text(ParseFrontend),
	"host":         text(ParseHost),
	"template":     text(ParseTemplate),
	"session name": text(ParseSessionName),
	"request id":   text(ParseRequestID),
	"exec key":     text(ParseExecKey),
	"stream id":    text(ParseStreamID),
	"sandbox id":   text(ParseSandboxID),
	"key id":       text(ParseKeyID),
	"issuer":       text(ParseIssuer),
	"session key":  text(ParseSessionKey),
	"epoch":        func(s string) (string, error) { e, err := ParseEpoch(s); return e.String(), err },
	"generation":   func(s string) (string, error) { g, err := ParseGeneration(s); return g.String(), err },
}

func text[T ~string](parse func(string) (T, error)) func(string) (string, error) {
	return func(s string) (string, error) { v, err := parse(s); return string(v), err }
}

func TestBadInputIsRefusedWithOneSentence(t *testing.T) {
	bad := []string{
		"", ".", "a.b", "A", "é", "a b", "a\n", "*", ">", "a/b", "..", "a\x00", strings.Repeat("a", 64),
		strings.Repeat("a", 100000), "$JS", "a>", "_INBOX",
	}
	for what, parse := range parsers {
		for _, s := range bad {
			v, err := parse(s)
			if err == nil {
				t.Errorf("%s: %.80q was accepted as %q", what, s, v)
				continue
			}
			if !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 300 {
				t.Errorf("%s: error %q", what, err)
			}
		}
	}
}

func TestNamesOfIdentities(t *testing.T) {
	for _, s := range []string{"a", "a-b", "acme_2", "0", strings.Repeat("a", 63)} {
		if _, err := ParseTenant(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []string{"-a", "a-", "_a", "a_", "-", "none", "scheduler", "operator"} {
		if _, err := ParseTenant(s); err == nil {
			t.Errorf("tenant %q was accepted", s)
		}
		if _, err := ParseHost(s); err == nil {
			t.Errorf("host %q was accepted", s)
		}
	}
	if _, err := ParseRequestID("-none_"); err != nil {
		t.Error(err)
	}
}

func TestParsedIsAToken(t *testing.T) {
	for what, parse := range parsers {
		rapid.Check(t, func(t *rapid.T) {
			s := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9_-]{1,70}`), rapid.StringMatching(`[0-9]{1,20}-[0-9]{1,22}`)).Draw(t, "s")
			v, err := parse(s)
			if err != nil {
				return
			}
			if v != s || !IsToken(v) {
				t.Fatalf("%s: %q parsed to %q", what, s, v)
			}
		})
	}
}

func TestRandomIdentifiersParse(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		for _, s := range []string{string(NewRequestID()), string(NewExecKey()), string(NewStreamID()), string(NewSandboxID())} {
			if _, err := ParseRequestID(s); err != nil || seen[s] || len(s) != 27 {
				t.Fatalf("%q: %v", s, err)
			}
			seen[s] = true
		}
	}
}

func TestEpochRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := Epoch{rapid.Uint32().Draw(t, "incarnation"), rapid.Uint64().Draw(t, "index")}
		got, err := ParseEpoch(e.String())
		if err != nil || got != e || !IsToken(e.String()) {
			t.Fatalf("%v: %v, %v", e, got, err)
		}
		b, err := json.Marshal(map[string]any{"e": e, "g": Generation(e)})
		if err != nil {
			t.Fatal(err)
		}
		var back struct {
			E Epoch
			G Generation
		}
		if err := json.Unmarshal(b, &back); err != nil || back.E != e || back.G != Generation(e) {
			t.Fatalf("%s: %+v, %v", b, back, err)
		}
	})
}

func TestEpochForms(t *testing.T) {
	for _, s := range []string{"1", "1-", "-1", "01-2", "1-02", "+1-2", "1--2", "4294967296-1", "1-18446744073709551616", "1-2-3", " 1-2", "1-2 "} {
		if e, err := ParseEpoch(s); err == nil {
			t.Errorf("%q parsed to %v", s, e)
		}
	}
	if c := (Epoch{2, 1}).Compare(Epoch{1, 9}); c != 1 {
		t.Errorf("a later incarnation compares %d", c)
	}
	if !(Epoch{}).IsZero() || (Epoch{0, 1}).IsZero() || (Generation{1, 0}).IsZero() {
		t.Error("IsZero")
	}
}

func TestSessionKeyHasOneForm(t *testing.T) {
	k := string(DeriveSessionKey([]byte("k"), "i", "t", "s", "n"))
	for _, s := range []string{k[1:], "t" + k[1:], strings.ToUpper(k), k + "a", k[:52] + "b", k[:52] + "=", "s" + strings.Repeat("1", 52)} {
		if _, err := ParseSessionKey(s); err == nil {
			t.Errorf("%q was accepted", s)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("acme")
	f.Add("1-2")
	f.Add(string(DeriveSessionKey([]byte("k"), "i", "t", "s", "n")))
	f.Fuzz(func(t *testing.T, s string) {
		for what, parse := range parsers {
			if v, err := parse(s); err == nil && (v != s || !IsToken(v)) {
				t.Fatalf("%s: %q parsed to %q", what, s, v)
			}
		}
	})
}
