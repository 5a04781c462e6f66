package hostend_test

import (
	"testing"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
)

func TestExecGivesOutputAndExitCode(t *testing.T) {
	_, c := attachInProcess(t, agent.Options{})
	o := run(t, c, "a", "echo out; echo err >&2; exit 3")
	if string(o.out) != "out\n" || string(o.err) != "err\n" {
		t.Errorf("output %q and %q", o.out, o.err)
	}
	o.wantCode(t, 3)
}

func TestExecInPID1(t *testing.T) {
	c := startGuest(t).attach()
	o := run(t, c, "a", "echo out; echo err >&2; exit 3")
	if string(o.out) != "out\n" || string(o.err) != "err\n" {
		t.Errorf("output %q and %q", o.out, o.err)
	}
	o.wantCode(t, 3)
}
