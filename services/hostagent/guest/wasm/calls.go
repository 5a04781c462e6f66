//go:build linux

package wasm

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/wasm/order"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// MaxModule is the size of the largest module that is run, in bytes.
const MaxModule = 64 << 20

// killGrace is what a call gets after its time to say so itself.
const killGrace = 5 * time.Second

func (s *supervisor) maxTime() time.Duration {
	if s.order.Limits.Time == 0 {
		return 0
	}
	return s.order.Limits.Time + killGrace
}

// program finds the module that a call names. It implements agent.Program.
func (s *supervisor) program(c agent.Call) (func([3]uintptr) (int, error), error) {
	told := call{Args: c.Argv, Env: c.Env, Dir: c.Dir}
	if c.Dir != "/" { // without the word a module begins in /
		told.Env = append(told.Env, "PWD="+c.Dir)
	}
	if c.Argv[0] == order.JS && s.js != nil {
		return func(files [3]uintptr) (int, error) { return s.startJS(told, files) }, nil
	}
	path, err := find(c)
	if err != nil {
		return nil, err
	}
	module, err := openModule(path)
	if err != nil {
		return nil, err
	}
	return func(files [3]uintptr) (int, error) {
		defer func() { _ = module.Close() }()
		w, err := s.spawn(filepath.Base(path), module, s.cacheOf(module), false)
		if err != nil {
			return 0, err
		}
		return w.hand(told, files)
	}, nil
}

// find returns the path of the module: a path itself, a name in the template's folder of modules, or
// NAME.wasm in the PATH of the call.
func find(c agent.Call) (string, error) {
	name := c.Argv[0]
	if strings.ContainsRune(name, '/') {
		if filepath.IsAbs(name) {
			return name, nil
		}
		return c.Dir + "/" + name, nil
	}
	dirs := []string{order.Modules}
	for _, e := range c.Env {
		if list, ok := strings.CutPrefix(e, "PATH="); ok {
			dirs = append(dirs, filepath.SplitList(list)...)
		}
	}
	for _, dir := range dirs {
		for _, file := range []string{name + ".wasm", name} {
			if !filepath.IsAbs(dir) || !strings.HasSuffix(file, ".wasm") {
				continue
			}
			var st unix.Stat_t
			if p := filepath.Join(dir, file); unix.Stat(p, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
				return p, nil
			}
		}
	}
	return "", startFailed(unix.ENOENT, "%s: there is no such module in %s or PATH, and native programs do not run here", name, order.Modules)
}

func startFailed(errno unix.Errno, format string, args ...any) error {
	f := wire.Failf(wire.KindStartFailed, format, args...)
	f.Errno = int(errno)
	return f
}

// openModule opens a regular file without ever waiting.
func openModule(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, startFailed(err.(unix.Errno), "%s: %v", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	st, err := f.Stat()
	switch {
	case err != nil:
		err = startFailed(unix.EIO, "%s: %v", path, err)
	case !st.Mode().IsRegular():
		err = startFailed(unix.EACCES, "%s is no regular file", path)
	case st.Size() > MaxModule:
		err = startFailed(unix.E2BIG, "%s has %d bytes; a module may have %d", path, st.Size(), MaxModule)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// cacheOf is the folder with the module's machine code if the host has compiled it, else the folder
// of the session's own.
func (s *supervisor) cacheOf(module *os.File) *os.File {
	st, err := module.Stat()
	if err != nil || !s.sizes[st.Size()] {
		return s.own
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(module, 0, st.Size())); err != nil {
		return s.own
	}
	if dir := s.cached[hex.EncodeToString(h.Sum(nil))]; dir != nil {
		return dir
	}
	return s.own
}

// waiting is a process that has its module compiled, or does so now, and waits for its one call.
type waiting struct {
	pid  int
	sock *os.File
}

// hand gives a waiting process its call; it fails if the process has ended before it was asked.
func (w waiting) hand(c call, files [3]uintptr) (int, error) {
	defer func() { _ = w.sock.Close() }()
	if err := sendCall(int(w.sock.Fd()), c, files); err != nil {
		_ = unix.Kill(w.pid, unix.SIGKILL)
		return 0, err
	}
	return w.pid, nil
}

// namespaces of every call.
const namespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

// spawn starts the process of a call. Its user namespace maps nobody: the capabilities that it has
// there while it goes to the folder of machine code and back reach nothing but that.
func (s *supervisor) spawn(name string, module, cache *os.File, js bool) (waiting, error) {
	l := s.order.Limits
	arg, err := json.Marshal(static{
		Module: name, JS: js, MemoryBytes: l.MemoryBytes, OutputBytes: l.OutputBytes, OpenFiles: l.OpenFiles, Millis: l.Time.Milliseconds(),
	})
	if err != nil {
		return waiting{}, fmt.Errorf("encode: %w", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return waiting{}, fmt.Errorf("make socket: %w", err)
	}
	defer func() { _ = unix.Close(pair[1]) }()
	sock := os.NewFile(uintptr(pair[0]), "call")
	null := s.null.Fd()
	pid, err := syscall.ForkExec(order.Binary, []string{order.Runner, string(arg)}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOGC=50"},
		Files: []uintptr{null, null, null, uintptr(pair[1]), module.Fd(), cache.Fd()},
		Sys: &syscall.SysProcAttr{
			Setsid: true, Cloneflags: namespaces, AmbientCaps: []uintptr{unix.CAP_SYS_CHROOT, unix.CAP_SETPCAP},
		},
	})
	if err != nil {
		_ = sock.Close()
		return waiting{}, err
	}
	return waiting{pid: pid, sock: sock}, nil
}
