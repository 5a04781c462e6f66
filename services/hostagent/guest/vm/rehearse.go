package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

const (
	rehearseExec = 20 * time.Second // for the command of a rehearsal
	rehearseEnd  = 5 * time.Second  // for what it leaves to be gone
)

// rehearse goes once through all that happens when the machine becomes somebody's, up to the output of
// a first command, with a stage of its own in place of the session's and whatever disk is there now. A
// machine whose kernel and agent have done that before does it in a fraction of the time, most of all
// one that is emulated. Nothing of it is left but what was read of the image. That a part of it does
// not work is only said: an image need not have a shell, nor the disk a file system. An error means
// that something may be left, and that the machine must not be anybody's.
func (s *supervisor) rehearse() (said string, err error) {
	if err := s.lookAtImage(); err != nil {
		return "", err
	}
	r := &supervisor{kmsg: s.kmsg, ctl: s.ctl, ended: make(chan struct{})}
	tried := r.playSession()
	if err := r.clearAway(); err != nil {
		return "", fmt.Errorf("after a rehearsal: %w", errors.Join(err, tried))
	}
	if tried != nil {
		return tried.Error(), nil
	}
	return "", nil
}

// lookAtImage has the session's stage mount the image, so that what is read of it stays in memory.
func (s *supervisor) lookAtImage() error {
	if _, err := s.stageSocket.Write([]byte("{\"look\":true}\n")); err != nil {
		return fmt.Errorf("order the stage: %w", err)
	}
	_, err := s.report()
	return err
}

func (s *supervisor) playSession() error {
	if err := s.startStage(); err != nil {
		return err
	}
	t := newTimer()
	p := &vmwire.Personalise{Disk: &vmwire.Disk{Create: true}}
	var err error
	if s.disk, _, err = openDisk(p.Disk, t); err != nil {
		s.disk, p.Disk = nil, nil // memory will do
	}
	if p.Limits.Memory, _, err = limit(p.Limits); err != nil {
		return err
	}
	if err := s.order(p, t); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), rehearseExec)
	defer cancel()
	c, err := hostend.Attach(ctx, s.stdout, s.stdin, hostend.Options{})
	if err != nil {
		return err
	}
	defer c.Close()
	out, err := c.StartExec(ctx, hostend.ExecSpec{Key: "rehearsal", Argv: []string{"/bin/sh", "-c", "echo"}})
	for err == nil {
		var ev hostend.Event
		if ev, err = out.Next(ctx); err == nil && ev.Exit != nil {
			break
		}
	}
	return err
}

// clearAway ends the stage of a rehearsal, with its namespaces and all that is mounted there, and lets
// go of the disk.
func (s *supervisor) clearAway() error {
	for _, f := range []*os.File{s.stdin, s.stdout} {
		if f != nil {
			_ = f.Close()
		}
	}
	if s.stage != nil && s.stage.Process != nil {
		s.end(rehearseEnd)
		select {
		case <-s.ended:
		default:
			return errors.New("its processes do not end")
		}
	}
	if s.stageSocket != nil {
		_ = s.stageSocket.Close()
	}
	if s.disk != nil {
		return s.disk.close(rehearseEnd)
	}
	if mounted(diskDir) {
		return errors.New("its disk is mounted")
	}
	return nil
}
