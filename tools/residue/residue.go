// Package residue looks at what runs or is mounted on a host for sandboxes:
// processes, mounts, cgroups and loop devices. It only looks. A difference of
// two looks is what came in between.
package residue

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Residue is one look.
type Residue struct {
	Processes, Mounts, Cgroups, Loops []string
}

// programs are those whose processes count, besides all in a cgroup of ours.
var programs = []string{"containerd", "runsc", "runc", "berth-guest", "/run/berth/guest", "berth-watchdog"}

// Take looks at the whole host.
func Take() Residue {
	return Residue{processes(), mounts(), cgroups(), loops()}
}

func processes() (out []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range dirs {
		raw, err := os.ReadFile(p + "/cmdline")
		if err != nil || filepath.Base(p) == fmt.Sprint(os.Getpid()) {
			continue
		}
		cmd := strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
		cgroup, _ := os.ReadFile(p + "/cgroup")
		ours := func(name string) bool { return strings.Contains(cmd, name) }
		if slices.ContainsFunc(programs, ours) || strings.Contains(string(cgroup), "berth") {
			out = append(out, fmt.Sprintf("process %s %s %s", filepath.Base(p), cmd, ourCgroup(string(cgroup))))
		}
	}
	return out
}

// ourCgroup is the first line of a process's cgroups that names us.
func ourCgroup(lines string) string {
	for line := range strings.Lines(lines) {
		if strings.Contains(line, "berth") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

func mounts() (out []string) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 {
			out = append(out, "mount "+fields[4])
		}
	}
	return out
}

func cgroups() (out []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && strings.Contains(path, "berth") {
			out = append(out, "cgroup "+path)
		}
		return nil
	})
	return out
}

func loops() (out []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range files {
		if raw, err := os.ReadFile(l); err == nil {
			out = append(out, "loop device of "+strings.TrimSpace(string(raw)))
		}
	}
	return out
}

// Since is what is there now and was not in before.
func (r Residue) Since(before Residue) Residue {
	sub := func(now, then []string) []string {
		return slices.DeleteFunc(slices.Clone(now), func(s string) bool { return slices.Contains(then, s) })
	}
	return Residue{sub(r.Processes, before.Processes), sub(r.Mounts, before.Mounts),
		sub(r.Cgroups, before.Cgroups), sub(r.Loops, before.Loops)}
}

// About keeps what names one of the words: a session's key, a state folder.
func (r Residue) About(words ...string) Residue {
	keep := func(all []string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(s string) bool {
			return !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(s, w) })
		})
	}
	return Residue{keep(r.Processes), keep(r.Mounts), keep(r.Cgroups), keep(r.Loops)}
}

// Empty reports whether there is nothing.
func (r Residue) Empty() bool {
	return len(r.Processes)+len(r.Mounts)+len(r.Cgroups)+len(r.Loops) == 0
}

// String counts, and names the first few.
func (r Residue) String() string {
	s := fmt.Sprintf("%d processes, %d mounts, %d cgroups, %d loop devices",
		len(r.Processes), len(r.Mounts), len(r.Cgroups), len(r.Loops))
	for _, what := range slices.Concat(r.Processes, r.Mounts, r.Cgroups, r.Loops) {
		if len(s) < 500 {
			s += fmt.Sprintf("; %.100s", what)
		}
	}
	return s
}
