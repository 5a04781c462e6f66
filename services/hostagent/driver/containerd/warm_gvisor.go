package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/cover"
	"github.com/berth-dev/berth/services/hostagent/guest/enter"
	"github.com/berth-dev/berth/services/hostagent/internal/idroot"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
	"github.com/berth-dev/berth/services/hostagent/internal/newroot"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warmGVisor is tier gvisor on runsc. Nobody outside can reach into the table of mounts of gVisor's own
// kernel, so that the guest agent itself makes the session's root its own (package enter): it starts on
// an empty root, with the right to mount, and sees one folder, the slot. A claim mounts the session's
// root below the slot; the agent is told, makes it the root and gives the right up for good.
type warmGVisor struct{}

var _ warmTier = warmGVisor{}

const (
	slotPoint = "/slot" // the slot as the sandbox sees it
	slotName  = "root"
	// mountHint is the beginning of annotations with which runsc treats a mount in its own way.
	mountHint = "dev.gvisor.spec.mount."
)

// enterCalls are what package enter needs beyond the filter of a sandbox; it has them refused afterwards.
var enterCalls = []string{"mount", "umount2", "pivot_root", "move_mount", "open_tree"}

func (warmGVisor) fits(w driver.WarmSpec, spec driver.Spec) string {
	switch {
	case len(w.Init) > 0 || w.Guest == "":
		return "its first process is not the guest agent, which has to enter the root"
	case spec.Hostname != w.Hostname:
		return "its host name is set when the sandbox starts"
	case spec.Limits.PIDs != w.Limits.PIDs:
		return "how many processes it may have is set when the sandbox starts"
	}
	return ""
}

// root mounts a root with nothing in it but the folders that things are mounted on, and the slot. The
// root comes last: where it is, all is.
func (warmGVisor) root(m *making) error {
	if why := (warmGVisor{}).fits(driver.WarmSpec{Init: m.spec.Init, Guest: m.spec.Guest, Hostname: m.spec.Hostname, Limits: m.spec.Limits}, m.spec); why != "" {
		return errs.E("prepare sandbox", errkind.Unimplemented, string(m.id), why)
	}
	slot := m.d.slot(m.id)
	if err := os.MkdirAll(slot, 0o700); err != nil {
		return err
	}
	if err := mountFixed(slot, []string{slotName}, ""); err != nil {
		return err
	}
	return mountFixed(m.d.root(m.id), append(folders(m.mounts()), slotPoint), enter.Anchor)
}

// mountFixed mounts some folders, and an empty file, that nothing can be added to: not even by a kernel
// of gVisor's that a session has taken over, to which they are open.
func mountFixed(point string, folders []string, file string) error {
	const flags = unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC
	if is, err := mounts.IsMount(point); err != nil || is {
		return err
	}
	if err := unix.Mount("berth", point, "tmpfs", flags, fmt.Sprintf(emptyRoot, 0)); err != nil {
		return fmt.Errorf("mount an empty root: %w", err)
	}
	var all error
	for _, p := range folders {
		all = errors.Join(all, os.MkdirAll(filepath.Join(point, p), 0o755))
	}
	if file != "" {
		all = errors.Join(all, os.WriteFile(filepath.Join(point, file), nil, 0o444))
	}
	if all == nil {
		all = unix.Mount("", point, "", flags|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if all != nil { // one that is half-made must not count as one
		return errors.Join(all, unix.Unmount(point, unix.MNT_DETACH))
	}
	return nil
}

// folders are where file systems of the host, or of the sandbox, lie; what is mounted in one of them is
// no concern of the root.
func folders(all []specs.Mount) (out []string) {
	for _, m := range all {
		if m.Destination != filepath.Join(runPoint, guestName) {
			out = append(out, m.Destination)
		}
	}
	return out
}

// shape lets the agent mount, and shows it the slot. The slot's files are the sandbox's alone, as those
// of a root are, and need not be looked at again on each use (see writeRunscConfig); those of the run
// folder change outside.
func (warmGVisor) shape(m *making, s *specs.Spec) {
	s.Process.Args = append(append(slices.Clone(s.Process.Args), enter.Flag), cover.Args(overFiles(m.spec.Over))...)
	may := append([]string{"CAP_SYS_ADMIN"}, capabilities...)
	s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: may, Effective: may, Permitted: may}
	s.Linux.Seccomp.Syscalls = append(s.Linux.Seccomp.Syscalls, specs.LinuxSyscall{Names: enterCalls, Action: specs.ActAllow})
	for i, p := range s.Mounts {
		if p.Type != "bind" {
			continue
		}
		hint := fmt.Sprintf("%sshared%d.", mountHint, i)
		s.Annotations[hint+"source"], s.Annotations[hint+"type"] = p.Source, "bind"
		s.Annotations[hint+"share"], s.Annotations[hint+"options"] = "shared", "ro"
	}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: slotPoint, Type: "bind", Source: m.d.slot(m.id),
		// The last is what runsc assumes of every root; of the slot it cannot know what will be mounted there.
		Options: []string{"bind", "rw", "rslave", "overlayfs_stale_read"}})
}

func (warmGVisor) ready(c *claiming) error {
	err := newroot.Check(c.spec.Image.Lower, filepath.Join(c.spec.Disk, "upper"), ownFolders())
	if errors.Is(err, newroot.ErrFolder) {
		return errs.E("claim sandbox", errkind.Unimplemented, string(c.id), err)
	}
	return err
}

func (warmGVisor) bind(c *claiming) []steps.Step {
	return []steps.Step{{Name: "claim.root", Do: c.mountSlot}}
}

func (warmGVisor) enter() string { return slotPoint + "/" + slotName }

// mountSlot mounts the session's root where the sandbox sees it appear.
func (c *claiming) mountSlot(context.Context) error {
	point := c.d.slotRoot(c.id)
	if is, err := mounts.IsMount(point); err != nil || is {
		return err
	}
	return idroot.MountPlain(c.spec.Image.Lower, c.spec.Disk, point)
}
