package sdk_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/sdk/sdktest"
)

const refuses = "the bus refuses this login now"

// Suspension: a stream of a frontend that is shut out is re-attached until its time is over, and nobody
// says why.
func TestAStreamOfALoginThatIsRefusedEndsWithTheReason(t *testing.T) {
	t.Parallel()
	srv := sdktest.Start(t)
	c, s := open(t, srv)
	p, err := s.Exec(t.Context(), sdk.Command("sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	events, err := c.Events(t.Context(), sdk.EventFilter{})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	go func() {
		for _, err := range events {
			if err != nil {
				told <- err
			}
		}
	}()
	start := time.Now()
	letIn, err := srv.ShutOut("acme")
	if err != nil {
		t.Fatal(err)
	}
	unknown := (*sdk.UnknownExitError)(nil)
	err = p.Wait()
	if took := time.Since(start); !errors.As(err, &unknown) || !errors.Is(err, sdk.ErrDenied) || !strings.Contains(err.Error(), refuses) || took < 1500*time.Millisecond || took > 8*time.Second {
		t.Errorf("it ended with %v after %s", err, took)
	}
	if err := <-told; !errors.Is(err, sdk.ErrDenied) || !strings.Contains(err.Error(), refuses) {
		t.Errorf("the events ended with %v", err)
	}
	// A later call fails at once.
	start = time.Now()
	if err := s.Run(t.Context(), sdk.Command("true")); !errors.Is(err, sdk.ErrDenied) || time.Since(start) > time.Second {
		t.Errorf("a later exec ended with %v after %s", err, time.Since(start))
	}
	if _, err := c.Events(t.Context(), sdk.EventFilter{}); !errors.Is(err, sdk.ErrDenied) {
		t.Errorf("later events ended with %v", err)
	}
	if err := letIn(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); !c.NATS().IsConnected() && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) { // the handler of the reconnect may come a moment later
		if err = s.Run(t.Context(), sdk.Command("true")); err == nil || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		t.Errorf("let in again: %v", err)
	}
}

// Suspension: a call that waits while the login is refused looks like a time-out.
func TestACallThatWaitsWhileTheLoginIsRefusedIsDenied(t *testing.T) {
	t.Parallel()
	srv := sdktest.Start(t)
	c, _ := open(t, srv)
	if _, err := srv.ShutOut("acme"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, err := c.Status(t.Context(), sdk.UserSession{User: sdk.Token(srv.Token("acme", "ann"))}); !errors.Is(err, sdk.ErrDenied) || !strings.Contains(err.Error(), refuses) || time.Since(start) > 8*time.Second {
		t.Errorf("it ended with %v after %s", err, time.Since(start))
	}
}

// A frontend that is let in again soon does not notice that it was shut out.
func TestAShortRefusalEndsNoStream(t *testing.T) {
	t.Parallel()
	srv := sdktest.Start(t)
	_, s := open(t, srv)
	p, err := s.Exec(t.Context(), sdk.Command("sleep", "2"))
	if err != nil {
		t.Fatal(err)
	}
	letIn, err := srv.ShutOut("acme")
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(500*time.Millisecond, func() {
		if err := letIn(); err != nil {
			t.Error(err)
		}
	})
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// Connect: a refused login is told in the words of the library.
func TestConnectOfARefusedLoginSaysWhatItIs(t *testing.T) {
	srv := sdktest.Start(t)
	if _, err := srv.ShutOut("acme"); err != nil {
		t.Fatal(err)
	}
	_, err := sdk.Connect(t.Context(), sdk.Config{ClientFile: srv.ClientFile("acme")})
	if !errors.Is(err, sdk.ErrDenied) || !strings.Contains(err.Error(), refuses) || strings.Contains(err.Error(), "nats:") {
		t.Errorf("got %v", err)
	}
}
