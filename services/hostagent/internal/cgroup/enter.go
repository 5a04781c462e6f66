package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Box makes a cgroup below path, which Create made, for processes, and returns its path: version 2 keeps
// them out of a cgroup that hands its controllers down. Its limits are those of path. Idempotent.
func (t Tree) Box(path string) (string, error) {
	box := filepath.Join(path, "box")
	for _, dir := range t.dirs(path) {
		if _, err := os.Stat(dir); err != nil {
			continue // a hierarchy that carries no limits
		}
		if err := os.MkdirAll(filepath.Join(dir, "box"), 0o755); err != nil {
			return "", fmt.Errorf("make cgroup: %w", err)
		}
	}
	return box, nil
}

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
