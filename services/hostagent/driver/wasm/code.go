package wasm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
)

const (
	maxImageModules = 64
	maxModule       = 64 << 20
	compilePatience = 3 * time.Minute
	compileAgain    = time.Minute // after a compilation that failed
	unusedTime      = 7 * 24 * time.Hour
	doneFile        = "done" // in a folder of machine code that is whole
)

// code is the machine code of modules that the host compiled: one folder for each, named by the
// module's SHA-256, below one that is named by what compiled it. A process that compiles sees the one
// module and the one new folder, which gets its name when the process has ended well: no module, not
// even one that takes over its own compilation, writes the code of another.
type code struct {
	dir, program string
	users        func() (uint32, func(), error) // an id of the host that nobody else has, and how to give it back
	log          *slog.Logger
	ctx          context.Context
	cancel       context.CancelFunc
	tasks        sync.WaitGroup

	mu    sync.Mutex
	files map[stamp]order.Compiled // hashes of files that were read
	work  map[string]*task
}

// stamp tells one content of a file from another.
type stamp struct {
	path  string
	ino   uint64
	size  int64
	mtime unix.Timespec
}

// task is one compilation.
type task struct {
	done   chan struct{}
	err    error
	failed time.Time // guarded by code.mu
}

func openCode(cfg Config, users func() (uint32, func(), error), log *slog.Logger) (*code, error) {
	version, err := compilerVersion(cfg.Program)
	if err != nil {
		return nil, err
	}
	c := &code{dir: filepath.Join(cfg.Cache, version), program: cfg.Program, users: users, log: log, files: map[stamp]order.Compiled{}, work: map[string]*task{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	c.prune(cfg.Cache)
	return c, nil
}

// prune removes what earlier versions of the compiler made and nobody has opened for a week.
func (c *code) prune(cache string) {
	now := time.Now()
	_ = os.Chtimes(c.dir, now, now)
	entries, _ := os.ReadDir(cache)
	for _, e := range entries {
		if st, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), "wazero") && now.Sub(st.ModTime()) > unusedTime {
			_ = os.RemoveAll(filepath.Join(cache, e.Name()))
		}
	}
}

// compilerVersion names what makes machine code: wazero as it was built into the program.
func compilerVersion(program string) (string, error) {
	f, err := os.Open(program)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	version := "wazero"
	if info, ok := debug.ReadBuildInfo(); ok {
		i := slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return strings.HasSuffix(m.Path, "/wazero") })
		if i >= 0 {
			version += "-" + info.Deps[i].Version
		}
	}
	return version + "-" + hex.EncodeToString(h.Sum(nil)[:8]), nil
}

func (c *code) folder(hash string) string { return filepath.Join(c.dir, hash) }

func (c *code) close() {
	c.cancel()
	c.tasks.Wait()
}

