package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/tools/residue"
)

// Crash ends everything of the installation at once, as the end of a machine does: every process,
// those of sandboxes too, and then what the kernel holds for them.
func (e *Env) Crash() {
	e.t.Helper()
	e.Kill()
	e.clear(e.Dir, e.Marks)
}

// clear ends what names one of the marks, until nothing is left below dir.
func (e *Env) clear(dir string, marks []string) {
	e.t.Helper()
	end := time.Now().Add(20 * time.Second)
	for {
		left := killAll(marks)
		err := errors.Join(unmountAll(marks), freeLoops(dir))
		if left == 0 && err == nil {
			return
		}
		if time.Now().After(end) {
			e.t.Fatalf("after a crash %d processes are left, and: %v", left, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// killAll kills every process that names one of the marks, and says how many there were.
func killAll(marks []string) int {
	all := residue.Take().About(marks...).Processes
	for _, p := range all {
		if pid, err := strconv.Atoi(strings.Fields(p)[1]); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended meanwhile
		}
	}
	return len(all)
}

// Mounts are the mount points of the installation, in the order in which they were made.
func (e *Env) Mounts() []string { return mountsOf(e.Marks) }

func mountsOf(marks []string) []string {
	all := residue.Take().About(marks...).Mounts
	for i := range all {
		all[i] = strings.TrimPrefix(all[i], "mount ")
	}
	return all
}

func unmountAll(marks []string) (err error) {
	all := mountsOf(marks)
	for i := len(all) - 1; i >= 0; i-- {
		thaw(all[i])
		if uerr := syscall.Unmount(all[i], 0); uerr != nil {
			err = errors.Join(err, fmt.Errorf("unmount %s: %w", all[i], uerr))
		}
	}
	return err
}

// thaw ends a freeze, if there is one: a file system that is frozen is not unmounted.
func thaw(mountpoint string) { _ = exec.Command("fsfreeze", "--unfreeze", mountpoint).Run() }

func freeLoops(below string) (err error) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		raw, rerr := os.ReadFile(file)
		if rerr != nil || !strings.HasPrefix(string(raw), below+"/") {
			continue
		}
		dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(file)))
		out, derr := exec.Command("losetup", "-d", dev).CombinedOutput()
		err = errors.Join(err, fmt.Errorf("%s held %s: %v %s", dev, raw, derr, out))
	}
	return err
}

// HostDir is where the host keeps what is its own; of a cluster's hosts see Member.Dir.
func (e *Env) HostDir() string { return filepath.Join(e.Dir, "host", "local") }

// PoolFile is the file that the host's disks lie in.
func (e *Env) PoolFile() string { return filepath.Join(e.HostDir(), "disks.xfs") }

// PoolDir is where the host's disks are.
func (e *Env) PoolDir() string { return filepath.Join(e.HostDir(), "disks") }

// LosePool takes the host's disks away for good. It is called while nothing runs: after Crash or Stop.
func (e *Env) LosePool() {
	e.t.Helper()
	if m := e.Mounts(); len(m) > 0 {
		e.t.Fatalf("mounts are left: %v", m)
	}
	if err := errors.Join(os.Remove(e.PoolFile()), os.RemoveAll(e.PoolDir())); err != nil {
		e.t.Fatal(err)
	}
}
