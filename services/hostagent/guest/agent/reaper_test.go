package agent

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
)

// patience is far above what the events of these tests need on a busy machine.
const patience = 30 * time.Second

// startCat starts a cat that ends when its input is closed, and returns the input and its exit.
func startCat(t *testing.T, r *reaper) (pid int, input *os.File, exit chan syscall.WaitStatus) {
	t.Helper()
	in, input, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	exit = make(chan syscall.WaitStatus, 1)
	pid, err = r.spawn(func() (int, error) {
		return syscall.ForkExec("/bin/cat", []string{"cat"}, &syscall.ProcAttr{
			Files: []uintptr{in.Fd(), 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
		})
	}, func(status syscall.WaitStatus, err error) {
		if err != nil {
			t.Errorf("no status: %v", err)
		}
		exit <- status
	})
	if err != nil {
		t.Fatal(err)
	}
	return pid, input, exit
}

// TestAHangingStartDelaysNoExit: while the start of one exec hangs, the exit of another is delivered, and a
// third can be killed.
func TestAHangingStartDelaysNoExit(t *testing.T) {
	for name, all := range map[string]bool{"all children": true, "own children": false} {
		t.Run(name, func(t *testing.T) {
			r := newReaper(all)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { r.run(ctx); close(ended) }()
			_, input, exit := startCat(t, r)
			victim, open, killed := startCat(t, r)
			defer open.Close()

			hangs, release, started := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				_, err := r.spawn(func() (int, error) {
					close(hangs)
					<-release
					return 0, errors.New("it hung")
				}, nil)
				started <- err
			}()
			<-hangs
			input.Close()
			select {
			case status := <-exit:
				if status.ExitStatus() != 0 {
					t.Errorf("status %v", status)
				}
			case <-time.After(patience):
				t.Error("the exit was not delivered while another start hung")
			}
			done := make(chan error, 1)
			go func() { done <- r.signalGroup(victim, syscall.SIGKILL) }()
			select {
			case err := <-done:
				if err != nil {
					t.Errorf("kill: %v", err)
				}
			case <-time.After(patience):
				t.Error("nothing can be killed while another start hangs")
			}
			select {
			case status := <-killed:
				if status.Signal() != syscall.SIGKILL {
					t.Errorf("status %v", status)
				}
			case <-time.After(patience):
				t.Error("the exit of the killed process was not delivered while another start hung")
			}
			close(release)
			if err := <-started; err == nil {
				t.Error("the start that failed reports no error")
			}
			cancel()
			<-ended
		})
	}
}
