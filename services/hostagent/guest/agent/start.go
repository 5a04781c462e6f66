package agent

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// execStart starts a process, or finds the one that the key started.
func (c *call) execStart() (any, error) {
	var req wire.ExecStart
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	x, existing, err := c.agent.startOnce(&req)
	if err != nil {
		return nil, err
	}
	if req.Detached {
		return x.info(existing), nil
	}
	return c.follow(x, req.From, existing)
}

// startOnce starts the exec of req unless its key was used before. Callers with
// the same key wait for the first of them.
func (a *Agent) startOnce(req *wire.ExecStart) (*execution, bool, error) {
	if err := checkStart(req); err != nil {
		return nil, false, err
	}
	digest := digestOf(req)
	key := string(req.Key)
	a.mu.Lock()
	if x := a.execs[key]; x != nil {
		a.mu.Unlock()
		<-x.started
		switch {
		case x.failed != nil:
			return nil, false, x.failed
		case x.digest != digest:
			return nil, false, wire.Failf(wire.KindConflict, "exec %s was started with another request", key)
		}
		return x, true, nil
	}
	x, err := a.admitLocked(key, digest)
	a.mu.Unlock()
	if err != nil {
		return nil, false, err
	}
	x.held = !req.Detached
	if x.failed = a.launch(x, req); x.failed != nil {
		a.mu.Lock()
		delete(a.execs, key)
		a.live--
		a.mu.Unlock()
	}
	close(x.started)
	return x, false, x.failed
}

// admitLocked makes the record of a new exec.
func (a *Agent) admitLocked(key string, digest [32]byte) (*execution, error) {
	switch {
	case a.quiesced:
		return nil, wire.Failf(wire.KindQuiesced, "no starts while the sandbox goes to sleep")
	case a.live >= MaxLiveExecs:
		return nil, wire.Failf(wire.KindTooMany, "%d execs are running", a.live)
	case a.ringUsed.Load() > RingCeiling:
		return nil, wire.Failf(wire.KindTooMany, "%d bytes of output wait for a reader", a.ringUsed.Load())
	}
	x := newExecution(a, key, digest)
	a.execs[key] = x
	a.live++
	return x, nil
}

// checkStart refuses what no process can be started with.
func checkStart(req *wire.ExecStart) error {
	if len(req.Key) == 0 || len(req.Key) > 200 {
		return wire.Failf(wire.KindInvalid, "exec key must have 1 to 200 bytes")
	}
	if len(req.Argv) == 0 || req.Argv[0] == "" {
		return wire.Failf(wire.KindInvalid, "exec %s: empty argv", req.Key)
	}
	for _, s := range append(append([]wire.Text{req.Cwd}, req.Argv...), req.Env...) {
		if strings.IndexByte(string(s), 0) >= 0 {
			return wire.Failf(wire.KindInvalid, "exec %s: zero byte in %q", req.Key, s)
		}
	}
	for _, s := range req.Env {
		if strings.IndexByte(string(s), '=') < 1 {
			return wire.Failf(wire.KindInvalid, "exec %s: %q is not NAME=value", req.Key, s)
		}
	}
	if req.Timeout < 0 {
		return wire.Failf(wire.KindInvalid, "exec %s: negative timeout", req.Key)
	}
	return nil
}

// digestOf covers what makes two starts the same; where to read from does not.
func digestOf(req *wire.ExecStart) [32]byte {
	var b []byte
	add := func(texts ...wire.Text) {
		b = binary.AppendUvarint(b, uint64(len(texts)))
		for _, t := range texts {
			b = binary.AppendUvarint(b, uint64(len(t)))
			b = append(b, t...)
		}
	}
	add(req.Argv...)
	add(req.Env...)
	add(req.Key, req.Cwd, req.User)
	var pty, stdin uint64
	if req.PTY != nil {
		pty = 1<<32 | uint64(req.PTY.Rows)<<16 | uint64(req.PTY.Cols)
	}
	if req.Stdin {
		stdin = 1
	}
	for _, n := range []uint64{pty, stdin, uint64(req.Timeout)} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	return sha256.Sum256(b)
}

// launch starts the process of x.
func (a *Agent) launch(x *execution, req *wire.ExecStart) error {
	user, err := a.user(string(req.User))
	if err != nil {
		return err
	}
	dir := user.home
	if req.Cwd != "" {
		dir = filepath.Join(user.home, string(req.Cwd))
		if filepath.IsAbs(string(req.Cwd)) {
			dir = string(req.Cwd)
		}
	} else if !isDir(dir) {
		dir = "/"
	}
	path, start, err := a.program(req, user, dir)
	if err != nil {
		return err
	}
	files, err := openStdio(x, req, user)
	if err != nil {
		return wire.Failf(wire.KindStartFailed, "exec %s: %v", x.key, err)
	}
	x.outs, x.stdin, x.pty, x.open = files.outs, files.stdin, files.pty, len(files.outs)
	_, err = a.reaper.spawn(func() (int, error) {
		pid, err := start(files.child)
		if err != nil {
			return 0, err
		}
		x.pid, x.startedAt = pid, time.Now()
		if limit := a.timeLimit(req); limit > 0 {
			x.timer = time.AfterFunc(limit, x.timeout)
		}
		return pid, nil
	}, x.exited)
	files.closeChild()
	if err != nil {
		files.closeAll()
		return startFailure(x.key, path, dir, err)
	}
	for _, o := range x.outs {
		go o.copy()
	}
	if files.stdin.file != nil {
		go files.stdin.feed()
	}
	return nil
}

