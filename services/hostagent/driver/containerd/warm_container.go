package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/newroot"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warmContainer is tier container on runc: the sandbox runs on an empty root in memory, beside the helper
// that has made its user namespace. A claim has the helper make the session's root, and puts it in the
// place of the empty one from outside. The first process notices nothing of it.
type warmContainer struct{}

var _ warmTier = warmContainer{}

// emptyRoot is enough for the folders that things are mounted on.
const emptyRoot = "size=64k,nr_inodes=64,mode=755,uid=%d,gid=%[1]d"

func (warmContainer) fits(driver.WarmSpec, driver.Spec) string { return "" }
func (warmContainer) shape(*making, *specs.Spec)               {}
func (warmContainer) enter() string                            { return "" }

func (warmContainer) root(m *making) error {
	point, owner := m.d.root(m.id), m.d.firstID(m.rec.Slot)
	if err := unix.Mount("berth", point, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, fmt.Sprintf(emptyRoot, owner)); err != nil {
		return fmt.Errorf("mount an empty root: %w", err)
	}
	slot := filepath.Join(point, newroot.Slot)
	if err := os.Mkdir(slot, 0o700); err != nil {
		return err
	}
	return os.Chown(slot, int(owner), int(owner))
}

func (warmContainer) ready(c *claiming) error {
	err := newroot.Check(c.spec.Image.Lower, filepath.Join(c.spec.Disk, "upper"), ownFolders())
	if errors.Is(err, newroot.ErrFolder) {
		return errs.E("claim sandbox", errkind.Unimplemented, string(c.id), err)
	}
	return err
}

func (warmContainer) bind(c *claiming) []steps.Step {
	out := []steps.Step{{Name: "claim.root", Do: c.makeRoot}, {Name: "claim.enter", Do: c.enterRoot}}
	if len(c.spec.Over) > 0 {
		out = append(out, steps.Step{Name: "claim.over", Do: c.layOver})
	}
	return out
}

// ownFolders are the folders of the root at which every sandbox has file systems of its own.
func ownFolders() (out []string) {
	for _, m := range (&making{}).mounts() {
		if name := strings.TrimPrefix(m.Destination, "/"); !strings.Contains(name, "/") {
			out = append(out, name)
		}
	}
	return out
}

// makeRoot has the helper make the session's root, mounted nowhere yet.
func (c *claiming) makeRoot(ctx context.Context) (err error) {
	if c.mnt == nil {
		c.mnt, err = c.space.Make(ctx, c.spec.Image.Lower, c.spec.Disk)
		c.space.Done() // its end, which frees its own copies of the disk's mount, is waited for later
	}
	return err
}

func (c *claiming) enterRoot(context.Context) error {
	if c.entered {
		return nil
	}
	swap := newroot.Swap{Process: c.proc, Root: c.mnt, Folders: ownFolders(), Owner: int(c.d.firstID(c.rec.Slot))}
	was := making{spec: c.warmed.spec.Spec("", c.rec.Generation, c.rec.Epoch)}
	if now := (&making{spec: c.spec}).hostname(); now != was.hostname() {
		swap.Hostname = now
	}
	err := swap.Do()
	c.entered = err == nil
	return err
}
