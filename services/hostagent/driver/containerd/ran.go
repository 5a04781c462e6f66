package containerd

import (
	"os"
	"path/filepath"
	"strconv"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// ranFile in a sandbox's folder says that its first process ran, and which one it is: what ran and is
// gone has ended, also for a later driver; what never ran is being made.
const ranFile = "ran"

// sawRunning notes that the sandbox runs.
func (d *Driver) sawRunning(id ids.SandboxID, pid int) {
	d.mu.Lock()
	_, known := d.known[id]
	fresh := known && d.ran[id] != pid
	if known {
		d.ran[id] = pid
	}
	d.mu.Unlock()
	if !fresh {
		return
	}
	if err := os.WriteFile(filepath.Join(d.folder(id), ranFile), []byte(strconv.Itoa(pid)), 0o600); err != nil {
		d.log.Warn("a sandbox's start is not noted", "sandbox", id, "err", err)
	}
}

// recallRan reads what an earlier driver noted; called before the driver is used.
func (d *Driver) recallRan(id ids.SandboxID) {
	b, err := os.ReadFile(filepath.Join(d.folder(id), ranFile))
	if err != nil {
		return // it never ran
	}
	d.ran[id], _ = strconv.Atoi(string(b))
}

// hasRun tells whether the sandbox was ever seen running.
func (d *Driver) hasRun(id ids.SandboxID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.ran[id]
	return ok
}

// frozen tells of a sandbox that runs but for being frozen. Its runtime may lie frozen with it and answer
// nobody, upon which containerd says that there is no such task: that is no word on the sandbox.
func (d *Driver) frozen(id ids.SandboxID) (pid int, ok bool) {
	d.mu.Lock()
	pid, ok = d.ran[id]
	d.mu.Unlock()
	if !ok || !d.cgroup.Frozen(d.cgroupOf(id)) {
		return 0, false
	}
	st, err := d.cgroup.Stats(d.cgroupOf(id))
	return pid, err == nil && st.Processes > 0
}

// orFrozen looks twice at what containerd does not call running.
func (d *Driver) orFrozen(id ids.SandboxID, pid int, s driver.State) (int, driver.State) {
	if s == driver.Partial {
		if pid, ok := d.frozen(id); ok {
			return pid, driver.Running
		}
	}
	return pid, s
}

// statusLost is what gVisor's shim calls the status of a process that was gone before it could ask: no
// status of the process's own.
const statusLost = 128

// ownStatus is the exit status of a sandbox's first process, or statusGone where it is not known.
func (d *Driver) ownStatus(id ids.SandboxID, status uint32) uint32 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.known[id].Tier == driver.GVisor && status == statusLost {
		return statusGone
	}
	return status
}
