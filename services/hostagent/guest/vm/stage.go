package vm

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// StageName is the name that the stage is started under.
const StageName = "berth-stage"

// Descriptors of the stage besides the three of every process.
const (
	stageSocket = 3 // to the supervisor: lines of JSON
	stageStdin  = 4 // of an image's own first process
	stageStdout = 5
)

const maxFiles = 65536

// order is what the supervisor tells the stage, once.
type order struct {
	Personalise vmwire.Personalise `json:"personalise"`
	Port        string             `json:"port"` // device of the channel; in a rehearsal none, but pipes
	// Look: only mount the image, and wait for the next order.
	Look bool `json:"look,omitempty"`
}

// report is the stage's answer: after it starts, and to its order.
type report struct {
	Reason vmwire.Reason `json:"reason,omitempty"` // empty: done
	Error  string        `json:"error,omitempty"`
	Steps  []vmwire.Step `json:"steps,omitempty"`
}

// failed is an error with its reason.
type failed struct {
	reason vmwire.Reason
	err    error
}

func (f *failed) Error() string { return f.err.Error() }
func (f *failed) Unwrap() error { return f.err }

func because(reason vmwire.Reason, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) {
		reason = vmwire.ReasonFull
	}
	return &failed{reason, err}
}

// reasonOf is the reason that err bears.
func reasonOf(err error) vmwire.Reason {
	if f := (*failed)(nil); errors.As(err, &f) {
		return f.reason
	}
	return vmwire.ReasonInternal
}

// Stage is PID 1 of the session's namespaces. It returns the exit code.
func Stage() int {
	s := &stage{socket: os.NewFile(stageSocket, "supervisor")}
	for fd := stageSocket; fd <= stageStdout; fd++ {
		unix.CloseOnExec(fd)
	}
	s.in = bufio.NewReaderSize(s.socket, 64<<10)
	if err := s.report(nil, s.prepare()); err != nil {
		return 1
	}
	var o order
	for o.Look = true; o.Look; {
		line, err := s.in.ReadBytes('\n')
		if err == nil {
			o = order{}
			err = json.Unmarshal(line, &o)
		}
		if err == nil && o.Look {
			err = s.report(nil, s.look())
		}
		if err != nil {
			return 1
		}
	}
	t := newTimer()
	ready, err := s.obey(&o, t)
	if err != nil {
		_ = s.report(t, err)
		return 1
	}
	return ready(func() error { return s.report(t, nil) })
}

type stage struct {
	socket *os.File
	in     *bufio.Reader
	trees  trees
	upper  *os.File   // the session's own layer
	cgroup *os.File   // of the session's processes
	mu     sync.Mutex // calls go one after the other
}

func (s *stage) report(t *timer, err error) error {
	var r report
	if t != nil {
		r.Steps = t.steps
	}
	if err != nil {
		r.Reason, r.Error = reasonOf(err), err.Error()
	}
	line, encErr := json.Marshal(r)
	if encErr != nil {
		return encErr
	}
	if _, writeErr := s.socket.Write(append(line, '\n')); writeErr != nil {
		return writeErr
	}
	return err
}

// obey makes the session's root and gives up what a session does not have. What it returns does not
// come back before the session's first process ends; it calls started when nothing can fail any more.
func (s *stage) obey(o *order, t *timer) (func(started func() error) int, error) {
	p := &o.Personalise
	var ch *channel
	if len(p.Init) == 0 {
		var err error
		if ch, err = openChannel(o.Port); err != nil {
			return nil, err
		}
	}
	name := p.Hostname
	if name == "" {
		name = "berth"
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return nil, fmt.Errorf("hostname: %w", err)
	}
	if err := s.enterRoot(p, t); err != nil {
		return nil, err
	}
	if err := s.limitFiles(p.Limits.OpenFiles); err != nil {
		return nil, err
	}
	if err := dropPrivileges(); err != nil {
		return nil, err
	}
	t.step("privileges")
	env := append([]string{basePath}, vmwire.Strings(p.Env)...)
	if ch != nil {
		return func(started func() error) int { return s.agent(ch, env, started) }, nil
	}
	argv := vmwire.Strings(p.Init)
	if err := unix.Access(argv[0], unix.X_OK); err != nil {
		return nil, because(vmwire.ReasonInit, fmt.Errorf("first process %s: %w", argv[0], err))
	}
	return func(started func() error) int { return s.execute(argv, env, started) }, nil
}

const basePath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func (s *stage) limitFiles(files uint64) error {
	if files == 0 {
		files = maxFiles
	}
	// Through package syscall, which then leaves the limit of children alone.
	if err := syscall.Setrlimit(unix.RLIMIT_NOFILE, &syscall.Rlimit{Cur: files, Max: files}); err != nil {
		return fmt.Errorf("limit open files: %w", err)
	}
	return syscall.Setrlimit(unix.RLIMIT_CORE, &syscall.Rlimit{})
}

// channel is what the agent speaks over.
type channel struct {
	in  io.Reader
	out io.Writer
}

// openChannel opens the port, or takes the two pipes if there is none.
func openChannel(device string) (*channel, error) {
	if device == "" {
		return &channel{in: os.NewFile(stageStdin, "in"), out: os.NewFile(stageStdout, "out")}, nil
	}
	p, err := openPort(device)
	if err != nil {
		return nil, err
	}
	return &channel{in: p, out: p}, errors.Join(unix.Close(stageStdin), unix.Close(stageStdout))
}

// agent is the guest agent from now on.
func (s *stage) agent(ch *channel, env []string, started func() error) int {
	os.Clearenv()
	for _, v := range env {
		for i := range v {
			if v[i] == '=' {
				_ = os.Setenv(v[:i], v[i+1:])
				break
			}
		}
	}
	// The session runs as the same user; what the agent holds is not for it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 1
	}
	if err := started(); err != nil {
		return 1
	}
	return agent.MainOn(ch.in, ch.out, agent.Options{Disk: s, Upper: s.upper, Cgroup: s.cgroup})
}

// execute becomes the image's own first process.
func (s *stage) execute(argv, env []string, started func() error) int {
	if err := errors.Join(unix.Dup3(stageStdin, 0, 0), unix.Dup3(stageStdout, 1, 0)); err != nil {
		return 1
	}
	if err := started(); err != nil {
		return 1
	}
	err := unix.Exec(argv[0], argv, env)
	fmt.Fprintf(os.Stderr, "berth: execute %s: %v\n", argv[0], err)
	return 127
}

// DiskCall hands an operation on the session's disk to the supervisor.
func (s *stage) DiskCall(call vmwire.Call) (vmwire.Done, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line, err := vmwire.Encode(vmwire.Message{Type: vmwire.TypeCall, Call: &call})
	if err != nil {
		return vmwire.Done{}, err
	}
	if _, err := s.socket.Write(line); err != nil {
		return vmwire.Done{}, fmt.Errorf("ask the supervisor: %w", err)
	}
	if line, err = s.in.ReadBytes('\n'); err != nil {
		return vmwire.Done{}, fmt.Errorf("ask the supervisor: %w", err)
	}
	m, err := vmwire.Decode(line)
	if err == nil && m.Done == nil {
		err = errors.New("the supervisor's answer is none")
	}
	if err != nil {
		return vmwire.Done{}, err
	}
	return *m.Done, nil
}
