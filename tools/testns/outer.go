package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// prefix begins the name of the temporary directory and of the cgroup of one testns; the process id of its
// outer process follows. It is short because Unix sockets lie below.
const prefix = "bt"

// stopTime is how long the tests have to end after a signal before they are killed.
const stopTime = 10 * time.Second

// runOuter starts PID 1 of the new namespaces, forwards signals to it, and removes what outlives namespaces.
func runOuter(args []string) int {
	// The parent-death signal of the child comes when the thread that started it ends.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fail(err)
	}
	sweepDead()
	name := prefix + strconv.Itoa(os.Getpid())
	dir := filepath.Join(os.TempDir(), name)
	defer removeRun(name, dir)
	if err := errors.Join(os.Mkdir(dir, 0o1777), os.Chmod(dir, 0o1777|os.ModeSticky), makeCgroups(name)); err != nil {
		return fail(err)
	}
	cmd := exec.Command("/proc/self/exe", append([]string{initArg}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "BERTH_TESTNS_CGROUP="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig:  syscall.SIGKILL,
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP)
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return fail(err)
	}
	done := make(chan struct{})
	go forward(signals, cmd.Process, done)
	err := cmd.Wait()
	close(done)
	noteUsage(args[0], time.Since(began), cmd.ProcessState)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	return fail(err)
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "testns:", err)
	return 2
}

// forward sends each signal to PID 1 and kills it when the tests do not end in time.
func forward(signals <-chan os.Signal, p *os.Process, done <-chan struct{}) {
	var late <-chan time.Time
	for {
		select {
		case s := <-signals:
			_ = p.Signal(s)
			if late == nil {
				late = time.After(stopTime)
			}
		case <-late:
			_ = p.Kill()
		case <-done:
			return
		}
	}
}

// usage is one line of the file that BERTH_TESTNS_USAGE names.
type usage struct {
	Binary, Dir string
	Wall, CPU   float64 // seconds
	MaxRSSBytes int64
}

// noteUsage appends the usage of the tests. A file that cannot be written costs the report a column and no test.
func noteUsage(binary string, wall time.Duration, state *os.ProcessState) {
	file := os.Getenv("BERTH_TESTNS_USAGE")
	if file == "" {
		return
	}
	dir, _ := os.Getwd()
	u := usage{Binary: filepath.Base(binary), Dir: dir, Wall: wall.Seconds(), CPU: (state.UserTime() + state.SystemTime()).Seconds()}
	if r, ok := state.SysUsage().(*syscall.Rusage); ok {
		u.MaxRSSBytes = r.Maxrss << 10
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	defer f.Close()
	_ = json.NewEncoder(f).Encode(u)
}

// sweepDead removes the cgroups and temporary directories of each testns that was killed.
func sweepDead() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"[0-9]*"))
	for _, hierarchy := range hierarchies() {
		more, _ := filepath.Glob(filepath.Join(hierarchy, prefix+"[0-9]*"))
		dirs = append(dirs, more...)
	}
	for _, d := range dirs {
		name := filepath.Base(d)
		pid, err := strconv.Atoi(strings.TrimPrefix(name, prefix))
		if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			removeRun(name, filepath.Join(os.TempDir(), name))
		}
	}
}

// removeRun removes the cgroups and the temporary directory of one run whose processes have ended.
func removeRun(name, dir string) {
	for _, hierarchy := range hierarchies() {
		removeTree(filepath.Join(hierarchy, name))
	}
	detachLoops(dir)
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, "testns: remove the temporary directory of the tests:", err)
	}
}

// removeTree removes a cgroup and those below it, deepest first.
func removeTree(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeTree(filepath.Join(dir, e.Name()))
		}
	}
	for range 100 { // a cgroup is busy until the kernel has buried its last process
		err := unix.Rmdir(dir)
		if !errors.Is(err, unix.EBUSY) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// detachLoops detaches the loop devices whose backing file lay in dir.
func detachLoops(dir string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(raw), dir+"/") {
			dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(f)))
			_ = exec.Command("losetup", "-d", dev).Run()
		}
	}
}