// imageModules are the modules of an image that are found by name. Links are not followed: an image
// is not to choose files of the host.
func imageModules(lower string) []string {
	dir := lower
	for _, part := range strings.Split(strings.Trim(order.Modules, "/"), "/") {
		dir = filepath.Join(dir, part)
		if st, err := os.Lstat(dir); err != nil || !st.IsDir() {
			return nil
		}
	}
	entries, _ := os.ReadDir(dir)
	var out []string
	for _, e := range entries {
		if e.Type().IsRegular() && strings.HasSuffix(e.Name(), ".wasm") && len(out) < maxImageModules {
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	return out
}

// hash reads a module file, once for each content.
func (c *code) hash(path string) (order.Compiled, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return order.Compiled{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	key := stamp{path, st.Ino, st.Size, st.Mtim}
	c.mu.Lock()
	known, ok := c.files[key]
	c.mu.Unlock()
	if ok {
		return known, nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxModule {
		return order.Compiled{}, fmt.Errorf("%s is no file of at most %d bytes", filepath.Base(path), maxModule)
	}
	f, err := os.Open(path)
	if err != nil {
		return order.Compiled{}, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return order.Compiled{}, err
	}
	known = order.Compiled{Hash: hex.EncodeToString(h.Sum(nil)), Size: n}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.files[key] = known
	return known, nil
}

// ready returns those of the modules whose machine code is there.
func (c *code) ready(paths []string) []order.Compiled {
	var out []order.Compiled
	for _, p := range paths {
		m, err := c.hash(p)
		if err == nil && c.isDone(m.Hash) && !slices.Contains(out, m) {
			out = append(out, m)
		}
	}
	return out
}

func (c *code) isDone(hash string) bool {
	_, err := os.Lstat(filepath.Join(c.folder(hash), doneFile))
	return err == nil
}

// want begins to compile a module unless that was done, is being done or has just failed.
func (c *code) want(path string) { _, _ = c.begin(path) }

// wait compiles a module and returns when it is done.
func (c *code) wait(ctx context.Context, path string) error {
	t, err := c.begin(path)
	if err != nil || t == nil {
		return err
	}
	select {
	case <-t.done:
		return t.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *code) begin(path string) (*task, error) {
	m, err := c.hash(path)
	if err != nil || c.isDone(m.Hash) {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.work[m.Hash]; t != nil && (t.failed.IsZero() || time.Since(t.failed) < compileAgain) {
		return t, nil
	}
	t := &task{done: make(chan struct{})}
	c.work[m.Hash] = t
	c.tasks.Go(func() {
		defer close(t.done)
		if t.err = c.compile(path, m.Hash); t.err != nil && c.ctx.Err() == nil {
			c.log.Warn("a module was not compiled ahead", "module", filepath.Base(path), "err", t.err)
			c.mu.Lock()
			t.failed = time.Now()
			c.mu.Unlock()
		}
	})
	return t, nil
}

// compile runs one compilation in a process that has nothing but the module and a new folder.
func (c *code) compile(path, hash string) error {
	module, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = module.Close() }()
	made, err := os.MkdirTemp(c.dir, ".new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(made) }()
	if err := c.compileInto(made, module); err != nil {
		return err
	}
	// What the file was when it was compiled counts, not what it was when it was named.
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(module, 0, maxModule)); err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != hash {
		return errors.New("the module changed while it was compiled")
	}
	return c.publish(made, hash)
}

func (c *code) compileInto(made string, module *os.File) error {
	user, giveBack, err := c.users()
	if err != nil {
		return err
	}
	defer giveBack()
	if err := os.Chown(made, int(user), int(user)); err != nil {
		return err
	}
	dir, err := copyMount(made, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, nil)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	program, err := os.Open(c.program)
	if err != nil {
		return err
	}
	defer func() { _ = program.Close() }()
	ctx, cancel := context.WithTimeout(c.ctx, compilePatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, byDescriptor(order.CompilerProgram))
	var said bytes.Buffer
	own := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(user), Size: 1}}
	cmd.Args, cmd.Env, cmd.Dir, cmd.Stderr = []string{order.Compiler}, []string{}, "/", &said
	cmd.ExtraFiles = []*os.File{module, module, dir, program} // 3 is a socket elsewhere
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: unix.SIGKILL,
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		// A user of its own owns the new folder and nothing else.
		UidMappings: own, GidMappings: own, Credential: &syscall.Credential{NoSetGroups: true},
	}
	runtime.LockOSThread() // the signal of Pdeathsig comes when the thread ends that started the process
	defer runtime.UnlockOSThread()
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile: %w: %s", err, strings.TrimSpace(strings.ToValidUTF8(said.String(), "?")))
	}
	return nil
}

// publish opens the new folder to readers and gives it its name.
func (c *code) publish(made, hash string) error {
	err := filepath.WalkDir(made, func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			err = os.Lchown(path, 0, 0)
		}
		switch {
		case err != nil:
			return err
		case e.IsDir():
			return os.Chmod(path, 0o755)
		case e.Type().IsRegular():
			return os.Chmod(path, 0o644)
		}
		return fmt.Errorf("%s is neither file nor folder", e.Name())
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(made, doneFile), nil, 0o644); err != nil {
		return err
	}
	err = os.Rename(made, c.folder(hash))
	if err != nil && c.isDone(hash) {
		return nil // another driver was first
	}
	return err
}
