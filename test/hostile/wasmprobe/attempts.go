//go:build wasip1

package main

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

var errNothing = errors.New("nothing was found")

var attempts = map[string]attempt{
	"look-files": func(a []string) (string, error) {
		return walk(func(p string, b []byte) bool { return bytes.Contains(b, []byte(a[0])) })
	},
	"look-names": func(a []string) (string, error) {
		return walk(func(p string, _ []byte) bool { return strings.Contains(p, a[0]) })
	},
	"look-tokens": func([]string) (string, error) {
		return walk(func(_ string, b []byte) bool {
			return bytes.Contains(b, []byte("PRIVATE "+"KEY-----")) || bytes.Contains(b, []byte("eyJhbGciOi"))
		})
	},
	"look-self": lookSelf,
	"devices":   devices,
	"read":      readFirst,
	"list":      listFirst,
	"write":     func(a []string) (string, error) { return writeFirst(a, 0) },
	"make":      func(a []string) (string, error) { return writeFirst(a, os.O_CREATE) },
	"link-read": linkRead,
	"hard-link": hardLink,
	"rename-in": renameIn,
	"fds":       fds,
	"pointers":  pointers,
	"dial":      dial,
	"listen":    listen,
	"resolve":   func(a []string) (string, error) { got, err := net.LookupHost(a[0]); return strings.Join(got, " "), err },
	"exec":      execute,
	"random":    random,
	"clock":     func([]string) (string, error) { return strconv.FormatInt(time.Now().UnixMilli(), 10), nil },
	"grow":      grow,
	"loop": func([]string) (string, error) {
		for {
		}
	},
	"sleep":     func([]string) (string, error) { time.Sleep(time.Hour); return "an hour", nil },
	"flood":     flood,
	"fill":      fill,
	"huge-file": hugeFile,
	"fd-hog":    fdHog,
	"deep":      deep,
	"recurse":   func([]string) (string, error) { return strconv.Itoa(recurse(0)), nil },
	"panic":     func([]string) (string, error) { var p *int; return strconv.Itoa(*p), nil },
	"keep":      func(a []string) (string, error) { kept = bytes.Repeat([]byte(a[0]), 100_000); return "kept", nil },
	"signal":    func([]string) (string, error) { return "sent", syscall.Kill(1, syscall.SIGKILL) },
	"leave":     leave,
	"put":       func(a []string) (string, error) { return "written", os.WriteFile(a[0], []byte(a[1]), 0o666) },
}

var kept []byte

// walk visits every file that the module can see, with the beginning of what is in it.
func walk(is func(path string, begin []byte) bool) (hit string, err error) {
	n := 0
	err = fs.WalkDir(os.DirFS("/"), ".", func(path string, d fs.DirEntry, err error) error {
		if n++; n > 30_000 {
			return fs.SkipAll
		}
		if err != nil || d.IsDir() && strings.HasPrefix(path, "usr/share") {
			return fs.SkipDir
		}
		var b []byte
		if d.Type().IsRegular() && !strings.HasPrefix(path, "usr/") {
			b = begin("/" + path)
		}
		if is(path, b) {
			hit = "/" + path
			return fs.SkipAll
		}
		return nil
	})
	if hit == "" {
		return "", fmt.Errorf("%w in %d entries (%v)", errNothing, n, err)
	}
	return hit, nil
}

func begin(path string) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	b := make([]byte, 64<<10)
	n, _ := f.Read(b)
	return b[:n]
}

// lookSelf looks for the words in this call's own arguments and environment, which nobody gave it.
func lookSelf(a []string) (string, error) {
	own := append(slices.Clone(os.Args[2+len(a):]), os.Environ()...)
	for _, text := range own {
		for _, word := range a {
			if strings.Contains(text, word) {
				return text, nil
			}
		}
	}
	return "", fmt.Errorf("%w in %d words", errNothing, len(own))
}

// devices finds everything that is neither file, folder nor link and can be opened, beside null.
func devices([]string) (string, error) {
	return walk(func(path string, _ []byte) bool {
		st, err := os.Lstat("/" + path)
		if err != nil || st.Mode()&(fs.ModeDevice|fs.ModeSocket|fs.ModeNamedPipe) == 0 || path == "dev/null" {
			return false
		}
		f, err := os.Open("/" + path)
		if err == nil {
			_ = f.Close()
		}
		return err == nil
	})
}

// readFirst gives the first bytes of the first of the files that can be read.
func readFirst(paths []string) (string, error) {
	var last error
	for _, p := range paths {
		f, err := os.Open(p)
		if err != nil {
			last = err
			continue
		}
		b := make([]byte, 512)
		n, err := f.Read(b)
		_ = f.Close()
		if n > 0 {
			return fmt.Sprintf("%s: %q", p, b[:min(n, 80)]), nil
		}
		last = fmt.Errorf("%s: %w", p, errors.Join(err, errNothing))
	}
	return "", last
}

func listFirst(paths []string) (string, error) {
	var last error
	for _, p := range paths {
		entries, err := os.ReadDir(p)
		if len(entries) > 0 {
			return fmt.Sprintf("%s: %v", p, entries), nil
		}
		last = fmt.Errorf("%s: %w", p, errors.Join(err, errNothing))
	}
	return "", last
}

func writeFirst(paths []string, how int) (string, error) {
	var last error
	for _, p := range paths {
		f, err := os.OpenFile(p, os.O_WRONLY|how, 0o666)
		if err == nil {
			_, err = f.WriteString("mine")
			_ = f.Close()
		}
		if err == nil {
			return p + " is written", nil
		}
		last = err
	}
	return "", last
}

