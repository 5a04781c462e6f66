package containerd

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"

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

// listTasks lists containerd's tasks. For its own list containerd asks every shim in turn, and waits two
// seconds for each that lies frozen: while there are such, the others are asked for one by one.
func (d *Driver) listTasks(ctx context.Context, ours map[string]bool) ([]*tasktypes.Process, error) {
	frozen := d.allFrozen()
	if len(frozen) == 0 {
		r, err := call(ctx, d.ctrd.tasks.List, &tasksapi.ListTasksRequest{})
		if err != nil {
			return nil, err
		}
		return r.Tasks, nil
	}
	names := maps.Clone(ours)
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		names[e.Name()] = true
	}
	var out []*tasktypes.Process
	for name := range names {
		if pid, ok := frozen[ids.SandboxID(name)]; ok {
			out = append(out, &tasktypes.Process{ID: name, Pid: uint32(pid), Status: tasktypes.Status_PAUSED})
			continue
		}
		r, err := call(ctx, d.ctrd.tasks.Get, &tasksapi.GetRequest{ContainerID: name})
		if isNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if r.Process != nil {
			r.Process.ID = name
			out = append(out, r.Process)
		}
	}
	return out, nil
}

// allFrozen are the sandboxes that run but for being frozen, with their first processes.
func (d *Driver) allFrozen() map[ids.SandboxID]int {
	d.mu.Lock()
	ran := maps.Clone(d.ran)
	d.mu.Unlock()
	out := map[ids.SandboxID]int{}
	for id := range ran {
		if pid, ok := d.frozen(id); ok {
			out[id] = pid
		}
	}
	return out
}

// orUnread returns the state of a task. Where its runtime could not read the state, the process that was seen
// running decides: runsc gets no answer from a sandbox that is busy enough, and containerd then calls the
// state unknown. That is no end of the sandbox.
func (d *Driver) orUnread(id ids.SandboxID, t *tasktypes.Process) (int, driver.State) {
	if t.Status == tasktypes.Status_UNKNOWN {
		if pid, ok := d.executes(id); ok {
			return pid, driver.Running
		}
	}
	return int(t.Pid), stateOf(t.Status)
}

// unlisted returns the state of a sandbox whose task containerd did not list. It leaves out a task whose
// runtime does not answer in time, so a sandbox whose process runs is asked for by name: only the answer that
// there is no such task is an end.
func (d *Driver) unlisted(id ids.SandboxID, get func() (*tasksapi.GetResponse, error)) (int, driver.State) {
	pid, ok := d.executes(id)
	if !ok {
		return 0, driver.Partial
	}
	r, err := get()
	switch {
	case isNotFound(err):
		return 0, driver.Partial
	case err == nil && r.Process != nil:
		return d.orUnread(id, r.Process)
	}
	return pid, driver.Running
}

// executes reports whether the process of the sandbox that was seen running still runs.
func (d *Driver) executes(id ids.SandboxID) (pid int, ok bool) {
	d.mu.Lock()
	pid, ok = d.ran[id]
	d.mu.Unlock()
	return pid, ok && executing(pid)
}

// executing reports whether a process exists and is no zombie.
func executing(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, state, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
	return ok && state != "" && state[0] != 'Z' && state[0] != 'X'
}
