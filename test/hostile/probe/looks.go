//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// looks search what a sandbox can see for something that is somebody else's. Their argument is the
// mark that the other session holds; finding it is success.
var looks = map[string]attempt{
	"look-files":   lookFiles,
	"look-names":   lookNames,
	"look-procs":   func(a []string) (string, error) { return lookProc(a[0], "cmdline") },
	"look-environ": func(a []string) (string, error) { return lookProc(a[0], "environ") },
	"look-memory":  lookMemory,
	"look-ids":     lookIDs,
	"look-tokens":  lookTokens,
	"look-sockets": lookSockets,
	"look-fds":     lookFDs,
	"look-pipes":   lookPipes,
	"look-devices": lookDevices,
	"look-self":    lookSelf,
	"read":         func(a []string) (string, error) { return readSome(a[0]) },
	"write":        func(a []string) (string, error) { return "written", write(a[0], a[1]) },
	"list":         list,
}

var errNothing = errors.New("nothing was found")

func found(what string, err error) (string, error) {
	if what == "" && err == nil {
		return "", errNothing
	}
	return what, err
}

func readSome(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b := make([]byte, 4096)
	n, err := f.Read(b)
	if n == 0 {
		return "", fmt.Errorf("read %s: nothing in it (%v)", path, err)
	}
	return strconv.Quote(string(b[:min(n, 200)])), nil
}

func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func list(a []string) (string, error) {
	entries, err := os.ReadDir(a[0])
	if err != nil {
		return "", err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return found(strings.Join(names, " "), nil)
}

// walk visits what lies below root, without /proc and /sys, at most n entries.
func walk(root string, n int, visit func(path string, d fs.DirEntry) bool) {
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if n--; n < 0 {
			return filepath.SkipAll
		}
		if err != nil {
			return nil
		}
		if path == "/proc" || path == "/sys" {
			return filepath.SkipDir
		}
		if visit(path, d) {
			return filepath.SkipAll
		}
		return nil
	})
}

func lookFiles(a []string) (hit string, err error) {
	mark := []byte(a[0])
	walk("/", 200_000, func(path string, d fs.DirEntry) bool {
		info, err := os.Lstat(path) // a folder's entry may lie about what is mounted on it
		if err != nil || !info.Mode().IsRegular() || info.Size() > 64<<10 || strings.HasPrefix(path, "/usr/") || strings.HasPrefix(path, "/var/lib/dpkg/") {
			return false // these came with the image; their names are another row's
		}
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, mark) {
			hit = path
		}
		return hit != ""
	})
	return found(hit, nil)
}

func lookNames(a []string) (hit string, err error) {
	walk("/", 400_000, func(path string, d fs.DirEntry) bool {
		if strings.Contains(d.Name(), a[0]) {
			hit = path
		}
		return hit != ""
	})
	return found(hit, nil)
}

func pids() []string {
	all, _ := filepath.Glob("/proc/[0-9]*")
	return all
}

func lookProc(mark, file string) (string, error) {
	for _, p := range pids() {
		if filepath.Base(p) == strconv.Itoa(os.Getpid()) {
			continue // its own arguments hold the mark
		}
		if b, err := os.ReadFile(filepath.Join(p, file)); err == nil && bytes.Contains(b, []byte(mark)) {
			return fmt.Sprintf("%s/%s", p, file), nil
		}
	}
	return "", errNothing
}

// lookMemory reads what can be read of the memory of other processes.
func lookMemory(a []string) (string, error) {
	seen := 0
	for _, p := range pids() {
		if filepath.Base(p) == strconv.Itoa(os.Getpid()) {
			continue
		}
		maps, err := os.Open(filepath.Join(p, "maps"))
		if err != nil {
			continue
		}
		mem, err := os.Open(filepath.Join(p, "mem"))
		if err != nil {
			_ = maps.Close()
			continue
		}
		hit, n := scan(maps, mem, []byte(a[0]))
		seen += n
		_, _ = maps.Close(), mem.Close()
		if hit != "" {
			return p + " " + hit, nil
		}
	}
	return "", fmt.Errorf("%w in %d bytes of memory", errNothing, seen)
}

var window [1 << 20]byte

func scan(maps io.Reader, mem io.ReaderAt, mark []byte) (string, int) {
	lines, seen := bufio.NewScanner(maps), 0
	for lines.Scan() {
		var from, to int64
		var perm string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &perm); err != nil || perm[0] != 'r' {
			continue
		}
		for at := from; at < min(to, from+4<<20); at += int64(len(window)) {
			n, _ := mem.ReadAt(window[:min(int64(len(window)), to-at)], at)
			if n <= 0 {
				break
			}
			seen += n
			if bytes.Contains(window[:n], mark) {
				return lines.Text(), seen
			}
		}
	}
	return "", seen
}

