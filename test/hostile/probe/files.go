//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// files try what a disk or a path could carry out of the sandbox, or make ready for the next wake.
var files = map[string]attempt{
	"hold-secret": holdSecret,
	"leave":       leave,
	"left":        left,
	"lock-lower":  lockLower,
	"shm-file":    shmFile,
	"race":        race,
	"deep":        deep,
	"odd-names":   oddNames,
	"sparse":      sparse,
	"garble":      garble,
	"open":        func(a []string) (string, error) { return readOpen(a[0]) },
	"cgroup-grow": cgroupGrow,
	"upper-out":   upperOut,
}

// holdSecret is the other session: it keeps a mark in a file, its memory, its arguments and its
// environment, and waits.
func holdSecret(a []string) (string, error) {
	secret := a[0]
	kept := []byte(strings.Repeat(secret+" ", 1000))
	for _, path := range []string{"/root/" + secret, "/tmp/" + secret, "/dev/shm/" + secret} {
		_ = os.WriteFile(path, []byte(secret), 0o666)
	}
	if f, err := os.OpenFile("/etc/passwd", os.O_RDONLY, 0); err == nil {
		_ = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	_, _ = sysvShm([]string{"make", secret})
	_, _ = keyringAdd(a)
	fmt.Println("ready")
	go func() { _, _ = listenForever([]string{"7777", secret}) }()
	for {
		time.Sleep(time.Second)
		kept[0] = secret[0]
	}
}

// leave puts what must be dead after the next wake onto the disk.
func leave([]string) (string, error) {
	dir := "/root/left"
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	var notes []string
	note := func(what string, err error) {
		if err != nil {
			what += ": " + err.Error()
		}
		notes = append(notes, what)
	}
	note("suid", errors.Join(os.WriteFile(dir+"/suid", self, 0o755), os.Chmod(dir+"/suid", 0o6755)))
	for name, dev := range map[string]uint64{"mem": unix.Mkdev(1, 1), "null": unix.Mkdev(1, 3), "kmsg": unix.Mkdev(1, 11)} {
		note(name, unix.Mknod(dir+"/"+name, unix.S_IFCHR|0o666, int(dev)))
	}
	for name, dev := range map[string]uint64{"loop0": unix.Mkdev(7, 0), "sda": unix.Mkdev(8, 0), "vda": unix.Mkdev(254, 0)} {
		note(name, unix.Mknod(dir+"/"+name, unix.S_IFBLK|0o666, int(dev)))
	}
	note("link", os.Symlink("/proc/1/root/etc/shadow", dir+"/link"))
	note("up", os.Symlink("../../../../../../../../etc/shadow", dir+"/up"))
	return strings.Join(notes, "; "), nil
}

// left tries what leave put there.
func left([]string) (string, error) {
	dir := "/root/left"
	var hits []string
	for _, name := range []string{"mem", "kmsg", "loop0", "sda", "vda"} {
		if got, err := readSome(filepath.Join(dir, name)); err == nil {
			hits = append(hits, name+" "+got)
		}
	}
	return found(strings.Join(hits, "; "), nil)
}

// lockLower takes a lock on a file of the image that the other session holds one on.
func lockLower([]string) (string, error) {
	f, err := os.Open("/etc/passwd")
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return "another session's lock is felt: " + err.Error(), nil
	}
	return "", errors.New("the lock is free here")
}

func shmFile(a []string) (string, error) {
	all, _ := filepath.Glob("/dev/shm/*")
	for _, path := range all {
		if strings.Contains(path, a[0]) {
			return path, nil
		}
	}
	return "", errNothing
}

// race exchanges a file and a link for seconds, while the host moves files in and out beneath it.
func race(a []string) (string, error) {
	dir := "/root/race"
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}
	_ = os.WriteFile(dir+"/file", []byte("own"), 0o666)
	_ = os.MkdirAll(dir+"/sub", 0o777)
	_ = os.Symlink("/srv", dir+"/evil")
	_ = os.Symlink(a[0], dir+"/target")
	n := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); n++ {
		_ = unix.Renameat2(unix.AT_FDCWD, dir+"/file", unix.AT_FDCWD, dir+"/target", unix.RENAME_EXCHANGE)
		_ = unix.Renameat2(unix.AT_FDCWD, dir+"/sub", unix.AT_FDCWD, dir+"/evil", unix.RENAME_EXCHANGE)
		_ = os.Remove(dir + "/hard")
		_ = os.Link(dir+"/target", dir+"/hard")
	}
	return fmt.Sprintf("%d exchanges", n), nil
}

