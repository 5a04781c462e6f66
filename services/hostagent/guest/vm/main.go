package vm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// InitName is the name that the kernel starts the first process of an initramfs under.
const InitName = "/init"

const (
	offPatience  = 5 * time.Second // for the end of processes, and for the unmounting
	tellPatience = time.Second     // for a host that is away to hear of the end
)

// supervisor is PID 1 of the machine.
type supervisor struct {
	kmsg  io.Writer
	steps []vmwire.Step
	ctl   *control
	port  string // device of the channel

	stage       *exec.Cmd
	stageSocket *os.File
	stageIn     *bufio.Reader
	stdin       *os.File // of an image's own first process
	stdout      *os.File
	ending      atomic.Bool   // the supervisor ends the stage itself
	ended       chan struct{} // closed when the stage was reaped
	code        int

	disk *disk
	work sync.Mutex // to be personalised, or to rehearse that
	off  sync.Once
}

// Main runs the machine. It returns only if the machine cannot start, whereupon the kernel panics.
func Main() int {
	t := newTimer()
	s := &supervisor{kmsg: io.Discard, ended: make(chan struct{})}
	if err := s.start(t); err != nil {
		s.log("cannot start: %v", err)
		s.powerOff(0)
		return 1
	}
	go func() {
		<-s.ended
		if s.ending.Load() {
			return // whoever ended it goes on
		}
		s.log("the first process ended with %d", s.code)
		s.ctl.tell(vmwire.Event{Kind: vmwire.EventExited, Code: s.code})
		select {
		case <-s.ctl.said:
		case <-time.After(tellPatience):
		}
		s.powerOff(offPatience)
	}()
	s.ctl.send(vmwire.Message{Type: vmwire.TypeReady, Ready: s.ctl.ready("")})
	err := s.ctl.serve()
	s.log("%v", err)
	s.powerOff(offPatience)
	return 1
}

func (s *supervisor) start(t *timer) error {
	if err := boot(t); err != nil {
		return err
	}
	if f, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0); err == nil {
		s.kmsg = f
	}
	if err := os.WriteFile(runDir+"/guest", nil, 0o555); err != nil {
		return err
	}
	dev, err := findPort(vmwire.Control)
	if err != nil {
		return err
	}
	s.ctl = &control{sup: s, calls: make(chan struct{}, maxCalls), news: make(chan vmwire.Event, 64), said: make(chan struct{})}
	go s.ctl.sayNews()
	if s.ctl.port, err = openPort(dev); err != nil {
		return err
	}
	if s.port, err = findPort(vmwire.Channel); err != nil {
		return err
	}
	if dev := portDevice(vmwire.Events); dev != "" {
		if s.ctl.record, err = openPort(dev); err != nil {
			return err
		}
	}
	t.step("ports")
	if err := s.startStage(); err != nil {
		return err
	}
	t.step("stage")
	s.steps = t.steps
	return nil
}

// startStage starts the process that becomes the session's first, in namespaces and a cgroup of its
// own, and waits until it has prepared what it can.
func (s *supervisor) startStage() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	s.stageSocket = os.NewFile(uintptr(pair[0]), "stage")
	s.stageIn = bufio.NewReaderSize(s.stageSocket, 64<<10)
	theirs := os.NewFile(uintptr(pair[1]), "supervisor")
	stdin, ours, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	s.stdin = ours
	ours, stdout, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	s.stdout = ours
	// The box has no process of its own once it is divided.
	first, dir := s.port != "", boxCgroup
	if !first {
		dir = agentCgroup
	}
	box, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("stage: %w", err)
	}
	defer func() { _ = box.Close() }()
	s.stage = &exec.Cmd{
		Path: InitName, Args: []string{StageName}, Env: []string{}, Dir: "/", Stderr: os.Stderr,
		ExtraFiles: []*os.File{theirs, stdin, stdout},
		SysProcAttr: &syscall.SysProcAttr{
			Setsid: true, UseCgroupFD: true, CgroupFD: int(box.Fd()),
			Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP,
		},
	}
	if err := s.stage.Start(); err != nil {
		return fmt.Errorf("start the stage: %w", err)
	}
	for _, f := range []*os.File{theirs, stdin, stdout} {
		_ = f.Close()
	}
	go func() {
		_ = s.stage.Wait()
		if st, ok := s.stage.ProcessState.Sys().(syscall.WaitStatus); ok {
			if s.code = st.ExitStatus(); st.Signaled() {
				s.code = 128 + int(st.Signal())
			}
		}
		close(s.ended)
	}()
	if first {
		if err := divideBox(s.stage.Process.Pid); err != nil {
			return err
		}
	}
	_, err = s.report()
	return err
}