// lookIDs looks for the other session's key where a sandbox might tell one.
func lookIDs(a []string) (string, error) {
	for _, path := range []string{"/proc/self/mountinfo", "/proc/self/cgroup", "/proc/1/mountinfo", "/proc/1/cgroup", "/proc/self/environ",
		"/etc/hostname", "/proc/sys/kernel/hostname", "/run/berth/session.json", "/proc/mounts", "/proc/swaps", "/proc/partitions", "/proc/cmdline", "/proc/locks"} {
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(a[0])) {
			return path, nil
		}
	}
	return "", errNothing
}

var token = regexp.MustCompile(`eyJ[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|SU[A-Z2-7]{56}|SX[A-Z2-7]{56}|-----BEGIN [A-Z ]*PRIVATE KEY`)

// lookTokens looks for grants, bus seeds and private keys.
func lookTokens([]string) (string, error) {
	for _, p := range pids() {
		for _, f := range []string{"environ", "cmdline"} {
			if b, err := os.ReadFile(filepath.Join(p, f)); err == nil && token.Match(b) {
				return filepath.Join(p, f), nil
			}
		}
	}
	hit := ""
	for _, root := range []string{"/run", "/root", "/tmp", "/home", "/var/lib", "/dev/shm"} {
		walk(root, 50_000, func(path string, d fs.DirEntry) bool {
			info, err := os.Lstat(path)
			if err != nil || !info.Mode().IsRegular() || info.Size() > 1<<20 {
				return false
			}
			if b, err := os.ReadFile(path); err == nil && token.Match(b) {
				hit = path
			}
			return hit != ""
		})
	}
	return found(hit, nil)
}

// lookSockets finds sockets that somebody else listens on: any in the file system, and any abstract.
func lookSockets([]string) (string, error) {
	var hits []string
	walk("/", 400_000, func(path string, d fs.DirEntry) bool {
		if d.Type()&fs.ModeSocket != 0 {
			hits = append(hits, path)
		}
		return false
	})
	if b, err := os.ReadFile("/proc/net/unix"); err == nil {
		for _, line := range strings.Split(string(b), "\n") {
			if i := strings.IndexByte(line, '@'); i >= 0 {
				hits = append(hits, line[i:])
			}
		}
	}
	return found(strings.Join(hits, " "), nil)
}

// lookPipes finds named pipes, as a guest's channel is one.
func lookPipes([]string) (string, error) {
	var hits []string
	walk("/", 400_000, func(path string, d fs.DirEntry) bool {
		if d.Type()&fs.ModeNamedPipe != 0 {
			hits = append(hits, path)
		}
		return false
	})
	return found(strings.Join(hits, " "), nil)
}

// lookFDs lists descriptors of this process beyond the standard three.
func lookFDs([]string) (string, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return "", err
	}
	var hits []string
	for _, e := range entries {
		n, _ := strconv.Atoi(e.Name())
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if n > 2 && err == nil && !strings.Contains(to, "/proc/") && !strings.HasPrefix(to, "anon_inode:[event") {
			hits = append(hits, e.Name()+"="+to)
		}
	}
	return found(strings.Join(hits, " "), nil)
}

var harmless = map[string]bool{"null": true, "zero": true, "full": true, "random": true, "urandom": true, "tty": true, "ptmx": true, "console": true}

// lookDevices finds device nodes that a sandbox has no use for and that can be opened.
func lookDevices([]string) (string, error) {
	var hits []string
	walk("/", 400_000, func(path string, d fs.DirEntry) bool {
		if info, err := os.Lstat(path); err != nil || info.Mode()&fs.ModeDevice == 0 || harmless[d.Name()] || strings.HasPrefix(path, "/dev/pts/") {
			return false
		}
		if f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err == nil {
			_ = f.Close()
			hits = append(hits, path)
		}
		return false
	})
	return found(strings.Join(hits, " "), nil)
}

// lookSelf says what this process may do, for the row that compares.
func lookSelf([]string) (string, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", err
	}
	var out []string
	for _, line := range strings.Split(string(b), "\n") {
		for _, k := range []string{"Uid:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:"} {
			if strings.HasPrefix(line, k) {
				out = append(out, strings.Join(strings.Fields(line), " "))
			}
		}
	}
	return strings.Join(out, "; "), nil
}
