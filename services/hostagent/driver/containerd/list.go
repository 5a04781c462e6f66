package containerd

import (
	"context"
	"fmt"
	"os"
	"slices"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// List implements driver.Driver.
func (d *Driver) List(ctx context.Context) ([]driver.Found, error) {
	found, err := d.find(ctx)
	for i, f := range found {
		if r, err := readRecord(d.folder(f.ID)); err == nil {
			found[i].State = d.shown(f.ID, r, f.State)
		}
	}
	return found, err
}

// find looks in every place where a part of a sandbox can be. The states are those of the first processes.
func (d *Driver) find(ctx context.Context) ([]driver.Found, error) {
	const op = "list sandboxes"
	parts := map[ids.SandboxID][]string{}
	tasks, err := d.fromContainerd(ctx, parts)
	if err != nil {
		return nil, errs.E(op, kindOf(err), "", err)
	}
	if err := d.fromHost(parts); err != nil {
		return nil, errs.E(op, errkind.Internal, "", err)
	}
	out := make([]driver.Found, 0, len(parts))
	for id, have := range parts {
		slices.Sort(have)
		f := driver.Found{Sandbox: driver.Sandbox{ID: id}, State: driver.Partial, Parts: have}
		if r, err := readRecord(d.folder(id)); err == nil {
			f.Sandbox = d.sandbox(id, r)
			if t, ok := tasks[string(id)]; ok {
				f.PID, f.State = d.orUnread(id, t)
			} else {
				f.PID, f.State = d.unlisted(id, func() (*tasksapi.GetResponse, error) {
					return call(ctx, d.ctrd.tasks.Get, &tasksapi.GetRequest{ContainerID: string(id)})
				})
			}
			f.PID, f.State = d.orFrozen(id, f.PID, f.State)
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b driver.Found) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return out, nil
}

func (d *Driver) fromContainerd(ctx context.Context, parts map[ids.SandboxID][]string) (map[string]*tasktypes.Process, error) {
	cs, err := call(ctx, d.ctrd.containers.List, &containersapi.ListContainersRequest{
		Filters: []string{fmt.Sprintf("labels.%q==%q", labelHost, d.cfg.Cgroup)},
	})
	if err != nil {
		return nil, err
	}
	ours := map[string]bool{}
	for _, c := range cs.Containers {
		ours[c.ID] = true
		if id, ok := isPod(c.ID); ok {
			add(parts, string(id), "machine")
			continue
		}
		add(parts, c.ID, "container")
	}
	all, err := d.listTasks(ctx, ours)
	if err != nil {
		return nil, err
	}
	tasks := map[string]*tasktypes.Process{}
	for _, t := range all {
		if id, ok := isPod(t.ID); ok {
			if ours[t.ID] || exists(d.folder(id)) {
				add(parts, string(id), "machine")
			}
			continue
		}
		if id := ids.SandboxID(t.ID); id != "" && (ours[t.ID] || exists(d.folder(id))) {
			tasks[t.ID] = t
			add(parts, t.ID, "task")
		}
	}
	return tasks, nil
}

func (d *Driver) fromHost(parts map[ids.SandboxID][]string) error {
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return err
	}
	for _, e := range entries {
		add(parts, e.Name(), "folder")
	}
	roots, err := os.ReadDir(d.roots())
	if err != nil {
		return err
	}
	for _, e := range roots {
		add(parts, e.Name(), "root")
	}
	for _, c := range d.cgroup.Children(d.cfg.Cgroup) {
		add(parts, c, "cgroup")
	}
	return nil
}

// parts names what exists of one sandbox on the host, without asking containerd.
func (d *Driver) parts(id ids.SandboxID) []string {
	var out []string
	if exists(d.folder(id)) {
		out = append(out, "folder")
	}
	if exists(d.room(id)) {
		out = append(out, "root")
	}
	if d.cgroup.Exists(d.cgroupOf(id)) {
		out = append(out, "cgroup")
	}
	return out
}

func add(parts map[ids.SandboxID][]string, name, part string) {
	id, err := ids.ParseSandboxID(name)
	if err != nil {
		return // not a sandbox's
	}
	if !slices.Contains(parts[id], part) {
		parts[id] = append(parts[id], part)
	}
}

func stateOf(s tasktypes.Status) driver.State {
	switch s {
	case tasktypes.Status_RUNNING, tasktypes.Status_PAUSED, tasktypes.Status_PAUSING:
		return driver.Running
	case tasktypes.Status_STOPPED:
		return driver.Exited
	}
	return driver.Partial
}

// Stats implements driver.Meter.
func (d *Driver) Stats(_ context.Context, id ids.SandboxID) (driver.Stats, error) {
	if err := d.mustExist("read usage", id); err != nil {
		return driver.Stats{}, err
	}
	s, err := d.cgroup.Stats(d.cgroupOf(id))
	if err != nil {
		return driver.Stats{}, errs.E("read usage", errkind.NotFound, string(id), err)
	}
	return driver.Stats{CPU: s.CPU, MemoryBytes: s.MemoryBytes, Processes: s.Processes, OOMKills: s.OOMKills, PIDsHits: s.PIDsHits}, nil
}

// Freeze implements driver.Freezer.
func (d *Driver) Freeze(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, true) }

// Thaw implements driver.Freezer.
func (d *Driver) Thaw(ctx context.Context, id ids.SandboxID) error { return d.freeze(ctx, id, false) }

func (d *Driver) freeze(ctx context.Context, id ids.SandboxID, on bool) error {
	if err := d.mustExist("freeze sandbox", id); err != nil {
		return err
	}
	return fail("freeze sandbox", id, d.cgroup.Freeze(ctx, d.cgroupOf(id), on))
}

func (d *Driver) mustExist(op string, id ids.SandboxID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.known[id]; !ok {
		return errs.E(op, errkind.NotFound, string(id), "there is no such sandbox here")
	}
	return nil
}
