package stack

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/schemas/subjects"
)

// leastStore is what the store of disks may take on the smallest machine, in bytes.
const leastStore = 1 << 30

// Declaration is the catalogue's, with a store of disks that leaves half of what is free on this
// machine to all replicas together: the bus stops altogether when the file system that it is on is
// full.
func (c *Config) Declaration(replicas int) (bus.Declaration, error) {
	d, dir := bus.Declared(replicas), c.Dir
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return d, fmt.Errorf("measure the free space of the state folder: %w", err)
	}
	most := max(leastStore, (int64(st.Bavail)*st.Bsize/2+taken(filepath.Join(dir, "bus")))/int64(max(replicas, 1)))
	d.ObjectStores = slices.Clone(subjects.ObjectStores)
	for i := range d.ObjectStores {
		d.ObjectStores[i].MaxBytes = min(d.ObjectStores[i].MaxBytes, most)
	}
	return d, nil
}

// taken is what the files below a folder hold, in bytes; what cannot be read counts nothing.
func taken(dir string) (n int64) {
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if info, err := e.Info(); err == nil {
				n += info.Size()
			}
		}
		return nil
	})
	return n
}
