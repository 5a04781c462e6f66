//go:build linux

package wasm

import (
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// Bounds of one compilation for the host.
const (
	compileTime   = 2 * time.Minute
	compileMemory = 2 << 30
)

// Compile is the life of the process that compiles one module for the host: the module is its
// descriptor 4, a folder of that module's own is 5, a pipe for what went wrong is 2. Its root is that
// folder and stays so; it writes nowhere else.
func Compile() int {
	_ = unix.Close(order.CompilerProgram)
	r := &runner{static: static{Module: "the module", MemoryBytes: compileMemory}}
	r.files[2] = os.Stderr
	time.AfterFunc(compileTime, func() { r.end(order.ExitTime, "time limit: compiling took longer than "+compileTime.String()) })
	debug.SetMemoryLimit(compileMemory / 2)
	text, err := readModule()
	for _, step := range []func() error{
		func() error { return err },
		func() error { return jail.Keep(cacheFD) },
		func() error { return jail.Limit(64) },
		jail.DropPrivileges,
		jail.FilterCall,
	} {
		if err := step(); err != nil {
			r.end(order.ExitJail, err.Error())
		}
	}
	defer r.watchCompile()()
	p := &prepared{r: r}
	if err := p.compile(text); err != nil {
		r.end(order.ExitNotModule, err.Error())
	}
	_ = unix.Close(cacheFD)
	return 0
}
