package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/agent"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

const (
	patience = 60 * time.Second // of a host with a machine that is being personalised
	maxCalls = 8                // at a time
)

// control serves the control port.
type control struct {
	sup   *supervisor
	port  *port
	calls chan struct{}

	write sync.Mutex // a line is written whole

	record *port // vmwire.Events; nil if there is none
	news   chan vmwire.Event
	said   chan struct{} // closed when the end was told

	mu     sync.Mutex
	id     string         // of the personalise that was begun
	answer *vmwire.Answer // to it
}

// serve reads messages as long as the machine lives.
func (c *control) serve() error {
	in := vmwire.NewReader(c.port)
	for {
		m, err := in.Next()
		switch {
		case errors.Is(err, vmwire.ErrMessage), errors.Is(err, vmwire.ErrTooLong):
			c.sup.log("ignored a line: %v", err)
		case err != nil:
			return fmt.Errorf("control port: %w", err)
		case m.Type == vmwire.TypeHello:
			go c.send(vmwire.Message{Type: vmwire.TypeReady, Ready: c.ready(m.Hello.Nonce)})
		case m.Type == vmwire.TypePersonalise:
			c.personalise(m.Personalise)
		case m.Type == vmwire.TypeCall:
			c.call(m.Call)
		}
	}
}

// send writes a message; it waits while the host is away.
func (c *control) send(m vmwire.Message) {
	line, err := vmwire.Encode(m)
	if err != nil {
		c.sup.log("cannot say %s: %v", m.Type, err)
		return
	}
	c.write.Lock()
	defer c.write.Unlock()
	if _, err := c.port.Write(line); err != nil {
		c.sup.log("cannot say %s: %v", m.Type, err)
	}
}

// tell notes an event where it is kept, and has it said on the control port. It waits for nobody: with
// the host away for long, only the record has them all.
func (c *control) tell(e vmwire.Event) {
	line, err := vmwire.Encode(vmwire.Message{Type: vmwire.TypeEvent, Event: &e})
	if err == nil && c.record != nil {
		_ = c.record.file.SetWriteDeadline(time.Now().Add(tellPatience))
		_, err = c.record.Write(line)
	}
	if err != nil {
		c.sup.log("cannot note %s: %v", e.Kind, err)
	}
	select {
	case c.news <- e:
	default:
	}
}

// sayNews passes events on until the first process has ended, which it says last.
func (c *control) sayNews() {
	for e := range c.news {
		c.send(vmwire.Message{Type: vmwire.TypeEvent, Event: &e})
		if e.Kind == vmwire.EventExited {
			close(c.said)
			return
		}
	}
}

func (c *control) ready(nonce string) *vmwire.Ready {
	var name unix.Utsname
	_ = unix.Uname(&name)
	var up unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &up)
	c.mu.Lock()
	defer c.mu.Unlock()
	return &vmwire.Ready{
		Min: vmwire.MinVersion, Max: vmwire.MaxVersion, Nonce: nonce, Personalised: c.id != "",
		Kernel: unix.ByteSliceToString(name.Release[:]), Software: agent.Version, Uptime: up.Nano(), Steps: c.sup.steps,
	}
}

// personalise obeys the first request and no other.
func (c *control) personalise(p *vmwire.Personalise) {
	c.mu.Lock()
	known, answer := c.id, c.answer
	if known == "" && p.Version >= vmwire.MinVersion && p.Version <= vmwire.MaxVersion {
		c.id = p.ID
	}
	c.mu.Unlock()
	switch {
	case known == p.ID && answer != nil:
		go c.send(vmwire.Message{Type: vmwire.TypeAnswer, Answer: answer})
	case known == p.ID:
		// Its answer comes.
	case known != "":
		go c.refuse(p.ID, vmwire.ReasonInvalid, "the machine is somebody's already")
	case p.Version < vmwire.MinVersion || p.Version > vmwire.MaxVersion:
		go c.refuse(p.ID, vmwire.ReasonVersion, fmt.Sprintf("version %d is not spoken here", p.Version))
	default:
		go c.obey(p)
	}
}

func (c *control) refuse(id string, reason vmwire.Reason, text string) {
	c.send(vmwire.Message{Type: vmwire.TypeAnswer, Answer: &vmwire.Answer{ID: id, Version: vmwire.MaxVersion, Reason: reason, Error: text}})
}

// obey personalises the machine, or ends it when that does not work, or takes too long.
func (c *control) obey(p *vmwire.Personalise) {
	done := make(chan *vmwire.Answer, 1)
	go func() { done <- c.sup.personalise(p) }()
	var answer *vmwire.Answer
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case answer = <-done:
	case <-late.C:
		answer = &vmwire.Answer{Reason: vmwire.ReasonDeadline, Error: fmt.Sprintf("not done within %v", patience)}
	}
	answer.ID, answer.Version = p.ID, p.Version
	answer.Error = answer.Error[:min(len(answer.Error), vmwire.MaxText)]
	c.mu.Lock()
	c.answer = answer
	c.mu.Unlock()
	c.send(vmwire.Message{Type: vmwire.TypeAnswer, Answer: answer})
	if !answer.OK {
		c.sup.log("not personalised: %s", answer.Error)
		c.sup.powerOff(0)
	}
}

