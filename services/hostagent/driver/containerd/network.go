package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/netns"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// A sandbox's link is plugged into the namespace that the runtime made for it, after that and before any
// process of the sandbox runs. gVisor takes addresses, routes and neighbours from there when it starts,
// and the addresses away: the namespace is good for one sandbox. A machine of Kata Containers looks at
// the namespace before it boots, so that one is made, with the link in it, and pinned in the sandbox's room.

// before lists what is done between the making of the first process and its start.
func (m *making) before() (out []steps.Step) {
	if m.spec.Link != nil {
		out = append(out, steps.Step{Name: "sandbox.network", Do: m.plugLink})
	}
	if len(m.spec.Over) > 0 && m.spec.Tier == driver.Container && m.warm == nil {
		out = append(out, steps.Step{Name: "sandbox.over", Do: m.layOver})
	}
	return out
}

func (m *making) plugLink(context.Context) error {
	if m.plugged {
		return nil
	}
	return m.plugInto(fmt.Sprintf("/proc/%d/ns/net", m.pid))
}

func (m *making) plugInto(path string) error {
	err := m.spec.Link.Plug(path)
	if m.plugged = err == nil; err != nil {
		return fmt.Errorf("plug the sandbox's link: %w", err)
	}
	return nil
}

// netns is where the namespace of a machine of Kata Containers is pinned.
func (d *Driver) netns(id ids.SandboxID) string { return filepath.Join(d.room(id), "net") }

// plugMachine makes the namespace of a machine that has a link.
func (m *making) plugMachine(context.Context) error {
	path := m.d.netns(m.id)
	if m.plugged {
		return nil
	}
	if err := os.MkdirAll(m.d.room(m.id), 0o700); err != nil {
		return err
	}
	if _, err := netns.Pin(path); err != nil {
		return err
	}
	return m.plugInto(path)
}

// overFiles is what the spec wants laid over the root.
func overFiles(list []driver.Over) (out []cover.File) {
	for _, o := range list {
		out = append(out, cover.File{From: o.From, To: o.To})
	}
	return out
}

func (m *making) layOver(context.Context) error {
	proc, err := unix.PidfdOpen(int(m.pid), 0)
	if err != nil {
		return fmt.Errorf("hold the first process: %w", err)
	}
	defer func() { _ = unix.Close(proc) }()
	return m.d.lay(proc, m.spec, m.rec)
}

// layOver lays the files over those of a claimed sandbox's root.
func (c *claiming) layOver(context.Context) error { return c.d.lay(c.proc, c.spec, c.rec) }

// lay lays files over those of a root, in the table of mounts of tier container's process proc, of which
// nothing of the session runs yet.
func (d *Driver) lay(proc int, spec driver.Spec, r record) (err error) {
	mounts.Elsewhere(func() { err = layIn(proc, spec.RunDir, overFiles(spec.Over), int(d.firstID(r.Slot))) })
	return err
}

func layIn(proc int, runDir string, list []cover.File, owner int) error {
	// A thread that shares its current folder with others may not change its table of mounts.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("leave the host's folders: %w", err)
	}
	unix.Umask(0)
	run, err := cover.Folder(runDir)
	if err != nil {
		return err
	}
	defer func() { _ = run.Close() }()
	all, err := cover.Open(int(run.Fd()), list)
	if err != nil {
		return err
	}
	defer all.Close()
	if err := unix.Setns(proc, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the sandbox: %w", err)
	}
	top, err := cover.Folder("/")
	if err != nil {
		return err
	}
	defer func() { _ = top.Close() }()
	return cover.Root{FD: int(top.Fd()), Owner: owner}.Put(all)
}

// coldOver are the mounts with which gVisor lays files over those of a root that is there already. It is told
// of places without links: how it would follow them is its own affair.
func (m *making) coldOver() (out []specs.Mount, err error) {
	if len(m.spec.Over) == 0 || m.spec.Tier != driver.GVisor || m.warm != nil {
		return nil, nil
	}
	top, err := cover.Folder(m.d.root(m.id))
	if err != nil {
		return nil, err
	}
	defer func() { _ = top.Close() }()
	places, err := cover.Root{FD: int(top.Fd()), Follow: true}.Places(overFiles(m.spec.Over))
	for _, f := range places {
		from := filepath.Join(m.spec.RunDir, f.From)
		st, serr := os.Lstat(from)
		if serr == nil && !st.Mode().IsRegular() {
			serr = errors.New("it is no regular file")
		}
		if serr != nil {
			err = errors.Join(err, fmt.Errorf("file %s of the run folder: %w", f.From, serr))
		}
		out = append(out, specs.Mount{Destination: f.To, Type: "bind", Source: from, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}})
	}
	return out, err
}