// personalise makes the machine somebody's, once.
func (s *supervisor) personalise(p *vmwire.Personalise) *vmwire.Answer {
	s.work.Lock()
	defer s.work.Unlock()
	t := newTimer()
	answer := &vmwire.Answer{}
	err := s.become(p, t, answer)
	if answer.Steps = t.steps; err != nil {
		answer.Reason, answer.Error = reasonOf(err), err.Error()
		return answer
	}
	answer.OK = true
	return answer
}

func (s *supervisor) become(p *vmwire.Personalise, t *timer, answer *vmwire.Answer) (err error) {
	if err := setClock(p.Time); err != nil {
		return because(vmwire.ReasonInvalid, err)
	}
	if err := reseed(p.Seed); err != nil {
		return err
	}
	t.last = time.Now() // the clock jumped
	if err := writeFiles(p.Files); err != nil {
		return err
	}
	// /tmp takes a part of the memory that is really there: one that is larger fills the VM before it is full.
	if p.Limits.Memory, answer.Enforced, err = limit(p.Limits); err != nil {
		return err
	}
	t.step("identity")
	if p.Network != nil {
		if err := network(p.Network); err != nil {
			return because(vmwire.ReasonNetwork, err)
		}
		t.step("network")
	}
	if p.Disk != nil {
		if s.disk, answer.Repaired, err = openDisk(p.Disk, t); err != nil {
			return because(vmwire.ReasonDisk, err)
		}
		t.step("disk.folders")
	}
	return s.order(p, t)
}

// order has the stage become the session's first process.
func (s *supervisor) order(p *vmwire.Personalise, t *timer) error {
	if len(p.Init) > 0 {
		if err := enter(usersCgroup, s.stage.Process.Pid); err != nil {
			return err
		}
	}
	brief := *p
	brief.Seed, brief.Files = nil, nil
	line, err := json.Marshal(order{Personalise: brief, Port: s.port})
	if err != nil {
		return err
	}
	if _, err := s.stageSocket.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("order the stage: %w", err)
	}
	r, err := s.report()
	t.steps = append(t.steps, r.Steps...)
	if err != nil {
		return err
	}
	t.last = time.Now()
	if s.port == "" {
		return nil // a rehearsal: whoever plays the host has the pipes
	}
	go s.answerStage()
	if err := watch(s.ctl.tell, s.disk); err != nil {
		return err
	}
	if len(p.Init) == 0 {
		return nil
	}
	channel, err := openPort(s.port)
	if err != nil {
		return err
	}
	// Pipes stand between, so that the program sees no end while the host is away.
	go func() { _, _ = io.Copy(s.stdin, channel) }()
	go func() { _, _ = io.Copy(channel, s.stdout) }()
	return nil
}

// end kills every process of the session.
func (s *supervisor) end(limit time.Duration) {
	if s.stage == nil {
		return
	}
	s.ending.Store(true)
	_ = s.stage.Process.Kill() // PID 1 of its namespace takes all others along
	select {
	case <-s.ended:
	case <-time.After(limit):
	}
}

// powerOff ends the machine; with a limit it tries to leave the disk clean.
func (s *supervisor) powerOff(limit time.Duration) {
	s.off.Do(func() {
		if limit > 0 {
			s.end(limit)
			if s.disk != nil {
				_ = s.disk.close(limit)
			}
		}
		if s.ctl != nil && s.ctl.port != nil {
			s.ctl.port.flush(tellPatience)
			if s.ctl.record != nil {
				s.ctl.record.flush(tellPatience)
			}
		}
		if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
			s.log("power off: %v", err)
			_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
		}
	})
}

// log writes to the kernel's log, which goes wherever the machine's console does.
func (s *supervisor) log(format string, args ...any) {
	_, _ = fmt.Fprintf(s.kmsg, "<5>berth: "+format+"\n", args...)
}
