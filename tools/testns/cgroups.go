package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// mount is one line of /proc/self/mountinfo.
type mount struct {
	point, fstype, source, super string
}

// mountsBelow lists the mounts at dir and below it, in the order in which they were made.
func mountsBelow(dir string) (out []mount) {
	raw, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(raw)) {
		left, right, ok := strings.Cut(line, " - ")
		fields, more := strings.Fields(left), strings.Fields(right)
		if ok && len(fields) > 4 && len(more) > 2 && (fields[4] == dir || strings.HasPrefix(fields[4], strings.TrimSuffix(dir, "/")+"/")) {
			out = append(out, mount{point: fields[4], fstype: more[0], source: more[1], super: more[2]})
		}
	}
	return out
}

// hierarchies are the mount points of this machine's cgroup hierarchies; a mount may cover an older one.
func hierarchies() (out []string) {
	for _, m := range mountsBelow(cgroupRoot) {
		if strings.HasPrefix(m.fstype, "cgroup") && !slices.Contains(out, m.point) {
			out = append(out, m.point)
		}
	}
	return out
}

// makeCgroups makes the cgroup name in every hierarchy.
func makeCgroups(name string) error {
	for _, h := range hierarchies() {
		dir := filepath.Join(h, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make the cgroup of the tests: %w", err)
		}
		for _, set := range []string{"cpuset.cpus", "cpuset.mems"} { // cpuset of version 1 takes no process before
			if v, err := os.ReadFile(filepath.Join(h, set)); err == nil {
				if err := os.WriteFile(filepath.Join(dir, set), v, 0); err != nil && filepath.Base(h) == "cpuset" {
					return fmt.Errorf("set the cgroup of the tests: %w", err)
				}
			}
		}
		_ = os.WriteFile(filepath.Join(dir, "cgroup.clone_children"), []byte("1"), 0) // version 1 alone
		if controllers, err := os.ReadFile(filepath.Join(h, "cgroup.controllers")); err == nil {
			for c := range strings.FieldsSeq(string(controllers)) {
				if err := os.WriteFile(filepath.Join(h, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
					return fmt.Errorf("delegate the cgroup controller %s to the tests: %w", c, err)
				}
			}
		}
	}
	return nil
}

// enterCgroups moves the calling thread's process to the cgroup name, makes it the root of what the process
// sees, and mounts the hierarchies anew at their places. It must run on a locked thread of a process with a
// mount namespace of its own.
func enterCgroups(name string) error {
	all := mountsBelow(cgroupRoot)
	for _, h := range hierarchies() {
		if err := os.WriteFile(filepath.Join(h, name, "cgroup.procs"), []byte("0"), 0); err != nil {
			return fmt.Errorf("enter the cgroup of the tests: %w", err)
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a cgroup namespace: %w", err)
	}
	links := map[string]string{} // cpu may be a link to cpu,cpuacct
	entries, _ := os.ReadDir(cgroupRoot)
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(cgroupRoot, e.Name())); err == nil {
			links[e.Name()] = to
		}
	}
	if err := unix.Unmount("/sys", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach /sys: %w", err)
	}
	// A sysfs shows the network devices of the namespace in which it was mounted.
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	for _, m := range all {
		options := ""
		if m.fstype == "cgroup" {
			options = controllersOf(m.super)
		}
		if m.fstype == "tmpfs" {
			options = "mode=755"
		}
		if err := os.MkdirAll(m.point, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, m.point, m.fstype, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
			return fmt.Errorf("mount %s: %w", m.point, err)
		}
	}
	var errs []error
	for name, to := range links {
		errs = append(errs, os.Symlink(to, filepath.Join(cgroupRoot, name)))
	}
	return errors.Join(append(errs, leaveRoot())...)
}

// leaf is the cgroup of PID 1 and of the test binary where a cgroup that delegates may hold no process
// (version 2).
const leaf = "testns"

func leaveRoot() error {
	for _, h := range hierarchies() {
		if _, err := os.Stat(filepath.Join(h, "cgroup.controllers")); err != nil {
			continue
		}
		dir := filepath.Join(h, leaf)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make the cgroup of the test binary: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
			return fmt.Errorf("enter the cgroup of the test binary: %w", err)
		}
	}
	return nil
}

// controllersOf keeps what names a hierarchy of version 1 among the options of its mount.
func controllersOf(super string) string {
	var keep []string
	named := false
	for o := range strings.SplitSeq(super, ",") {
		switch o {
		case "rw", "ro", "xattr", "nosuid", "nodev", "noexec", "relatime":
		default:
			if strings.HasPrefix(o, "release_agent=") {
				continue
			}
			named = named || strings.HasPrefix(o, "name=")
			keep = append(keep, o)
		}
	}
	if named {
		keep = append(keep, "none")
	}
	return strings.Join(keep, ",")
}
