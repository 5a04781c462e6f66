package disk

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
	"github.com/berth-dev/berth/services/hostagent/internal/mounts"
)

// Inventory is everything that the store finds on this host.
type Inventory struct {
	Disks  []Disk
	Blanks map[uint64]int // formatted and ready, per size
	// Strays belong to no disk with a record: paths of half-made images, mounts and loop devices.
	Strays []string
}

// Disk is one image with a record.
type Disk struct {
	ID Key
	Record
	Allocated uint64
	// Mounted says that it is in use: mounted, or handed to a virtual machine (Record.Raw).
	Mounted bool
	Device  string // loop device, empty if none
	// Clones is what the disk's clones hold alone, and HasBase says that the next snapshot reads only
	// what changed.
	Clones  uint64
	HasBase bool
	// Evictable says that the image can go: a store has it.
	Evictable bool
	// Frozen says that its writers are stopped until the pool has room.
	Frozen bool
	// Broken says why the disk cannot be used, empty if it can.
	Broken string
}

func (s *Store) inventory() (Inventory, error) {
	inv := Inventory{Blanks: map[uint64]int{}}
	entries, err := os.ReadDir(filepath.Join(s.dir, "sessions"))
	if err != nil {
		return inv, fmt.Errorf("list disks: %w", err)
	}
	held, err := loopdev.Bound(s.dir)
	if err != nil {
		return inv, err
	}
	points, err := mounts.Below(filepath.Join(s.dir, "mnt"))
	if err != nil {
		return inv, err
	}
	device, mounted := map[string]string{}, map[string]bool{}
	for _, l := range held {
		device[l.Backing] = l.Device
	}
	for _, m := range points {
		mounted[m] = true
	}
	delete(mounted, filepath.Join(s.dir, "mnt"))
	for _, e := range entries {
		d, ok := s.inspect(e.Name())
		if !ok {
			inv.Strays = append(inv.Strays, filepath.Join(s.dir, "sessions", e.Name()))
			continue
		}
		d.Device, d.Mounted = device[s.image(d.ID)], mounted[s.mountPoint(d.ID)] || d.Raw
		delete(device, s.image(d.ID))
		delete(mounted, s.mountPoint(d.ID))
		if d.Broken == "" {
			s.addClones(&d)
			inv.Strays = append(inv.Strays, s.leftovers(d.Record)...)
		}
		inv.Disks = append(inv.Disks, d)
	}
	views, err := s.strayViews()
	if err != nil {
		return inv, err
	}
	inv.Strays = append(inv.Strays, views...)
	for m := range mounted {
		inv.Strays = append(inv.Strays, m)
	}
	for back, dev := range device {
		if !strings.HasPrefix(back, filepath.Join(s.dir, "blanks")+"/") && !strings.HasPrefix(back, filepath.Join(s.dir, "views")+"/") {
			inv.Strays = append(inv.Strays, dev)
		}
	}
	return inv, s.countBlanks(&inv)
}

// inspect reads one folder; ok is false if it holds no record, so that it was never mounted.
func (s *Store) inspect(name string) (Disk, bool) {
	k, err := parseKey(name)
	if err != nil {
		return Disk{}, false
	}
	d := Disk{ID: k}
	rec, err := s.load(k)
	switch {
	case errs.Is(err, errkind.NotFound):
		return d, false
	case err != nil:
		d.Broken = err.Error()
	}
	d.Record = rec
	if d.Allocated, err = allocated(s.image(k)); err != nil && d.Broken == "" {
		d.Broken = err.Error()
	}
	return d, true
}

func (s *Store) countBlanks(inv *Inventory) error {
	files, err := filepath.Glob(filepath.Join(s.dir, "blanks", "*", "*.img"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if size, ok := blankSize(filepath.Dir(f)); ok {
			inv.Blanks[size]++
		}
	}
	return nil
}

// addClones says what is there besides the image.
func (s *Store) addClones(d *Disk) {
	for _, name := range []string{baseImageName, shotImageName} {
		if n, err := alone(s.file(d.ID, name)); err == nil {
			d.Clones += n
		}
	}
	if base, _ := s.openBase(d.Record); base != nil {
		d.HasBase = true
		_ = base.Close()
	}
	s.mu.Lock()
	_, active := s.active[d.ID]
	d.Frozen = s.frozen[d.ID] != nil
	s.mu.Unlock()
	d.Evictable = !active && !d.Mounted && s.evictableRecord(d.Record)
}

// strayViews lists the views that no View of this process stands for.
func (s *Store) strayViews() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "views"))
	if err != nil {
		return nil, fmt.Errorf("list views: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Name(), viewSuffix)
		if k, err := parseKey(name); err == nil && (s.views[k] != nil || s.cloning[k]) {
			continue
		}
		if path := s.viewPoint(name); !slices.Contains(out, path) {
			out = append(out, path)
		}
	}
	return out, nil
}