// startFailure says which path it was: the kernel gives one error for both.
func startFailure(key, path, dir string, err error) error {
	f := wire.Failf(wire.KindStartFailed, "exec %s: start %s: %v", key, path, err)
	if !isDir(dir) {
		f = wire.Failf(wire.KindStartFailed, "exec %s: working directory %s: %v", key, dir, err)
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		f.Errno = int(errno)
	}
	return f
}

func isDir(path string) bool {
	var st unix.Stat_t
	return unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
}

// environment merges the defaults and the request; the last value of a name wins.
func environment(u *account, req *wire.ExecStart) []string {
	env := []string{"PATH=" + defaultPath, "HOME=" + u.home, "USER=" + u.name, "LOGNAME=" + u.name, "LANG=C.UTF-8"}
	if req.PTY != nil {
		env = append(env, "TERM=xterm-256color")
	}
	at := make(map[string]int, len(env)+len(req.Env))
	for i, s := range env {
		at[s[:strings.IndexByte(s, '=')]] = i
	}
	for _, t := range req.Env {
		s := string(t)
		name := s[:strings.IndexByte(s, '=')]
		if i, ok := at[name]; ok {
			env[i] = s
			continue
		}
		at[name] = len(env)
		env = append(env, s)
	}
	return env
}

// lookPath finds a program as a shell in dir would.
func lookPath(name, dir string, env []string) (string, error) {
	if strings.ContainsRune(name, '/') {
		return name, nil
	}
	path := ""
	for _, s := range env {
		if strings.HasPrefix(s, "PATH=") {
			path = s[len("PATH="):]
		}
	}
	for _, p := range filepath.SplitList(path) {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		p = filepath.Join(p, name)
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0 {
			return p, nil
		}
	}
	f := wire.Failf(wire.KindStartFailed, "%s: not found in PATH", name)
	f.Errno = int(unix.ENOENT)
	return "", f
}

// stdio is what a process gets as 0, 1 and 2, and the other ends of it.
type stdio struct {
	child [3]uintptr
	owned []int // descriptors of the child's side
	outs  []*output
	stdin *stdin
	pty   *os.File
}

func (s *stdio) closeChild() {
	for _, fd := range s.owned {
		_ = unix.Close(fd)
	}
	s.owned = nil
}

func (s *stdio) closeAll() {
	s.closeChild()
	for _, o := range s.outs {
		_ = o.file.Close()
	}
	if s.stdin != nil {
		s.stdin.close()
	}
}

// openStdio opens pipes, or a terminal. Everything is close-on-exec.
func openStdio(x *execution, req *wire.ExecStart, user *account) (*stdio, error) {
	s := &stdio{}
	if req.PTY != nil {
		return s, s.openPTY(x, *req.PTY, user)
	}
	fail := func(err error) (*stdio, error) {
		s.closeAll()
		return nil, err
	}
	var in *os.File
	if req.Stdin {
		r, w, err := pipe(false)
		if err != nil {
			return fail(err)
		}
		s.owned, s.child[0], in = append(s.owned, r), uintptr(r), os.NewFile(uintptr(w), "stdin")
	} else {
		fd, err := nullInput()
		if err != nil {
			return fail(err)
		}
		s.child[0] = fd
	}
	s.stdin = newStdin(in, false)
	for i, sub := range outputs {
		r, w, err := pipe(true)
		if err != nil {
			return fail(err)
		}
		s.owned, s.child[i+1] = append(s.owned, w), uintptr(w)
		s.outs = append(s.outs, newOutput(x, sub, os.NewFile(uintptr(r), "output"), false))
	}
	return s, nil
}

func newOutput(x *execution, sub wire.Sub, f *os.File, pty bool) *output {
	return &output{exec: x, sub: sub, file: f, pty: pty, drained: make(chan struct{})}
}

// nullInput is /dev/null, open as long as the agent lives.
var nullInput = sync.OnceValues(func() (uintptr, error) {
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open /dev/null: %w", err)
	}
	return uintptr(fd), nil
})

// pipe makes a pipe whose agent side does not block, while the child's does.
func pipe(agentReads bool) (r, w int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return 0, 0, fmt.Errorf("pipe: %w", err)
	}
	ours := p[1]
	if agentReads {
		ours = p[0]
	}
	flags := unix.O_NONBLOCK | unix.O_WRONLY
	if agentReads {
		flags = unix.O_NONBLOCK | unix.O_RDONLY
	}
	if _, err := unix.FcntlInt(uintptr(ours), unix.F_SETFL, flags); err != nil {
		_, _ = unix.Close(p[0]), unix.Close(p[1])
		return 0, 0, fmt.Errorf("pipe: %w", err)
	}
	return p[0], p[1], nil
}
