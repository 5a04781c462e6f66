package e2e

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestOutOfMemory: a process that is killed for memory says so, and oom is published. In the
// container tier the sandbox lives on. Under gVisor the kernel may pick the sentry, which is the
// whole sandbox, or what runs the process; either way the session is there with its files.
func TestOutOfMemory(t *testing.T) { outOfMemory(t, common.For(t)) }

func outOfMemory(t *testing.T, e *testenv.Env) {
	hog := []string{"python3", "-c", "a = []\nwhile True: a.append(bytearray(16 << 20))"}
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "hog-"+tier)
		s := open(t, c, sdk.OpenOptions{Template: template})
		sh(t, s, "echo kept > /root/f; sync")
		events, err := e.Operator().Events(t.Context(), sdk.EventFilter{Session: s.Key()})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		err = s.Run(t.Context(), sdk.Cmd{Key: "xhog", Args: hog})
		t.Logf("ended after %s with %v", time.Since(began).Round(10*time.Millisecond), err)
		var exit *sdk.ExitError
		switch ended := errors.As(err, &exit); {
		case tier != "gvisor" && (!ended || !exit.OOM), tier == "gvisor" && ended && !exit.OOM, err == nil:
			t.Errorf("the process ended with %v, want out of memory", err)
		}
		for ev, err := range events {
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("event %s", ev.Name)
			if ev.Name == "oom" {
				break
			}
		}
		if p, aerr := s.Attach(t.Context(), "xhog", sdk.AttachOptions{}); aerr == nil {
			if again := p.Wait(); fmt.Sprint(again) != fmt.Sprint(err) {
				t.Errorf("who attaches later is told %v", again)
			}
		} else if tier != "gvisor" {
			t.Error(aerr)
		}
		epoch := s.Epoch()
		s = open(t, c, sdk.OpenOptions{Template: template})
		if t.Logf("epoch %s, then %s (%s)", epoch, s.Epoch(), s.Origin()); tier != "gvisor" && s.Epoch() != epoch {
			t.Error("the sandbox did not live on")
		}
		if got := sh(t, s, "cat /root/f"); got != "kept" {
			t.Errorf("the file says %q", got)
		}
		err = s.Run(t.Context(), sdk.Cmd{Args: []string{"sh", "-c", "kill -9 $$"}})
		if !errors.As(err, &exit) || exit.Signal == "" || exit.OOM {
			t.Errorf("a process that killed itself ended with %v", err)
		}
	})
}
