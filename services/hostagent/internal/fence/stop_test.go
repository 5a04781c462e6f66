package fence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/fence/watchdog"
)

// drift is what the scheduler adds to a lease before it gives a session away.
const drift = time.Second

// empties waits until nothing lives in the sandboxes' cgroup, and says when that was seen.
func (p *place) empties() time.Duration {
	p.t.Helper()
	for end := time.Now().Add(15 * time.Second); p.tree.Populated(p.path); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatal("the sandbox is still there")
		}
	}
	return watchdog.Now()
}

func (p *place) size() int64 {
	st, err := os.Stat(p.beats)
	if err != nil {
		return 0
	}
	return st.Size()
}

// TestStoppedBeforeTheSessionIsGivenAway: whether hostagent is killed or only stands still, nothing of
// a session is left on its host when the scheduler gives it away, and from the freeze to its end it did
// not run. A hostagent that goes on later finds it so, and is told.
func TestStoppedBeforeTheSessionIsGivenAway(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.stops = true
			agent := p.hostagent()
			p.becomes(true)
			last := watchdog.Now()
			if err := agent.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			p.becomes(false)
			frozen := p.size()
			at := p.empties()
			if at > last+term+drift {
				t.Errorf("stopped %s after the session was given away", at-last-term-drift)
			}
			if n := p.size(); n != frozen {
				t.Errorf("it ran between the freeze and its end: %d bytes became %d", frozen, n)
			}
			if sig == syscall.SIGSTOP {
				_ = agent.Process.Signal(syscall.SIGCONT)
			}
			lease, err := watchdog.OpenLease(p.dir)
			if err != nil {
				t.Fatal(err)
			}
			defer lease.Close()
			// When the cgroup is seen empty the watchdog may yet have to say so.
			for end := time.Now().Add(20 * time.Second); lease.Stopped() < last && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			if lease.Stopped() < last {
				t.Error("nobody is told that it was stopped")
			}
		})
	}
}

// TestWhatIsFrozenByItselfIsStoppedToo: a driver may have frozen a sandbox alone, which a thaw of all
// does not reach.
func TestWhatIsFrozenByItselfIsStoppedToo(t *testing.T) {
	p := newPlace(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	f, err := Start(p.dir, p.path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	f.Until(watchdog.Now()+time.Minute, 0)
	p.becomes(true)
	if err := p.tree.Freeze(ctx, p.path+"/box", true); err != nil {
		t.Fatal(err)
	}
	before := p.size()
	f.Until(watchdog.Now(), watchdog.Now())
	p.empties()
	if n := p.size(); n != before {
		t.Errorf("it ran before it ended: %d bytes became %d", before, n)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// TestALateRenewalKeepsWhatIsFrozen: between the freeze and the stop a lease that was granted again
// lets live what is there, but not run: that waits until the host knows what it still owns.
func TestALateRenewalKeepsWhatIsFrozen(t *testing.T) {
	p := newPlace(t)
	f, err := Start(p.dir, p.path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	f.Until(watchdog.Now()+time.Minute, watchdog.Now()+time.Hour)
	p.becomes(true)
	f.Until(watchdog.Now(), watchdog.Now()+2*time.Second)
	p.becomes(false)
	f.Keep(watchdog.Now() + time.Hour)
	time.Sleep(2500 * time.Millisecond)
	if !p.tree.Populated(p.path) {
		t.Fatal("it was stopped although the lease was renewed")
	}
	if p.runs() {
		t.Fatal("it runs before anybody said so")
	}
	f.Until(watchdog.Now()+time.Minute, watchdog.Now()+time.Hour)
	p.becomes(true)
	f.Freeze()
	p.becomes(false)
	if f.Stopped() != 0 || f.Problem() != "" {
		t.Errorf("stopped at %s, problem %q", f.Stopped(), f.Problem())
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// TestALaterFreezeHidesNoStop: a page that says that things may run longer than they may be there is
// wrong, and the safe side of it is the stop.
func TestALaterFreezeHidesNoStop(t *testing.T) {
	p := newPlace(t)
	f, err := Start(p.dir, p.path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	f.Until(watchdog.Now()+time.Minute, watchdog.Now()+time.Hour)
	p.becomes(true)
	f.Until(watchdog.Now()+time.Hour, watchdog.Now())
	p.empties()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// TestADismissedWatchdogLetsNothingRun that has no lease: only a host without sandboxes dismisses one.
func TestADismissedWatchdogLetsNothingRun(t *testing.T) {
	p := newPlace(t)
	f, err := Start(p.dir, p.path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p.becomes(false)
	p.dismiss()
	if p.runs() {
		t.Error("it runs without a lease")
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// oldWatchdog holds the lock as a watchdog of the format before did.
func oldWatchdog(dir string) error {
	f, err := os.OpenFile(watchdog.Lock(dir), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	fmt.Fprintln(f, os.Getpid())
	fmt.Println("ready")
	time.Sleep(time.Minute)
	return errors.New("it was not ended")
}

// TestAWatchdogOfTheFormatBeforeIsReplaced: it would freeze and never stop. Its page is read on.
func TestAWatchdogOfTheFormatBeforeIsReplaced(t *testing.T) {
	p := newPlace(t)
	if err := os.WriteFile(filepath.Join(p.dir, "lease"), make([]byte, 8), 0o600); err != nil {
		t.Fatal(err)
	}
	old := &exec.Cmd{Path: "/proc/self/exe", Args: []string{watchdog.Name, p.dir, p.path, "of before"},
		Env: append(os.Environ(), "BERTH_TEST_OLDDOG="+p.dir)}
	out, err := old.StdoutPipe()
	if err == nil {
		err = old.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	said := make([]byte, 64)
	n, _ := out.Read(said)
	if !strings.HasPrefix(string(said[:n]), "ready") {
		t.Fatalf("it said %q", said[:n])
	}
	go func() { _ = old.Wait(); close(ended) }()
	f, err := Start(p.dir, p.path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	if pid := p.watchdog(); pid == old.Process.Pid {
		t.Error("it was not replaced")
	}
	f.Until(watchdog.Now()+time.Minute, watchdog.Now()+time.Hour)
	p.becomes(true)
	f.Until(watchdog.Now(), watchdog.Now())
	p.empties()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
