package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestKillNineAdoptsLiveSandboxes: everything is killed while a process runs
// in a sandbox; the next start takes it over, and its output is whole.
func TestKillNineAdoptsLiveSandboxes(t *testing.T) {
	e := common.For(t)
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "ann")
		o := sdk.OpenOptions{Template: template, Name: tier}
		s := open(t, c, o)
		p, err := s.Exec(t.Context(), sdk.Cmd{Key: "xsurvivor", Args: []string{"sh", "-c",
			"i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo line $i; sleep 0.1; done; exit 7"}})
		if err != nil {
			t.Fatal(err)
		}
		p.Detach()
		epoch := s.Epoch()
		e.Kill()
		e.Up()
		again := open(t, e.Client("acme", "ann"), o)
		if again.Epoch() != epoch {
			t.Errorf("the sandbox was not adopted: epoch %s became %s (%s)", epoch, again.Epoch(), again.Origin())
		}
		var out strings.Builder
		p, err = again.Attach(t.Context(), "xsurvivor", sdk.AttachOptions{Stdout: &out})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err == nil || !strings.Contains(err.Error(), "7") {
			t.Errorf("the process ended with %v, want its own code 7", err)
		}
		if want := 40; strings.Count(out.String(), "\n") != want || !strings.HasSuffix(out.String(), "line 40\n") {
			t.Errorf("the output has %d lines, want %d:\n%.300s", strings.Count(out.String(), "\n"), want, out.String())
		}
	})
}

// TestKillNineInTheMiddleOfAnyStep kills everything at random moments of open,
// write, close and delete. After every start the newest acknowledged file is
// there, and in the end the host is as it was.
func TestKillNineInTheMiddleOfAnyStep(t *testing.T) {
	e := common.For(t)
	rounds := 12
	last := map[string]string{} // session name -> content that a write acknowledged
	for round := range rounds {
		name := fmt.Sprintf("s%d", round%3)
		template := []string{"container", "default"}[round%2]
		if round%3 == 2 {
			template = "container"
		}
		kill := time.AfterFunc(time.Duration(50+rand.IntN(900))*time.Millisecond, e.Process.Kill)
		content := work(t, e, name, template, last)
		kill.Stop()
		<-killed(e)
		if content != "" {
			last[name] = content
		}
		e.Up()
		c := e.Client("acme", "ann")
		s := open(t, c, sdk.OpenOptions{Name: name, Template: template, Risk: sdk.OwnCode()})
		got := sh(t, s, "cat /root/f 2>/dev/null || true")
		if want := last[name]; want != "" && got < want {
			t.Fatalf("round %d: the file says %q, an older content than the acknowledged %q (%s)", round, got, want, s.Origin())
		}
		last[name] = got
		if err := s.Close(t.Context()); err != nil { // the next one may ask for another tier
			t.Fatalf("round %d: %v", round, err)
		}
	}
}

// work opens, writes and closes until it is killed; it returns the last
// content whose write was acknowledged.
func work(t *testing.T, e *testenv.Env, name, template string, last map[string]string) (acked string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	go func() {
		<-e.Done()
		time.AfterFunc(200*time.Millisecond, cancel)
	}()
	c, err := e.Connect(ctx, "acme", "ann")
	if err != nil {
		return ""
	}
	defer c.Close()
	for i := 0; ctx.Err() == nil; i++ {
		s, err := c.Open(ctx, sdk.OpenOptions{Name: name, Template: template, Risk: sdk.OwnCode()})
		if err != nil {
			return acked
		}
		content := fmt.Sprintf("%d", time.Now().UnixNano())
		if _, err := s.Files().Write(ctx, "/root/f", strings.NewReader(content), sdk.WriteOptions{}); err == nil {
			acked = content
		}
		if i%2 == 1 {
			_ = s.Close(ctx) // killed in the middle, or not
		} else {
			s.Detach()
		}
	}
	return acked
}

// killed makes sure that the process is dead and returns when it is.
func killed(e *testenv.Env) <-chan struct{} {
	e.Kill()
	return e.Done()
}
