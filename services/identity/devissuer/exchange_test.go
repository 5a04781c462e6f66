package devissuer

import (
	"encoding/base64"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

func claimsOf(t *testing.T, token string) map[string]any {
	t.Helper()
	raw, err := base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1])
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]any{}
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestAnExchangedTokenSaysWhoActsAndGivesNothingMore: the same user, no longer
// life, no groups; the party that acts now is outermost.
func TestAnExchangedTokenSaysWhoActsAndGivesNothingMore(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	if _, err := keyfile.Open(filepath.Join(dir, keyFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := Address(dir); err != nil {
		t.Fatal(err)
	}
	own, err := Mint(dir, User{Tenant: "acme", Subject: "ann", Groups: []string{AdminGroup}}, now)
	if err != nil {
		t.Fatal(err)
	}
	once, err := Exchange(dir, "acme", own, "agent", now.Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	twice, err := Exchange(dir, "acme", once, "helper", now.Add(2*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	before, after := claimsOf(t, own), claimsOf(t, twice)
	if after["sub"] != "ann" || after["exp"] != before["exp"] || after["iss"] != before["iss"] || after[GroupsClaim] != nil {
		t.Errorf("claims %v", after)
	}
	act, _ := after["act"].(map[string]any)
	inner, _ := act["act"].(map[string]any)
	if act["sub"] != "helper" || inner["sub"] != "agent" {
		t.Errorf("act %v", act)
	}
	for name, tc := range map[string]struct {
		tenant, token, acting string
		at                    time.Time
		want                  errkind.Kind
	}{
		"another tenant": {"globex", own, "agent", now, errkind.Unauthenticated},
		"not a token":    {"acme", "ann", "agent", now, errkind.Unauthenticated},
		"changed":        {"acme", own[:len(own)-4] + "AAAA", "agent", now, errkind.Unauthenticated},
		"expired":        {"acme", own, "agent", now.Add(2 * time.Hour), errkind.Expired},
		"nobody":         {"acme", own, "", now, errkind.Invalid},
	} {
		_, err := Exchange(dir, ids.Tenant(tc.tenant), tc.token, tc.acting, tc.at)
		if errs.Kind(err) != tc.want || strings.Contains(err.Error(), tc.token) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n, token := 0, own; ; n++ {
		if token, err = Exchange(dir, "acme", token, "agent", now); err != nil {
			if n != maxExchanges || errs.Kind(err) != errkind.Refused {
				t.Errorf("after %d exchanges: %v", n, err)
			}
			break
		}
	}
}