// deep makes folders until the path is longer than any buffer.
func deep([]string) (string, error) {
	if err := os.MkdirAll("/root/deep", 0o777); err != nil {
		return "", err
	}
	if err := os.Chdir("/root/deep"); err != nil {
		return "", err
	}
	name := strings.Repeat("d", 200)
	for i := range 200 {
		if err := os.Mkdir(name, 0o777); err != nil {
			return fmt.Sprintf("%d levels", i), nil
		}
		if err := os.Chdir(name); err != nil {
			return fmt.Sprintf("%d levels", i), nil
		}
	}
	return "200 levels", nil
}

func oddNames([]string) (string, error) {
	dir := "/root/odd"
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}
	n := 0
	for _, name := range []string{"new\nline", "\x1b[31mred", "\xff\xfe", "-rf", "..x", " ", "a\tb", "$(id)", "`id`", "'", "\"", "\\", strings.Repeat("n", 255), ".wh.passwd", ".wh..wh..opq"} {
		if os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o666) == nil {
			n++
		}
	}
	return fmt.Sprintf("%d names", n), nil
}

// sparse makes a file that says it is larger than any disk.
func sparse([]string) (string, error) {
	f, err := os.Create("/root/sparse")
	if err != nil {
		return "", err
	}
	defer f.Close()
	size := int64(1) << 43
	for ; size > 1<<30; size >>= 1 {
		if err = f.Truncate(size); err == nil {
			break
		}
	}
	return fmt.Sprintf("%d bytes", size), err
}

// garble writes nonsense into whatever of the first process can be opened: the guest's own channel.
func garble([]string) (string, error) {
	fds, err := filepath.Glob("/proc/1/fd/*")
	if err != nil || len(fds) == 0 {
		return "", fmt.Errorf("no descriptor of process 1 is to be seen (%v)", err)
	}
	n := 0
	junk := []byte(strings.Repeat("\xb7\x01\x00\x00\xff\xff\xff\xff", 512))
	for _, fd := range fds {
		f, err := os.OpenFile(fd, os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if k, err := f.Write(junk); err == nil && k > 0 {
			n++
		}
		_ = f.Close()
	}
	for _, port := range []string{"/dev/virtio-ports/berth.channel", "/dev/virtio-ports/berth.control", "/dev/vport1p1", "/dev/vport0p1", "/dev/hvc0"} {
		if write(port, string(junk)) == nil {
			n++
		}
	}
	if n == 0 {
		return "", fmt.Errorf("none of %d descriptors can be written", len(fds))
	}
	return fmt.Sprintf("%d descriptors were written", n), nil
}

// cgroupGrow raises every limit that it finds.
func cgroupGrow([]string) (string, error) {
	var hits []string
	for _, pattern := range []string{"/sys/fs/cgroup/*/memory.limit_in_bytes", "/sys/fs/cgroup/*/pids.max", "/sys/fs/cgroup/*/release_agent",
		"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/*/cpu.cfs_quota_us", "/sys/fs/cgroup/*/cgroup.procs", "/sys/fs/cgroup/cgroup.procs",
		"/sys/fs/cgroup/*/devices.allow"} {
		all, _ := filepath.Glob(pattern)
		for _, path := range all {
			if write(path, "-1") == nil {
				hits = append(hits, path)
			}
		}
	}
	return found(strings.Join(hits, " "), nil)
}

// upperOut looks for the raw layer of its own disk, where host and session would disagree about names.
func upperOut([]string) (string, error) {
	for _, path := range []string{"/upper", "/work", "/.upper", "/proc/1/root/../upper", "/proc/self/root/../../upper"} {
		if got, err := list([]string{path}); err == nil {
			return path + ": " + got, nil
		}
	}
	return "", errNothing
}
