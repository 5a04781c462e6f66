//go:build linux

package microvm

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"
	"unicode"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

const (
	seedSize = 64
	basePath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// personalise makes the generic machine this sandbox. Nothing of the user has run before.
func (m *making) personalise(ctx context.Context) error {
	within := m.d.cfg.PersonaliseTime
	if m.tpl == nil { // the VM boots first
		within += m.d.cfg.BootTime
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	v := m.d.vmOf(m.id)
	if v == nil {
		return errEnded
	}
	files, err := readFolder(m.spec.RunDir)
	if err != nil {
		return err
	}
	for {
		c, err := v.guest(ctx)
		if err != nil {
			return unanswered(ctx, err)
		}
		a, err := m.ask(ctx, c, files)
		if errors.Is(err, errNoAnswer) && ctx.Err() == nil {
			<-c.done // the next connection repeats it: the guest knows the id
			continue
		}
		if err != nil {
			return unanswered(ctx, err)
		}
		m.files = files
		return m.accept(a)
	}
}

func (m *making) ask(ctx context.Context, c *control, files map[string]vmwire.File) (vmwire.Answer, error) {
	version, err := c.meet(ctx)
	if err != nil {
		return vmwire.Answer{}, err
	}
	p := &vmwire.Personalise{
		Version: version, ID: string(m.id), Hostname: m.spec.Hostname, Files: files, Seed: make([]byte, seedSize),
		Env:    vmwire.Texts(append(append([]string{basePath}, m.spec.Image.Env...), m.spec.Env...)),
		Init:   vmwire.Texts(m.spec.Init),
		Limits: vmwire.Limits{PIDs: m.spec.Limits.PIDs, OpenFiles: m.spec.Limits.OpenFiles, Memory: m.spec.Limits.MemoryBytes},
		Disk:   &vmwire.Disk{Bytes: m.diskBytes, Create: true, Grow: true}, Network: networkOf(m.spec.Link),
	}
	for _, o := range m.spec.Over {
		p.Over = append(p.Over, vmwire.Over{From: o.From, To: o.To})
	}
	_, _ = rand.Read(p.Seed) // never fails
	p.Time = time.Now().UnixNano()
	a, err := c.ask(ctx, p.ID, vmwire.Message{Type: vmwire.TypePersonalise, Personalise: p}, vmwire.TypeAnswer)
	if err != nil {
		return vmwire.Answer{}, err
	}
	return *a.Answer, nil
}

// accept judges the guest's answer. A limit that it does not enforce is an error: it was asked for.
func (m *making) accept(a vmwire.Answer) error {
	const op = "personalise machine"
	if !a.OK {
		return errs.Errorf(op, kindOf(a.Reason), "the machine says: %s", said(a.Reason, a.Error))
	}
	want := map[string]bool{vmwire.EnforcedPIDs: true, vmwire.EnforcedOpenFiles: m.spec.Limits.OpenFiles > 0}
	for _, name := range a.Enforced {
		delete(want, name)
	}
	for name, needed := range want {
		if needed {
			return errs.Errorf(op, errkind.Unimplemented, "the machine does not limit %s", name)
		}
	}
	if a.Repaired {
		m.d.log.Info("the disk was not unmounted last time; its journal was replayed", "sandbox", m.id)
	}
	for _, s := range a.Steps {
		m.d.log.Debug("personalise", "sandbox", m.id, "step", s.Name, "took", time.Duration(s.Took))
	}
	return nil
}

// said is a guest's reason for a failure, as one short line: it may be anything.
func said(r vmwire.Reason, text string) string {
	line := strings.Join(strings.Fields(strings.ToValidUTF8(string(r)+": "+text, "?")), " ")
	line = strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return '?'
	}, line)
	if len(line) > maxSaid {
		line = strings.ToValidUTF8(line[:maxSaid], "")
	}
	return line
}

const maxSaid = 300

// unanswered is the error of a machine that says nothing.
func unanswered(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errs.E("personalise machine", errkind.Deadline, "", err)
	}
	return errs.E("personalise machine", errkind.Unavailable, "", err)
}

func kindOf(r vmwire.Reason) errkind.Kind {
	switch r {
	case vmwire.ReasonInvalid, vmwire.ReasonInit, vmwire.ReasonRoot:
		return errkind.Invalid
	case vmwire.ReasonFull:
		return errkind.NoCapacity
	case vmwire.ReasonDeadline:
		return errkind.Deadline
	}
	return errkind.Internal
}

// ask sends a call to the guest of a running sandbox, with an id of its own. A connection that breaks
// is made again by the machine's keeper, and the call repeated.
func (v *vm) ask(ctx context.Context, call vmwire.Call) (vmwire.Done, error) {
	call.ID = newID()
	for {
		c, err := v.guest(ctx)
		if err != nil {
			return vmwire.Done{}, err
		}
		m, err := c.ask(ctx, call.ID, vmwire.Message{Type: vmwire.TypeCall, Call: &call}, vmwire.TypeDone)
		if err == nil {
			return *m.Done, nil
		}
		select {
		case <-c.done:
			if ctx.Err() == nil {
				continue
			}
		default:
		}
		return vmwire.Done{}, err
	}
}
