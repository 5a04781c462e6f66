package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// loadArg as the only argument makes a process that only counts.
const loadArg = "--burn"

func burn() {
	for {
	}
}

// startLoad starts the load and returns what ends it. The processes of the load also end when flake is killed.
func startLoad() (end func(), err error) {
	var all []*exec.Cmd
	end = func() {
		for _, c := range all {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}
	start := func(c *exec.Cmd) error {
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := c.Start(); err != nil {
			return err
		}
		all = append(all, c)
		return nil
	}
	dir, err := os.MkdirTemp("", "flake-load-")
	if err != nil {
		return nil, err
	}
	file := exec.Command("sh", "-c", `while :; do dd if=/dev/zero of="$0" bs=1M count=32 conv=fsync 2>/dev/null || exit; done`, filepath.Join(dir, "file"))
	err = errors.Join(start(exec.Command("/proc/self/exe", loadArg)), start(exec.Command("/proc/self/exe", loadArg)), start(file))
	stop := end
	end = func() { stop(); _ = os.RemoveAll(dir) }
	if err != nil {
		end()
		return nil, err
	}
	return end, nil
}
