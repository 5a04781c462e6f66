package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/sdk"
)

// TestFaultAnOpenJoinsAWeakerTier: a session that is awake in a container is refused to an open for a
// model's code; an open that asks for nothing goes on with it; after a close it wakes behind more.
func TestFaultAnOpenJoinsAWeakerTier(t *testing.T) {
	e := common.For(t)
	c := e.Client("acme", "joiner")
	own := sdk.OpenOptions{Template: "container", Risk: sdk.OwnCode()}
	model := sdk.OpenOptions{Template: "container", Risk: sdk.Risk{CodeAuthor: sdk.ModelCode}}
	s := open(t, c, own)
	if s.Place().Tier != "container" {
		t.Fatalf("own code is in %s", s.Place().Tier)
	}
	var e1 *sdk.Error
	if _, err := c.Open(t.Context(), model); !errors.As(err, &e1) || e1.Kind != errkind.Refused || !strings.Contains(e1.Reason, "close it, then open it again") {
		t.Fatalf("a model's code beside it: %v", err)
	}
	if again := open(t, c, sdk.OpenOptions{}); again.Origin() != sdk.Joined || again.Epoch() != s.Epoch() {
		t.Errorf("an open that asks for nothing: %s", again.Origin())
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s = open(t, c, model); s.Origin() != sdk.Resumed || s.Place().Tier == "container" {
		t.Errorf("after a close: %s in %s", s.Origin(), s.Place().Tier)
	}
}
