package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/initramfs"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// Folders of the initramfs.
const (
	cgroupDir   = "/cgroup"
	boxCgroup   = cgroupDir + "/box"
	agentCgroup = boxCgroup + "/agent"
	usersCgroup = boxCgroup + "/session"
	diskDir     = "/disk"     // the supervisor's own mount of the session's file system
	runDir      = "/runberth" // what the session sees as /run/berth
	newDir      = "/new"      // what the stage builds
	runBytes    = 16 << 20
)

// settings of the kernel that a session must not have, or that end the machine at once when its kernel
// is broken. A setting that this kernel does not know is passed over.
var settings = map[string]string{
	"kernel/dmesg_restrict":            "1",
	"kernel/kptr_restrict":             "2",
	"kernel/kexec_load_disabled":       "1",
	"kernel/unprivileged_bpf_disabled": "1",
	"kernel/perf_event_paranoid":       "3",
	"kernel/sysrq":                     "0",
	"kernel/panic":                     "-1",
	"kernel/panic_on_oops":             "1",
	"user/max_user_namespaces":         "0",
	"vm/unprivileged_userfaultfd":      "0",
	// Memory is given as in other tiers: who takes more than the limit is ended, and that is told.
	"vm/overcommit_memory": "1",
}

// timer measures named steps one after the other.
type timer struct {
	last  time.Time
	steps []vmwire.Step
}

func newTimer() *timer { return &timer{last: time.Now()} }

func (t *timer) step(name string) {
	now := time.Now()
	t.steps = append(t.steps, vmwire.Step{Name: name, Took: now.Sub(t.last).Nanoseconds()})
	t.last = now
}

// boot brings the machine to where it can be personalised, but for the stage.
func boot(t *timer) error {
	for _, m := range []struct{ fs, dir, options string }{
		{"devtmpfs", "/dev", "mode=755"}, {"proc", "/proc", ""}, {"sysfs", "/sys", ""},
	} {
		if err := mount(m.fs, m.dir, m.fs, 0, m.options); err != nil {
			return err
		}
	}
	t.step("mounts")
	if err := loadModules(); err != nil {
		return err
	}
	t.step("modules")
	for _, m := range []struct{ fs, dir, options string }{
		{"cgroup2", cgroupDir, ""}, {"tmpfs", runDir, fmt.Sprintf("mode=755,size=%d", runBytes)}, {"tmpfs", newDir, "mode=700,size=1m"},
	} {
		if err := mount(m.fs, m.dir, m.fs, unix.MS_NOSUID|unix.MS_NODEV, m.options); err != nil {
			return err
		}
	}
	if err := makeBox(); err != nil {
		return err
	}
	if err := loopback(); err != nil {
		return err
	}
	for name, value := range settings {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	t.step("settings")
	return nil
}

// loadModules loads all that the initramfs brings and then closes the door: nothing is ever loaded
// after that.
func loadModules() error {
	list, err := os.ReadFile("/" + initramfs.ModulesList)
	if err != nil {
		return fmt.Errorf("modules: %w", err)
	}
	for name := range strings.Lines(string(list)) {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if err := loadModule(filepath.Join("/", initramfs.ModulesDir, name)); err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
	}
	if err := os.RemoveAll("/" + initramfs.ModulesDir); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/kernel/modules_disabled", []byte("1"), 0)
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENODEV) { // ENODEV: not for this processor
		return nil
	}
	return err
}

// mount makes the folder if it is missing.
func mount(source, dir, fs string, flags uintptr, options string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, dir, fs, flags, options); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fs, dir, err)
	}
	return nil
}

// waitFor looks until what is there, or the deadline is over.
func waitFor(what string, limit time.Duration, there func() bool) error {
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; !there(); pause = min(2*pause, 20*time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not appear within %v", what, limit)
		}
		time.Sleep(pause)
	}
	return nil
}
