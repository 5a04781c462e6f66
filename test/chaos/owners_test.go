package chaos

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// life is one generation of a session.
type life struct {
	session ids.SessionKey
	gen     ids.Generation
}

// placement is a sandbox of a session in one epoch.
type placement struct {
	life
	epoch  ids.Epoch
	active time.Time // when it became the owner; zero: it never did
	ran    time.Time // when its processes were last seen able to run
	host   string    // where
}

// owners puts together which sandboxes could run when, seen from the machine, and who was the owner
// when, told by the scheduler. Both use the clock of this machine.
type owners struct {
	mu   sync.Mutex
	all  map[ids.SandboxID]*placement
	told map[string]bool
}

func newOwners() *owners {
	return &owners{all: map[ids.SandboxID]*placement{}, told: map[string]bool{}}
}

func (o *owners) at(id ids.SandboxID) *placement {
	if o.all[id] == nil {
		o.all[id] = &placement{}
	}
	return o.all[id]
}

// placed notes whose a sandbox is; active is zero unless it is the owner from then on.
func (o *owners) placed(l life, e ids.Epoch, active time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.at(driver.ID(l.session, l.gen, e))
	p.life, p.epoch = l, e
	if p.active.IsZero() {
		p.active = active
	}
}

// ran notes that a sandbox could run at a time that is not after the look at it.
func (o *owners) ran(id ids.SandboxID, host string, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.at(id)
	if at.After(p.ran) {
		p.ran, p.host = at, host
	}
}

// double says which sandboxes could run although another one had become the owner after them; each is
// told once. A sandbox that never was the owner has no user and no right to commit: it may still be
// there for a while, see leftovers.
func (o *owners) double() (out []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, old := range o.all {
		if old.active.IsZero() || old.ran.IsZero() {
			continue
		}
		for _, p := range o.all {
			if p.life != old.life || p.active.IsZero() || p.epoch.Compare(old.epoch) <= 0 || !old.ran.After(p.active) {
				continue
			}
			what := fmt.Sprintf("two owners of %s: epoch %s is active (on %q) since %s, and sandbox %s of epoch %s", p.session, p.epoch, p.host, p.active.Format(clock), id, old.epoch)
			if !o.told[what] {
				o.told[what] = true
				out = append(out, fmt.Sprintf("%s could run on %s at %s", what, old.host, old.ran.Format(clock)))
			}
		}
	}
	return out
}

// leftovers are sandboxes that could run after a time and are older than their session's owner.
func (o *owners) leftovers(after time.Time) (out []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, old := range o.all {
		for _, p := range o.all {
			if old.ran.After(after) && p.life == old.life && !p.active.IsZero() && p.epoch.Compare(old.epoch) > 0 {
				out = append(out, fmt.Sprintf("sandbox %s of %s, epoch %s, runs on %s, though epoch %s is active", id, old.session, old.epoch, old.host, p.epoch))
				break
			}
		}
	}
	return out
}

// watched counts the owners that were seen running.
func (o *owners) watched() (n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range o.all {
		if !p.active.IsZero() && !p.ran.IsZero() {
			n++
		}
	}
	return n
}

// lookEvery is how often the machine is looked at.
const lookEvery = 150 * time.Millisecond

// watch looks at the cgroups of every host, by the host's name, until ctx ends.
func (o *owners) watch(ctx context.Context, cgroups map[string][]string, report func([]string)) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		for host, dirs := range cgroups {
			for _, dir := range dirs {
				o.look(host, dir)
			}
		}
		report(o.double())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (o *owners) look(host, dir string) {
	boxes, _ := os.ReadDir(dir) // it is there while the host has sandboxes
	for _, b := range boxes {
		now := time.Now()
		if b.IsDir() && runnable(filepath.Join(dir, b.Name())) {
			o.ran(ids.SandboxID(b.Name()), host, now)
		}
	}
}

// runnable reports whether something in a cgroup is alive and not frozen.
func runnable(dir string) bool {
	state, _ := os.ReadFile(filepath.Join(dir, "freezer.state"))
	events, _ := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if strings.TrimSpace(string(state)) == "FROZEN" || strings.Contains(string(events), "frozen 1") {
		return false
	}
	alive := false
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.Name() != "cgroup.procs" {
			return nil //nolint:nilerr // it went while it was looked at
		}
		raw, _ := os.ReadFile(path)
		if alive = len(strings.Fields(string(raw))) > 0; alive {
			return fs.SkipAll
		}
		return nil
	})
	return alive
}

// cgroupsOf are the folders of a host's sandboxes in the hierarchy that can freeze.
func cgroupsOf(marks []string) (out []string) {
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "freezer")); err == nil {
		root = filepath.Join(root, "freezer")
	}
	for _, m := range marks {
		if !filepath.IsAbs(m) {
			out = append(out, filepath.Join(root, m))
		}
	}
	return out
}
