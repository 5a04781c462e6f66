// Package residue looks at what runs or is mounted on a host for sandboxes:
// processes, mounts (of network namespaces that are pinned at a path, too),
// cgroups, loop devices and network links; and for clusters of processes:
// members, TUN devices and network namespaces. It only looks. A difference of
// two looks is what came in between.
package residue

import (
	"bufio"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/internal/netns"
)

// Residue is one look.
type Residue struct {
	Processes, Mounts, Cgroups, Loops []string
	// Devices are TUN devices of this namespace; Namespaces are other network
	// namespaces than this one that a process is in.
	Devices, Namespaces []string
	// Links are those in namespaces that are pinned at a path, and ends of veths
	// in this one.
	Links []string
}

// programs are those whose processes count, besides all in a cgroup of ours.
var programs = []string{"containerd", "runsc", "runc", "berth-guest", "/run/berth/guest", "berth-watchdog", "berth run "}

// Take looks at the whole host.
func Take() Residue {
	return Residue{processes(), mounts(), cgroups(), loops(), devices(), namespaces(), links()}
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

func devices() (out []string) {
	files, _ := filepath.Glob("/sys/class/net/*/tun_flags")
	for _, f := range files {
		out = append(out, "device "+filepath.Base(filepath.Dir(f)))
	}
	return out
}

// namespaces names one process in each: net:[inode] is what tells them apart.
func namespaces() (out []string) {
	own, _ := os.Readlink("/proc/self/ns/net")
	seen := map[string]bool{own: true, "": true}
	links, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, l := range links {
		ns, _ := os.Readlink(l)
		if seen[ns] {
			continue
		}
		seen[ns] = true
		pid := filepath.Base(filepath.Dir(filepath.Dir(l)))
		raw, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		out = append(out, fmt.Sprintf("namespace %s of process %s %s", ns, pid, strings.ReplaceAll(string(raw), "\x00", " ")))
	}
	return out
}

// pinned lists the paths at which network namespaces are mounted.
func pinned() (out []string) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(raw)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && strings.HasPrefix(fields[3], "net:[") {
			out = append(out, fields[4])
		}
	}
	return out
}

func links() (out []string) {
	veths, _ := filepath.Glob("/sys/class/net/*/iflink")
	for _, v := range veths {
		other, _ := os.ReadFile(v)
		own, _ := os.ReadFile(filepath.Join(filepath.Dir(v), "ifindex"))
		if string(other) != string(own) {
			out = append(out, "link "+filepath.Base(filepath.Dir(v)))
		}
	}
	for _, path := range pinned() {
		_ = netns.Do(path, func() error { // one that goes away meanwhile has none
			all, err := net.Interfaces()
			for _, i := range all {
				if i.Flags&net.FlagLoopback == 0 {
					out = append(out, fmt.Sprintf("link %s in the namespace at %s", i.Name, path))
				}
			}
			return err
		})
	}
	return out
}

// Since is what is there now and was not in before.
func (r Residue) Since(before Residue) Residue {
	sub := func(now, then []string) []string {
		return slices.DeleteFunc(slices.Clone(now), func(s string) bool { return slices.Contains(then, s) })
	}
	return r.with(before, sub)
}

// About keeps what names one of the words: a session's key, a state folder.
func (r Residue) About(words ...string) Residue {
	keep := func(all []string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(s string) bool {
			return !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(s, w) })
		})
	}
	return r.with(Residue{}, func(all, _ []string) []string { return keep(all) })
}

// with applies f to each kind of r and other.
func (r Residue) with(other Residue, f func(mine, theirs []string) []string) Residue {
	return Residue{f(r.Processes, other.Processes), f(r.Mounts, other.Mounts), f(r.Cgroups, other.Cgroups),
		f(r.Loops, other.Loops), f(r.Devices, other.Devices), f(r.Namespaces, other.Namespaces), f(r.Links, other.Links)}
}

// List returns every entry of r.
func (r Residue) List() []string {
	return slices.Concat(r.Processes, r.Mounts, r.Cgroups, r.Loops, r.Devices, r.Namespaces, r.Links)
}

// Empty reports whether there is nothing.
func (r Residue) Empty() bool {
	return len(r.List()) == 0
}

// String counts, and names the first few.
func (r Residue) String() string {
	s := fmt.Sprintf("%d processes, %d mounts, %d cgroups, %d loop devices",
		len(r.Processes), len(r.Mounts), len(r.Cgroups), len(r.Loops))
	if n := len(r.Devices) + len(r.Namespaces); n > 0 {
		s += fmt.Sprintf(", %d network devices and namespaces", n)
	}
	if n := len(r.Links); n > 0 {
		s += fmt.Sprintf(", %d links", n)
	}
	for _, what := range r.List() {
		if len(s) < 500 {
			s += fmt.Sprintf("; %.100s", what)
		}
	}
	return s
}
