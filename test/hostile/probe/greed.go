//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// greed takes as much of something as it can get, for the seconds given.
var greed = map[string]attempt{
	"fork-bomb":   forkBomb,
	"memory-hog":  memoryHog,
	"disk-fill":   diskFill,
	"dirty-flood": dirtyFlood,
	"fd-hog":      fdHog,
	"burn":        burn,
	"write-some":  writeSome,
	"inode-hog":   inodeHog,
	"thread-bomb": threadBomb,
	"idle":        func(a []string) (string, error) { time.Sleep(seconds(a)); return "", errNothing },
}

func seconds(a []string) time.Duration {
	if len(a) == 0 {
		return 3 * time.Second
	}
	s, _ := strconv.ParseFloat(a[0], 64)
	return time.Duration(s * float64(time.Second))
}

// forkBomb starts processes that start processes, until the time is over. They end by themselves: each is
// told the moment and not what is left of the time, because a child of an emulated machine starts seconds
// late, and a generation that counts anew lets the bomb go on for minutes.
func forkBomb(a []string) (string, error) {
	end := time.Now().Add(seconds(a))
	if len(a) > 1 {
		ns, err := strconv.ParseInt(a[1], 10, 64)
		if err != nil {
			return "", err
		}
		end = time.Unix(0, ns)
	}
	var refused error
	n := 0
	for time.Now().Before(end) {
		cmd := exec.Command("/proc/self/exe", "fork-bomb", "0", strconv.FormatInt(end.UnixNano(), 10))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			refused = err
			time.Sleep(5 * time.Millisecond)
			continue
		}
		n++
	}
	if refused == nil {
		return "", fmt.Errorf("%d processes in the time", n) // its children took the rest
	}
	return "", fmt.Errorf("after %d processes: %w", n, refused)
}

func threadBomb(a []string) (string, error) {
	var refused bool
	for range 40000 {
		cmd := exec.Command("/proc/self/exe", "idle", "5")
		if err := cmd.Start(); err != nil {
			refused = true
			break
		}
	}
	if refused {
		return "", errors.New("processes are limited")
	}
	return "40000 processes", nil
}

// memoryHog writes to memory until it is refused or ended.
func memoryHog(a []string) (string, error) {
	end := time.Now().Add(seconds(a))
	var all [][]byte
	for n := 0; time.Now().Before(end); n += 16 {
		b, err := unix.Mmap(-1, 0, 16<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			return "", fmt.Errorf("after %d MiB: %w", n, err)
		}
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		all = append(all, b)
		if n > 64<<10 {
			return fmt.Sprintf("%d MiB and no limit", n), nil
		}
	}
	runtime.KeepAlive(all)
	return "", fmt.Errorf("%d MiB in the time", len(all)*16)
}

func fill(dir string, end time.Time, syncing bool) (int, error) {
	b := make([]byte, 1<<20)
	for i := range b {
		b[i] = byte(i * 7)
	}
	for n := 0; ; {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("fill-%d", n)))
		if err != nil {
			return n, err
		}
		for range 64 {
			if _, err := f.Write(b); err != nil {
				return n, errors.Join(err, f.Close())
			}
			n++
			if time.Now().After(end) {
				return n, f.Close()
			}
		}
		if syncing {
			_ = f.Sync()
		}
		_ = f.Close()
	}
}

func diskFill(a []string) (string, error) {
	dir, err := os.MkdirTemp("/root", "fill")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	n, err := fill(dir, time.Now().Add(seconds(a)), true)
	if err != nil {
		return "", fmt.Errorf("after %d MiB: %w", n, err)
	}
	return "", fmt.Errorf("%d MiB in the time", n)
}

// dirtyFlood writes without ever syncing and removes again.
func dirtyFlood(a []string) (string, error) {
	end := time.Now().Add(seconds(a))
	n := 0
	for time.Now().Before(end) {
		dir, err := os.MkdirTemp("/root", "flood")
		if err != nil {
			return "", err
		}
		stop := time.Now().Add(500 * time.Millisecond)
		if stop.After(end) {
			stop = end
		}
		k, _ := fill(dir, stop, false)
		n += k
		_ = os.RemoveAll(dir)
	}
	return "", fmt.Errorf("%d MiB in the time", n)
}

func fdHog([]string) (string, error) {
	for n := 0; ; n++ {
		if n > 4<<20 {
			return "no limit on open files", nil
		}
		if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
			return "", fmt.Errorf("after %d files: %w", n, err)
		}
	}
}

func inodeHog(a []string) (string, error) {
	dir, err := os.MkdirTemp("/root", "inodes")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	end := time.Now().Add(seconds(a))
	for n := 0; ; n++ {
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(n)), nil, 0o600); err != nil {
			return "", fmt.Errorf("after %d files: %w", n, err)
		}
		if time.Now().After(end) {
			return "", fmt.Errorf("%d files in the time", n)
		}
	}
}

// burn counts on as many threads as it is told, and says how far it came.
func burn(a []string) (string, error) {
	threads := 1
	if len(a) > 1 {
		threads, _ = strconv.Atoi(a[1])
	}
	end := time.Now().Add(seconds(a))
	counts := make(chan int, threads)
	for range threads {
		go func() {
			n := 0
			for time.Now().Before(end) {
				for range 1000 {
					n++
				}
			}
			counts <- n
		}()
	}
	total := 0
	for range threads {
		total += <-counts
	}
	return strconv.Itoa(total), nil
}

// writeSome writes and syncs small files for the time, and says how many.
func writeSome(a []string) (string, error) {
	dir, err := os.MkdirTemp("/root", "some")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	b := make([]byte, 256<<10)
	n := 0
	for end := time.Now().Add(seconds(a)); time.Now().Before(end); n++ {
		f, err := os.Create(filepath.Join(dir, strconv.Itoa(n%8)))
		if err != nil {
			return "", err
		}
		_, err = f.Write(b)
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			return "", err
		}
	}
	return strconv.Itoa(n), nil
}
