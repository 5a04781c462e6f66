package containerd

import (
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// rlimit returns the hard limit of a type, 0 if the spec names none.
func rlimit(m *making, name string) uint64 {
	for _, l := range m.rlimits() {
		if l.Type == name {
			return l.Hard
		}
	}
	return 0
}

// TestTheLimitInsideGVisorAppliesBeforeTheCgroups: at the limit of its cgroup the Sentry can start no thread and
// ends with the sandbox. So gVisor's kernel refuses a process first, and the cgroup has room for all host
// processes and threads that the allowed ones need.
func TestTheLimitInsideGVisorAppliesBeforeTheCgroups(t *testing.T) {
	d := &Driver{}
	for _, pids := range []uint32{driver.MinPIDs, 64, 512, driver.MaxPIDs} {
		l := driver.Limits{PIDs: pids}
		m := &making{d: d, spec: driver.Spec{Tier: driver.GVisor, Limits: l}}
		inside := rlimit(m, "RLIMIT_NPROC")
		if inside <= uint64(pids) {
			t.Errorf("limit %d: the session and the guest agent's threads share %d", pids, inside)
		}
		outside := uint64(d.limits(record{Tier: driver.GVisor, PIDs: pids}, l).PIDs)
		if outside < 4*inside+sentryThreads {
			t.Errorf("limit %d: %d inside, %d on the cgroup", pids, inside, outside)
		}
	}
	m := &making{d: d, spec: driver.Spec{Tier: driver.Container, Limits: driver.Limits{PIDs: 64}}}
	if n := rlimit(m, "RLIMIT_NPROC"); n != 0 {
		t.Errorf("a container has RLIMIT_NPROC %d, which counts the processes of all sandboxes of a user", n)
	}
	if n := d.limits(record{Tier: driver.Container}, driver.Limits{PIDs: 64}).PIDs; n != 64 {
		t.Errorf("a container's cgroup allows %d processes, not 64", n)
	}
}

// TestAGVisorSandboxWithoutALimitInsideKeepsItsOwn: it was started by a version that set none.
func TestAGVisorSandboxWithoutALimitInsideKeepsItsOwn(t *testing.T) {
	d := &Driver{}
	for pids, want := range map[uint32]uint32{64: oldGVisorPIDs, 512: 512} {
		if n := d.limits(record{Tier: driver.GVisor}, driver.Limits{PIDs: pids}).PIDs; n != want {
			t.Errorf("limit %d: %d on the cgroup, want %d", pids, n, want)
		}
	}
}
