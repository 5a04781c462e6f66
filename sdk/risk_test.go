package sdk

import (
	"crypto/ed25519"
	"errors"
	"strings"
	"testing"
	"time"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// TestFactsOfRiskGoWithTheOpen: what is told arrives, what is left out stays
// untold, and a word that nobody knows is an error, not a silence.
func TestFactsOfRiskGoWithTheOpen(t *testing.T) {
	open := func(r Risk) (*identityv1.RiskFacts, error) {
		a, err := (&Client{}).openAsk(OpenOptions{Risk: r}, "", ed25519.PublicKey{})
		if err != nil {
			return nil, err
		}
		return a.body(time.Time{}).(*identityv1.OpenRequest).GetRisk(), nil
	}
	got, err := open(Risk{CodeAuthor: ModelCode, Tools: AnyTools, Network: NamedNetwork, DataClass: "internal", ToolAccess: true, UntrustedCode: true})
	if err != nil || got.GetCodeAuthor() != identityv1.CodeAuthor_CODE_AUTHOR_MODEL || got.GetTools() != identityv1.ToolBreadth_TOOL_BREADTH_ANY ||
		got.GetNetwork() != identityv1.NetworkNeed_NETWORK_NEED_NAMED || got.GetDataClass() != "internal" || !got.GetToolAccess() || !got.GetUntrustedCode() {
		t.Errorf("told %v, %v", got, err)
	}
	if got, err := open(Risk{}); err != nil || got.GetCodeAuthor() != 0 || got.GetTools() != 0 || got.GetNetwork() != 0 {
		t.Errorf("nothing was said, told %v, %v", got, err)
	}
	for _, r := range []Risk{{CodeAuthor: "modle"}, {Tools: "everything"}, {Network: "unspecified"}} {
		if _, err := open(r); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "is not known") {
			t.Errorf("%+v: %v", r, err)
		}
	}
}
