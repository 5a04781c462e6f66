package hostend_test

import (
	"errors"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func TestASandboxThatIsNobodysDoesNothing(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{Enter: true})
	ctx := testContext(t)
	if !c.Waits() {
		t.Error("it does not say that it waits")
	}
	if _, err := c.Ping(ctx); err != nil {
		t.Errorf("ping: %v", err)
	}
	if _, err := c.StartExec(ctx, hostend.ExecSpec{Key: "k", Argv: []string{"true"}}); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("start: %v", err)
	}
	if _, err := c.Stats(ctx); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("stats: %v", err)
	}
	for _, folder := range []string{"", "/", "slot/root", "/slot/../root", "/slot/root/"} {
		if err := c.Enter(ctx, folder); !errors.Is(err, hostend.ErrInvalid) {
			t.Errorf("enter %q: %v", folder, err)
		}
	}
	if _, err := c.Stats(ctx); !errors.Is(err, hostend.ErrConflict) {
		t.Errorf("stats after refusals: %v", err)
	}
}

func TestASandboxWithARootEntersNoOther(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	if c.Waits() {
		t.Error("it says that it waits")
	}
	if err := c.Enter(testContext(t), t.TempDir()); !errors.Is(err, hostend.ErrUnsupported) {
		t.Errorf("enter: %v", err)
	}
}
