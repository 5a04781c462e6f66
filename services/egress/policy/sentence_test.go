package policy

import (
	"strings"
	"testing"
)

func TestEveryReasonHasASentence(t *testing.T) {
	for _, r := range []Reason{NoPolicy, NoRule, DeniedRule, BadPort, BadMethod, BadPath, BadName, Literal, Mismatch, NoName, Hidden,
		Private, Unresolved, Unreachable, Certificate, Malformed, Upgrade, Credentials, Placeholder, SecretAway, Echo, Rate, Bytes,
		Protocols, AuditAway, NoLease, Revoked, NoIdentity} {
		text := Sentence(Request{Name: "a.test", Port: 443, Protocol: HTTPS}, Decision{Reason: r, Rule: "a"})
		if why := because[r]; r != DeniedRule && why == "" || !strings.Contains(text, "https://a.test") || !strings.Contains(text, why) {
			t.Errorf("%s: %q", r, text)
		}
	}
}
