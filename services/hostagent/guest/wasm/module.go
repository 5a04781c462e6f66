//go:build linux

package wasm

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"github.com/tetratelabs/wazero/sys"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/jail"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

// prepared is a compiled module in a process that has given up everything.
type prepared struct {
	r        *runner
	rt       wazero.Runtime
	compiled wazero.CompiledModule
}

// prepare compiles the module, or loads its machine code, with nothing but the folder of machine code
// in sight, and closes that folder before it takes the last privileges from the process.
func (r *runner) prepare() (*prepared, error) {
	text, err := readModule()
	if err != nil {
		return nil, err
	}
	stop := r.watchCompile()
	p := &prepared{r: r}
	err = inFolder(cacheFD, func() error { return p.compile(text) })
	stop()
	if err != nil {
		return nil, err
	}
	_ = unix.Close(cacheFD)
	if err := jail.DropPrivileges(); err != nil {
		return nil, err
	}
	if err := jail.FilterCall(); err != nil {
		return nil, err
	}
	debug.FreeOSMemory()
	r.memory = moduleMemory(r.static.MemoryBytes, uint64(len(text)))
	return p, nil
}

// readModule reads the module and closes its descriptor.
func readModule() ([]byte, error) {
	f := os.NewFile(moduleFD, "module")
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read module: %w", err)
	}
	text := make([]byte, min(st.Size(), MaxModule))
	n, err := f.ReadAt(text, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read module: %w", err)
	}
	return text[:n], f.Close()
}

// inFolder runs f while the root of the process is the folder fd.
func inFolder(fd int, f func() error) (err error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open root: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	if err := enterFolder(fd); err != nil {
		return fmt.Errorf("enter the folder of machine code: %w", err)
	}
	ferr := f()
	if err := enterFolder(root); err != nil {
		return fmt.Errorf("leave the folder of machine code: %w", err)
	}
	return ferr
}

func enterFolder(fd int) error {
	if err := unix.Fchdir(fd); err != nil {
		return err
	}
	return unix.Chroot(".")
}

// compile makes the runtime. A folder that cannot be written, or is full, costs time only.
func (p *prepared) compile(text []byte) error {
	cache, err := wazero.NewCompilationCacheWithDir("/")
	if err == nil {
		if err = p.compileWith(text, cache); err == nil {
			return nil
		}
		if !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EACCES) {
			return p.refuse(err)
		}
	}
	if err := p.compileWith(text, nil); err != nil {
		return p.refuse(err)
	}
	return nil
}

func (p *prepared) compileWith(text []byte, cache wazero.CompilationCache) error {
	cfg := wazero.NewRuntimeConfigCompiler().WithCloseOnContextDone(true).WithDebugInfoEnabled(false)
	ctx := experimental.WithCompilationWorkers(context.Background(), 2)
	if cache != nil {
		cfg = cfg.WithCompilationCache(cache)
	}
	p.rt = wazero.NewRuntimeWithConfig(ctx, cfg)
	if _, err := wasi_snapshot_preview1.Instantiate(ctx, p.rt); err != nil {
		return err
	}
	if p.r.static.JS {
		if err := p.provideOrder(ctx); err != nil {
			return err
		}
	}
	var err error
	p.compiled, err = p.rt.CompileModule(ctx, text)
	return err
}

func (p *prepared) refuse(err error) error {
	if strings.Contains(err.Error(), "over limit") {
		return ending{order.ExitMemory, fmt.Sprintf("memory limit: %s: %v", p.r.static.Module, err)}
	}
	return ending{order.ExitNotModule, fmt.Sprintf("not a module: %s: %v", p.r.static.Module, err)}
}

// provideOrder gives the JavaScript tool its arguments late: it starts, makes its world and then asks
// what to run. The answer's length is returned; it is written if the room suffices.
func (p *prepared) provideOrder(ctx context.Context) error {
	_, err := p.rt.NewHostModuleBuilder("berth").NewFunctionBuilder().
		WithFunc(func(_ context.Context, m api.Module, at, room uint32) uint32 {
			if !p.r.asked {
				if p.r.await(0) != nil {
					p.r.end(order.ExitJail, "")
				}
			}
			b, err := json.Marshal(p.r.call)
			if err != nil || uint64(len(b)) > uint64(room) {
				return uint32(len(b))
			}
			if !m.Memory().Write(at, b) {
				return 0
			}
			return uint32(len(b))
		}).Export("order").Instantiate(ctx)
	return err
}

// run runs the module and returns the exit code of the process.
func (p *prepared) run() int {
	r := p.r
	ctx := experimental.WithMemoryAllocator(context.Background(), r)
	cfg := wazero.NewModuleConfig().WithName("").WithStartFunctions().WithArgs(r.call.Args...).
		WithStdin(input{r}).WithStdout(output{r, 1}).WithStderr(output{r, 2}).
		WithFSConfig(wazero.NewFSConfig().WithDirMount("/", "/")).
		WithRandSource(rand.Reader).WithSysNanotime().WithSysWalltime().WithSysNanosleep()
	for _, e := range r.call.Env {
		if name, value, ok := strings.Cut(e, "="); ok {
			cfg = cfg.WithEnv(name, value)
		}
	}
	for _, m := range p.compiled.ExportedMemories() {
		if need := uint64(m.Min()) << 16; need > r.memory {
			return r.fail(order.ExitMemory, fmt.Errorf("memory limit: %s needs %d bytes to begin with and may have %d", r.static.Module, need, r.memory))
		}
	}
	mod, err := p.rt.InstantiateModule(ctx, p.compiled, cfg)
	if err != nil {
		return r.judge(err, order.ExitNotModule, "not a module that runs here")
	}
	start := mod.ExportedFunction("_start")
	if start == nil {
		return r.fail(order.ExitNotModule, fmt.Errorf("not a module that runs here: %s has no function _start", r.static.Module))
	}
	if _, err = start.Call(ctx); err == nil {
		return r.finish(0)
	}
	return r.judge(err, order.ExitTrap, "trap")
}

// judge says how a module ended that did not return.
func (r *runner) judge(err error, code int, word string) int {
	var e *sys.ExitError
	if errors.As(err, &e) {
		if e.ExitCode() > 255 {
			return r.fail(order.ExitTooBig, fmt.Errorf("exit code: the module ended with %d, of which a process can tell the last 8 bits alone", e.ExitCode()))
		}
		return r.finish(int(e.ExitCode()))
	}
	text, _, _ := strings.Cut(err.Error(), "\n")
	if strings.Contains(err.Error(), "wasm error:") || strings.Contains(err.Error(), "(recovered by wazero)") {
		code, word = order.ExitTrap, "trap"
	}
	if r.denied.Load() {
		return r.fail(order.ExitMemory, fmt.Errorf("memory limit: the module asked for more than %d bytes, and then: %s", r.memory, text))
	}
	return r.fail(code, fmt.Errorf("%s: %s", word, text))
}

// finish passes the module's own exit code on. One that fails after it was refused memory has run out
// of it, whatever number it gives that.
func (r *runner) finish(code int) int {
	if code != 0 && r.denied.Load() {
		return r.fail(order.ExitMemory, fmt.Errorf("memory limit: the module asked for more than %d bytes, and ended with code %d", r.memory, code))
	}
	if !r.ended.CompareAndSwap(false, true) {
		select {}
	}
	return code
}
