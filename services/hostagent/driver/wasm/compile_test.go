package wasm

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// TestFaultACompilationHoldsNoDisk: the process that compiles for the host has one mount, that of its
// folder. Copies of the host's own would keep every disk busy that sleeps meanwhile, for minutes; also
// copies that are in no list of mounts any more, but still hang on a file system that is in use.
func TestFaultACompilationHoldsNoDisk(t *testing.T) {
	h := newHost(t, false)
	h.cfg.Cache = t.TempDir()
	d := openDriver(t, h)
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(bin, "js.wasm") // takes seconds to compile
	asleep := aDisk(t)
	done := make(chan error, 1)
	go func() { done <- d.code.wait(t.Context(), path) }()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		select {
		case err := <-done:
			t.Fatalf("it ended before it had left the host's mounts: %v", err)
		default:
		}
		if n := compilerMounts(); n == 1 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("the compiler has %d mounts", n)
		}
	}
	asleep(func() bool { return compilerMounts() > 0 })
	if compilerMounts() == 0 {
		t.Error("the compiler ended before the disk was free: this shows nothing")
	}
	if err := <-done; err != nil {
		t.Errorf("compile: %v", err)
	}
}

// TestFaultASandboxHoldsNoDisk: a disk that was mounted when a sandbox began sleeps while it lives.
func TestFaultASandboxHoldsNoDisk(t *testing.T) {
	h := newHost(t, false)
	d := openDriver(t, h)
	asleep := aDisk(t)
	b := h.open(t, d, 1)
	asleep(func() bool { return unix.Kill(b.sb.PID, 0) == nil })
}

// aDisk mounts a disk; the returned function unmounts it and fails unless it is free while lives says
// that what could hold it is there.
func aDisk(t *testing.T) (sleep func(lives func() bool)) {
	t.Helper()
	image, point := filepath.Join(t.TempDir(), "disk.img"), t.TempDir()
	for _, c := range [][]string{{"truncate", "-s", "16M", image}, {"mkfs.ext4", "-q", "-b", "4096", image}} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", c[0], err, out)
		}
	}
	dev, err := loopdev.Attach(image, false)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.Mount(dev.Name(), point, "ext4", 0, "")
	_ = dev.Close()
	if err != nil {
		t.Fatal(err)
	}
	unmount := sync.OnceFunc(func() {
		if err := unix.Unmount(point, 0); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(unmount)
	return func(lives func() bool) {
		t.Helper()
		unmount()
		// Other processes that just start hold it too, for longer on a busy machine.
		for end := time.Now().Add(30 * time.Second); ; {
			err := loopdev.WaitFree(image, 50*time.Millisecond)
			if err == nil {
				return
			}
			if !lives() || time.Now().After(end) {
				t.Error(err)
				return
			}
		}
	}
}

// compilerMounts counts the mounts of a compiler that this process started; 0: there is none.
func compilerMounts() int {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range all {
		b, _ := os.ReadFile(p)
		if !bytes.HasPrefix(b, []byte(order.Compiler)) || !isChild(p) {
			continue
		}
		mounts, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "mountinfo"))
		return bytes.Count(mounts, []byte("\n"))
	}
	return 0
}
