package containerd

import (
	"os"
	"os/exec"
	"testing"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestAStateThatCannotBeReadIsNoEnd: containerd calls the state of a task unknown when its runtime gets no
// answer. The sandbox runs as long as the process that was seen running.
func TestAStateThatCannotBeReadIsNoEnd(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	const id = ids.SandboxID("bseen")
	d := &Driver{ran: map[ids.SandboxID]int{id: cmd.Process.Pid}}
	check := func(what string, of ids.SandboxID, is tasktypes.Status, want driver.State) {
		t.Helper()
		if _, got := d.orUnread(of, &tasktypes.Process{Status: is}); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("its process runs", id, tasktypes.Status_UNKNOWN, driver.Running)
	check("it was never seen running", "bother", tasktypes.Status_UNKNOWN, driver.Partial)
	check("the runtime says that it has ended", id, tasktypes.Status_STOPPED, driver.Exited)
	for what, answer := range map[string]struct {
		err  error
		want driver.State
	}{
		"containerd lists no task and its runtime does not answer": {status.Error(codes.DeadlineExceeded, "late"), driver.Running},
		"containerd knows no task":                                 {status.Error(codes.NotFound, "none"), driver.Partial},
	} {
		if _, got := d.unlisted(id, func() (*tasksapi.GetResponse, error) { return nil, answer.err }); got != answer.want {
			t.Errorf("%s: %v, want %v", what, got, answer.want)
		}
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	check("its process is a zombie", id, tasktypes.Status_UNKNOWN, driver.Partial)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	check("its process is gone", id, tasktypes.Status_UNKNOWN, driver.Partial)
	if !executing(os.Getpid()) {
		t.Error("this process does not execute")
	}
}
