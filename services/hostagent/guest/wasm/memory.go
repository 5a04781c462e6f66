//go:build linux

package wasm

import (
	"fmt"
	"runtime/metrics"
	"time"

	"github.com/tetratelabs/wazero/experimental"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

const (
	// overhead is the memory of the supervisor and of a process that runs a small module.
	overhead = 40 << 20
	// codeFactor: a module's text, what is known of it and its machine code together.
	codeFactor = 6
	minMemory  = 4 << 20
	watchEvery = 10 * time.Millisecond
)

// moduleMemory is what a module may take of the sandbox's memory; the cgroup stands behind it.
func moduleMemory(limit, text uint64) uint64 {
	used := overhead + codeFactor*text
	if limit < used+minMemory {
		return minMemory
	}
	return (limit - used) &^ 0xffff
}

// watchCompile ends the call when compiling its module takes too much memory, with a reason where
// the kernel would give none. Before the call has come there is nobody to tell.
func (r *runner) watchCompile() (stop func()) {
	done := make(chan struct{})
	limit := r.static.MemoryBytes - min(r.static.MemoryBytes/2, overhead)
	go func() {
		t := time.NewTicker(watchEvery)
		defer t.Stop()
		sample := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		for {
			select {
			case <-done:
				return
			case <-t.C:
			}
			metrics.Read(sample)
			if used := sample[0].Value.Uint64() - sample[1].Value.Uint64(); used > limit {
				r.end(order.ExitMemory, fmt.Sprintf("memory limit: compiling %s takes more than %d bytes", r.static.Module, limit))
			}
		}
	}()
	return func() { close(done) }
}

// Allocate implements experimental.MemoryAllocator: the address space of the whole limit at once, of
// which the kernel gives what is used. Growing copies nothing.
func (r *runner) Allocate(_, most uint64) experimental.LinearMemory {
	size := max(min(most, r.memory), 1<<16)
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		r.end(order.ExitMemory, fmt.Sprintf("memory limit: no %d bytes of address space: %v", size, err))
	}
	return &linear{r: r, b: b}
}

type linear struct {
	r    *runner
	b    []byte
	used bool
}

// Reallocate implements experimental.LinearMemory.
func (l *linear) Reallocate(size uint64) []byte {
	if size > uint64(len(l.b)) {
		l.r.denied.Store(true)
		if !l.used {
			l.r.end(order.ExitMemory, fmt.Sprintf("memory limit: the module needs %d bytes to begin with and may have %d", size, l.r.memory))
		}
		return nil
	}
	l.used = true
	return l.b[:size:len(l.b)]
}

// Free implements experimental.LinearMemory.
func (l *linear) Free() {
	if l.b != nil {
		_ = unix.Munmap(l.b)
		l.b = nil
	}
}
