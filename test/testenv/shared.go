package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/sdk"
)

// Shared is one installation for all tests of a package that need no fresh one. The first of them starts it.
// Tests that share it run one after the other; each finds it running and without sessions.
type Shared struct {
	Args func() []string // of `berth up`, asked for once at each start
	env  *Env
}

// For lends the installation to a test, which may kill it and start it again. When the test ends, every session
// is deleted. After a test that failed the installation is stopped, so that the next test has a fresh one.
func (s *Shared) For(t *testing.T) *Env {
	t.Helper()
	if s.env == nil {
		e := prepare(t, s.Args()...)
		e.Up()
		s.env = e
	}
	lent := s.env.For(t)
	select {
	case <-s.env.Done(): // the test before stopped it
		lent.Up()
		lent.ForgetAll(t)
	default:
	}
	t.Cleanup(func() {
		if !t.Failed() {
			lent.ForgetAll(t)
		}
		if t.Failed() {
			s.env.t = t
			s.env.end()
			s.env = nil
		}
	})
	return lent
}

// End stops the installation and returns an error if anything of it is left on the host. TestMain calls it.
func (s *Shared) End() error {
	if s.env == nil {
		return nil
	}
	after := &afterTests{}
	s.env.t = after
	done := make(chan struct{})
	go func() { // Fatal ends the goroutine
		defer close(done)
		s.env.end()
	}()
	<-done
	s.env = nil
	return after.err
}

func (e *Env) forgetAll(ctx context.Context) error {
	op, err := sdk.Connect(ctx, sdk.Config{ClientFile: e.ClientFile("operator")})
	if err != nil {
		return err
	}
	defer op.Close()
	list := &schedulerv1.ListReply{}
	if err := op.Call(ctx, "scheduler", "list", &schedulerv1.ListRequest{Limit: 1000}, list); err != nil {
		return err
	}
	var all error
	for _, r := range list.GetRecords() {
		if r.GetState() == corev1.State_STATE_DELETED || r.GetState() == corev1.State_STATE_DELETING {
			continue
		}
		c, err := e.Connect(ctx, r.GetSession().GetTenant(), r.GetActor().GetSubject())
		if err == nil {
			err = c.DeleteSession(ctx, sdk.UserSession{Name: r.GetSessionName()})
			c.Close()
		}
		if err != nil {
			all = errors.Join(all, fmt.Errorf("delete %s of %s: %w", r.GetSessionName(), r.GetActor().GetSubject(), err))
		}
	}
	return all
}

// ForgetAll deletes every session of the installation, so that the next test finds none. If the installation does not
// run, ForgetAll does nothing.
func (e *Env) ForgetAll(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	select {
	case <-e.Done():
		return // For does it, after a start
	default:
	}
	if err := e.forgetAll(ctx); err != nil {
		t.Error(err)
	}
}

// afterTests stands for a test once all tests have ended.
type afterTests struct {
	testing.TB
	err error
}

func (a *afterTests) Helper()                  {}
func (a *afterTests) Failed() bool             { return a.err != nil }
func (a *afterTests) Context() context.Context { return context.Background() }
func (a *afterTests) Logf(f string, v ...any)  { fmt.Fprintf(os.Stderr, f+"\n", v...) }
func (a *afterTests) Errorf(f string, v ...any) {
	a.err = errors.Join(a.err, fmt.Errorf(f, v...))
}
func (a *afterTests) Error(v ...any) { a.Errorf("%s", fmt.Sprintln(v...)) }
func (a *afterTests) Fatalf(f string, v ...any) {
	a.Errorf(f, v...)
	runtime.Goexit()
}
func (a *afterTests) Fatal(v ...any) { a.Fatalf("%s", fmt.Sprintln(v...)) }
