package mounts

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Holders lists the processes that have a mount at point in their mount table, one per table.
func Holders(point string) []int {
	files, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
	tables := map[string]bool{}
	var out []int
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil || !strings.Contains(string(b), " "+point+" ") {
			continue
		}
		dir := filepath.Dir(f)
		table, err := os.Readlink(dir + "/ns/mnt")
		if pid, perr := strconv.Atoi(filepath.Base(dir)); err == nil && perr == nil && !tables[table] {
			tables[table] = true
			out = append(out, pid)
		}
	}
	return out
}

// Reclaim unmounts point in the mount tables of other processes that copied it as private, where our
// own unmount does not arrive. It is for mounts that are ours alone, after our own unmount. What
// cannot be unmounted stays; Holders tells.
func Reclaim(point string) {
	for _, pid := range Holders(point) {
		Elsewhere(func() { unmountIn(pid, point) })
	}
}

// Elsewhere runs f on a thread of its own, which ends with it: f may leave the mounts, folders and names
// of this process for others.
func Elsewhere(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		onLostThread(f)
	}()
	<-done
}

// onLostThread runs f on a thread that ends with it. The first thread of a process never ends, and
// its mount table is what /proc/self tells to everybody: f runs on another one.
func onLostThread(f func()) {
	runtime.LockOSThread() // and never unlocked, but for the first thread
	if unix.Gettid() != unix.Getpid() {
		f()
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		onLostThread(f)
	}()
	<-done
	runtime.UnlockOSThread()
}

func unmountIn(pid int, point string) {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if unix.Unshare(unix.CLONE_FS) != nil || unix.Setns(fd, unix.CLONE_NEWNS) != nil {
		return
	}
	_ = unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
}
