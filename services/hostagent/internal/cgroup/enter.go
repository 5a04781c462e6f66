package cgroup

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Enter moves a process into path, which Create made, in every hierarchy that has it. What it forks
// afterwards is in there too.
func (t Tree) Enter(path string, pid int) error {
	for _, dir := range t.dirs(path) {
		file := filepath.Join(dir, "cgroup.procs")
		if _, err := os.Stat(file); err != nil {
			continue // a hierarchy that carries no limits
		}
		if err := write(file, strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

// Frozen reports whether path is frozen, by itself or from above, or is about to be.
func (t Tree) Frozen(path string) bool {
	if t.v2 {
		return keyed(filepath.Join(t.root, path, "cgroup.events"), "frozen") == "frozen 1"
	}
	b, err := os.ReadFile(filepath.Join(t.root, "freezer", path, "freezer.state"))
	return err == nil && strings.TrimSpace(string(b)) != "THAWED"
}