// call runs beside others: a thaw must not wait for a freeze that hangs.
func (c *control) call(req *vmwire.Call) {
	select {
	case c.calls <- struct{}{}:
	default:
		go c.send(vmwire.Message{Type: vmwire.TypeDone, Done: &vmwire.Done{ID: req.ID, Reason: vmwire.ReasonInternal, Error: "too many calls"}})
		return
	}
	go func() {
		defer func() { <-c.calls }()
		c.mu.Lock()
		nobodys, served := c.id == "", c.answer != nil && c.answer.OK
		c.mu.Unlock()
		done := &vmwire.Done{ID: req.ID, Reason: vmwire.ReasonInvalid, Error: "the machine is nobody's yet"}
		switch {
		case served:
			done = c.sup.call(req)
		case nobodys && req.Op == vmwire.OpRehearse:
			done = c.rehearse(req)
		}
		c.send(vmwire.Message{Type: vmwire.TypeDone, Done: done})
		if served && req.Op == vmwire.OpOff {
			c.sup.powerOff(offPatience)
		}
	}()
}

// rehearse keeps a personalise that comes meanwhile waiting.
func (c *control) rehearse(req *vmwire.Call) *vmwire.Done {
	s := c.sup
	s.work.Lock()
	defer s.work.Unlock()
	c.mu.Lock()
	nobodys := c.id == ""
	c.mu.Unlock()
	done := &vmwire.Done{ID: req.ID, OK: true}
	if !nobodys {
		done.OK, done.Reason, done.Error = false, vmwire.ReasonInvalid, "the machine is somebody's already"
		return done
	}
	said, err := s.rehearse()
	if err != nil {
		said, done.OK, done.Reason = err.Error(), false, reasonOf(err)
	}
	done.Error = said[:min(len(said), vmwire.MaxText)]
	return done
}

// call does one operation on a personalised machine.
func (s *supervisor) call(req *vmwire.Call) *vmwire.Done {
	done := &vmwire.Done{ID: req.ID}
	var err error
	switch req.Op {
	case vmwire.OpFreeze, vmwire.OpThaw, vmwire.OpGrow:
		err = s.diskCall(req, done)
	case vmwire.OpFiles:
		err = writeFiles(req.Files)
	case vmwire.OpOff:
		s.end(offPatience)
		if s.disk != nil {
			err = s.disk.close(offPatience)
		}
	default:
		err = because(vmwire.ReasonInvalid, fmt.Errorf("operation %.40q", req.Op))
	}
	if done.OK = err == nil; err != nil {
		text := err.Error()
		done.Reason, done.Error = reasonOf(err), text[:min(len(text), vmwire.MaxText)]
	}
	return done
}

func (s *supervisor) diskCall(req *vmwire.Call, done *vmwire.Done) (err error) {
	if s.disk == nil {
		return because(vmwire.ReasonInvalid, errors.New("the machine has no disk"))
	}
	switch req.Op {
	case vmwire.OpFreeze:
		err = s.disk.freeze(time.Duration(req.Hold))
	case vmwire.OpThaw:
		done.Expired, err = s.disk.thaw()
	case vmwire.OpGrow:
		done.Bytes, err = s.disk.grow(req.Bytes)
	}
	return because(vmwire.ReasonDisk, err)
}

// writeFiles puts files where the session sees them, each whole.
func writeFiles(list map[string]vmwire.File) error {
	for name, f := range list {
		mode := os.FileMode(f.Mode)
		if mode == 0 {
			mode = 0o444
		}
		tmp := filepath.Join(runDir, ".new")
		err := os.WriteFile(tmp, f.Data, 0o600)
		if err == nil {
			err = os.Chmod(tmp, mode)
		}
		if err == nil {
			err = os.Rename(tmp, filepath.Join(runDir, name))
		}
		if err != nil {
			return because(vmwire.ReasonInternal, fmt.Errorf("file %s: %w", name, err))
		}
	}
	return nil
}

// answerStage serves the agent's calls on the stage's socket until it ends.
func (s *supervisor) answerStage() {
	for {
		line, err := s.stageIn.ReadBytes('\n')
		if err != nil {
			return
		}
		var m vmwire.Message
		if m, err = vmwire.Decode(line); err != nil || m.Call == nil {
			s.log("the stage says what is no call: %v", err)
			return
		}
		done := &vmwire.Done{ID: m.Call.ID, Reason: vmwire.ReasonInvalid, Error: "not for the session to ask"}
		switch m.Call.Op {
		case vmwire.OpFreeze, vmwire.OpThaw, vmwire.OpGrow:
			done = s.call(m.Call)
		}
		if line, err = vmwire.Encode(vmwire.Message{Type: vmwire.TypeDone, Done: done}); err != nil {
			return
		}
		if _, err := s.stageSocket.Write(line); err != nil {
			return
		}
	}
}

// report reads one report of the stage.
func (s *supervisor) report() (report, error) {
	line, err := s.stageIn.ReadBytes('\n')
	if err != nil {
		return report{}, fmt.Errorf("the stage ended: %w", err)
	}
	var r report
	if err := json.Unmarshal(line, &r); err != nil {
		return report{}, fmt.Errorf("the stage's report: %w", err)
	}
	if r.Reason != "" {
		return r, because(r.Reason, errors.New(r.Error))
	}
	return r, nil
}
