package agent

import (
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Call is an exec as a Program sees it.
type Call struct {
	Argv, Env []string
	Dir       string
	Timeout   time.Duration // 0: none was asked for
}

// Program looks up what a call names and returns how to start it. The start is told the descriptors
// that become 0, 1 and 2, which stay the agent's, and returns a child of this process that leads a
// process group of its own. While it runs, no child but those of earlier execs is collected. An error of wire is told as it is.
type Program func(Call) (start func(files [3]uintptr) (pid int, err error), err error)

// program finds what an exec runs: a file of the sandbox, or what Options.Program makes of it.
func (a *Agent) program(req *wire.ExecStart, user *account, dir string) (string, func([3]uintptr) (int, error), error) {
	env := environment(user, req)
	argv := wire.Strings(req.Argv)
	if a.opts.Program == nil {
		path, err := lookPath(argv[0], dir, env)
		return path, func(files [3]uintptr) (int, error) {
			sys := &syscall.SysProcAttr{Setsid: true, Setctty: req.PTY != nil, Credential: user.credential()}
			if a.opts.Cgroup != nil {
				sys.UseCgroupFD, sys.CgroupFD = true, int(a.opts.Cgroup.Fd())
			}
			return syscall.ForkExec(path, argv, &syscall.ProcAttr{Dir: dir, Env: env, Files: files[:], Sys: sys})
		}, err
	}
	if req.PTY != nil {
		return "", nil, wire.Failf(wire.KindUnsupported, "exec %s: a WebAssembly sandbox has no terminals", req.Key)
	}
	start, err := a.opts.Program(Call{Argv: argv, Env: env, Dir: dir, Timeout: time.Duration(req.Timeout)})
	return argv[0], start, err
}

// soleUser refuses every user but the one that a sandbox without native programs has.
func soleUser(spec string) (*account, error) {
	switch spec {
	case "root", "0", "0:0", "root:root":
		return &account{name: "root", home: "/"}, nil
	}
	return nil, wire.Failf(wire.KindUnsupported, "user %q: a WebAssembly sandbox has no users but root", spec)
}

// timeLimit is the shorter of what was asked for and what is allowed at most; 0: none.
func (a *Agent) timeLimit(req *wire.ExecStart) time.Duration {
	limit := time.Duration(req.Timeout)
	if limit == 0 || a.opts.MaxTime > 0 && limit > a.opts.MaxTime {
		return a.opts.MaxTime
	}
	return limit
}
