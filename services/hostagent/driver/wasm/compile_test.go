package wasm

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// TestFaultACompilationHoldsNoDisk: the process that compiles for the host has one mount, that of its
// folder. Copies of the host's own would keep every disk busy that sleeps meanwhile, for minutes.
func TestFaultACompilationHoldsNoDisk(t *testing.T) {
	h := newHost(t, false)
	h.cfg.Cache = t.TempDir()
	d := openDriver(t, h)
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(bin, "js.wasm") // takes seconds to compile
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
	if err := <-done; err != nil {
		t.Errorf("compile: %v", err)
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
