package containerd

import (
	"context"
	"errors"
	"fmt"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/cgroup"
)

// limits are those of the sandbox's cgroup: what was asked for, and what the runtime itself needs.
func (d *Driver) limits(r record, l driver.Limits) cgroup.Limits {
	out := cgroup.Limits{CPUMillis: l.CPUMillis, MemoryBytes: l.MemoryBytes, PIDs: l.PIDs}
	switch r.Tier {
	case driver.GVisor:
		out.PIDs = gvisorPIDs(r, l)
	case driver.Kata:
		out.PIDs, out.MemoryBytes = max(l.PIDs, minKataPIDs), l.MemoryBytes+kataMemory
	}
	if l.DiskBytesPerSecond > 0 || l.DiskOpsPerSecond > 0 {
		out.IO = cgroup.IO{Device: r.Device, BytesPerSecond: l.DiskBytesPerSecond, OpsPerSecond: l.DiskOpsPerSecond}
	}
	return out
}

const (
	// agentThreads is room for the threads of the guest agent, which count against the session's limit.
	agentThreads = 32
	// gVisor runs a process as a host process with a system call thread and up to one further thread for
	// each of its threads, and keeps them for the next process. A thread of the Sentry waits for each thread
	// that runs.
	hostPIDsPerTask = 4
	// sentryThreads is room for the Sentry and the gofer themselves.
	sentryThreads = 256
	// oldGVisorPIDs is the least limit of sandboxes from before the limit inside.
	oldGVisorPIDs = 400
)

// tasks is the limit of processes and threads that gVisor's kernel enforces inside (RLIMIT_NPROC).
func tasks(l driver.Limits) uint64 { return uint64(l.PIDs) + agentThreads }

// gvisorPIDs is the limit on the cgroup of a gVisor sandbox. The Sentry does not survive it: a Go program that
// can start no thread ends. So the limit inside applies first, and this one stops a sandbox that broke out of it.
func gvisorPIDs(r record, l driver.Limits) uint32 {
	if r.PIDs == 0 {
		return max(l.PIDs, oldGVisorPIDs)
	}
	return uint32(tasks(l)*hostPIDsPerTask + sentryThreads)
}

// remember keeps what became known of a sandbox while it is made.
func (d *Driver) remember(id ids.SandboxID, r record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.known[id]; ok {
		d.known[id] = r
	}
}

// Resize implements driver.Resizer: CPU, memory, processes, and the disk's rate where it is limited.
// Memory below what is in use is refused: nothing is killed by a smaller limit. Open files are a limit
// of each process from its start on, so another number is refused; the same holds for the processes of a
// gVisor sandbox.
func (d *Driver) Resize(ctx context.Context, id ids.SandboxID, l driver.Limits) error {
	const op = "resize sandbox"
	if err := l.Check(); err != nil {
		return errs.E(op, errkind.Invalid, string(id), err)
	}
	defer d.lock(id)()
	if err := d.mustExist(op, id); err != nil {
		return err
	}
	d.mu.Lock()
	r := d.known[id]
	d.mu.Unlock()
	refuse := func(why string) error { return errs.E(op, errkind.Unimplemented, string(id), why) }
	switch {
	case r.Tier == driver.Kata:
		return refuse("the size of a Kata machine is set when it starts")
	case r.Tier == driver.GVisor && r.PIDs != 0 && l.PIDs != r.PIDs:
		return refuse("how many processes a gVisor sandbox may have is set when it starts")
	case l.OpenFiles != 0 && l.OpenFiles != r.OpenFiles:
		return refuse("how many files a process may open is set when the sandbox starts")
	}
	if _, state, err := d.task(ctx, id); err != nil || state != driver.Running {
		if err == nil {
			err = errs.E(op, errkind.NotFound, string(id), "the sandbox does not run")
		}
		return err
	}
	err := d.cgroup.Update(ctx, d.cgroupOf(id), d.limits(r, l))
	if errors.Is(err, cgroup.ErrInUse) {
		return refuse(err.Error())
	}
	return fail(op, id, err)
}

// Netns implements driver.Networker.
func (d *Driver) Netns(ctx context.Context, id ids.SandboxID) (string, error) {
	const op = "find network namespace"
	if err := d.mustExist(op, id); err != nil {
		return "", err
	}
	pid, state, err := d.task(ctx, id)
	if err != nil {
		return "", err
	}
	if state != driver.Running || pid == 0 {
		return "", errs.E(op, errkind.NotFound, string(id), "the sandbox does not run")
	}
	return fmt.Sprintf("/proc/%d/ns/net", pid), nil
}