// linkRead makes links to the paths and reads through them.
func linkRead(targets []string) (string, error) {
	var last error
	for i, target := range targets {
		link := fmt.Sprintf("/root/link-%d", i)
		_ = os.Remove(link)
		if last = os.Symlink(target, link); last != nil {
			continue
		}
		var got string
		if got, last = readFirst([]string{link}); last == nil {
			return target + " by " + got, nil
		}
		if got, last = listFirst([]string{link}); last == nil {
			return target + " by " + got, nil
		}
	}
	return "", last
}

func hardLink(targets []string) (string, error) {
	var last error
	for i, target := range targets {
		if last = os.Link(target, fmt.Sprintf("/root/hard-%d", i)); last == nil {
			return target + " has another name", nil
		}
	}
	return "", last
}

// renameIn moves something of the sandbox's own parts away.
func renameIn(paths []string) (string, error) {
	var last error
	for _, p := range paths {
		if last = os.Rename(p, p+".moved"); last == nil {
			return p + " is moved", nil
		}
	}
	return "", last
}

// fds looks for descriptors beyond the standard ones and the one folder.
func fds([]string) (string, error) {
	var hits []string
	for fd := 4; fd < 1024; fd++ {
		if n, err := syscall.Read(fd, make([]byte, 16)); err != syscall.EBADF {
			hits = append(hits, fmt.Sprintf("%d: %d bytes, %v", fd, n, err))
		}
		if _, err := syscall.Write(fd, []byte("x")); err != syscall.EBADF {
			hits = append(hits, fmt.Sprintf("%d: %v", fd, err))
		}
	}
	if len(hits) == 0 {
		return "", errNothing
	}
	return strings.Join(hits, "; "), nil
}

func dial(a []string) (string, error) {
	c, err := net.DialTimeout(a[0], a[1], time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if a[0] == "udp" {
		if _, err := c.Write([]byte("x")); err != nil {
			return "", err
		}
	}
	_ = c.SetReadDeadline(time.Now().Add(time.Second))
	b := make([]byte, 64)
	n, err := c.Read(b)
	if n > 0 {
		err = nil
	}
	return fmt.Sprintf("%q", b[:n]), err // Go's own network inside the module has nobody else in it
}

// listen asks for every descriptor that a host could have left a socket in.
func listen([]string) (string, error) {
	for fd := range 64 {
		f := os.NewFile(uintptr(fd), "socket")
		l, err := net.FileListener(f)
		if err == nil {
			return fmt.Sprintf("descriptor %d listens at %s", fd, l.Addr()), nil
		}
	}
	return "", errNothing
}

func execute(a []string) (string, error) {
	out, err := exec.Command(a[0], a[1:]...).Output()
	return string(out), err
}

func random([]string) (string, error) {
	b := make([]byte, 32)
	_, err := rand.Read(b)
	return hex.EncodeToString(b), err
}

func grow([]string) (string, error) {
	var all [][]byte
	for n := 0; n < 4<<10; n++ {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		all = append(all, b)
	}
	return fmt.Sprintf("%d MiB", len(all)), nil
}

func flood([]string) (string, error) {
	b := bytes.Repeat([]byte("x"), 1<<20)
	for n := range 1024 {
		if _, err := os.Stdout.Write(b); err != nil {
			return "", fmt.Errorf("after %d MiB: %w", n, err)
		}
	}
	return "a gigabyte", nil
}

// fill writes to memory that is a file system until it is full.
func fill(a []string) (string, error) {
	b := bytes.Repeat([]byte("x"), 1<<20)
	f, err := os.Create(filepath.Join(a[0], "fill"))
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	for n := range 1024 {
		if _, err := f.Write(b); err != nil {
			return "", fmt.Errorf("after %d MiB: %w", n, err)
		}
	}
	return "a gigabyte", nil
}

// hugeFile writes at the end of a file that is larger than any disk.
func hugeFile([]string) (string, error) {
	f, err := os.Create("/root/huge")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	for _, at := range []int64{1 << 50, 1 << 60, 1<<63 - 8} {
		if _, err = f.WriteAt([]byte("x"), at); err == nil {
			return fmt.Sprintf("a byte at %d", at), nil
		}
	}
	return "", err
}

func fdHog([]string) (string, error) {
	var all []*os.File
	for range 5000 {
		f, err := os.Open("/dev/null")
		if err != nil {
			return "", fmt.Errorf("after %d: %w", len(all), err)
		}
		all = append(all, f)
	}
	return "5000 files", nil
}

// deep makes folders until the path is longer than any buffer: refused, for a path has an end.
func deep([]string) (string, error) {
	path := "/root/deep"
	for n := range 300 {
		if err := os.Mkdir(path, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", fmt.Errorf("after %d levels: %w", n, err)
		}
		path += "/" + strings.Repeat("d", 200)
	}
	return "300 levels", nil
}

func recurse(n int) int {
	var pad [4096]byte
	pad[n%4096] = 1
	return recurse(n+1) + int(pad[(n+1)%4096])
}

// leave puts links in the place of what the sandbox is made of, as far as it may.
func leave(a []string) (string, error) {
	var notes []string
	for _, p := range []string{"/proc", "/sys", "/mnt", "/opt", "/srv", "/usr/lib/wasm", "/tmp", "/run", "/dev"} {
		err := errors.Join(os.RemoveAll(p), os.Symlink("../../../../../../../.."+a[0], p)) // a module can make no absolute one
		notes = append(notes, fmt.Sprintf("%s: %v", p, err))
	}
	for name, target := range map[string]string{"up": "../../../../../../../../etc/shadow", "one": "/proc/1/root/etc/shadow"} {
		_ = os.Symlink(target, "/root/left-"+name)
	}
	return strings.Join(notes, "; "), nil
}
