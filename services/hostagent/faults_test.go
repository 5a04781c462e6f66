package hostagent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

// TestWakeFailsAtEveryStep: whatever fails, nothing is left, and the same epoch goes well next time.
func TestWakeFailsAtEveryStep(t *testing.T) {
	drv := newProcs(t)
	r := newRig(t, drv)
	r.start()
	h := r.run.h
	for i, name := range []string{"host.image", "host.disk.attach", "host.place", "host.driver.create", "host.guest.hello"} {
		h.steps.Fault = func(step string) error {
			if step == name {
				return errors.New("it was asked to fail")
			}
			return nil
		}
		one := ref(fmt.Sprint("u", i), 5, 6)
		if _, err := r.wake(one, nil); err == nil {
			t.Errorf("%s: the wake went well", name)
		}
		inv, _ := r.disks.List()
		for _, d := range inv.Disks {
			if d.Mounted {
				t.Errorf("%s: a disk is left attached", name)
			}
		}
		if drv.count() != 0 {
			t.Errorf("%s: a sandbox is left", name)
		}
		h.steps.Fault = nil
		if reply := r.mustWake(one, nil); reply.GetOrigin() != corev1.Origin_ORIGIN_CREATED {
			t.Errorf("%s: origin %s", name, reply.GetOrigin())
		}
		must(t, r.delete(one))
	}
}

// TestWakesWaitInLine: at most MaxWakes are made at once, and a wake's deadline ends its waiting.
func TestWakesWaitInLine(t *testing.T) {
	drv := newProcs(t)
	slow := make(chan struct{})
	drv.slow = slow
	r := newRig(t, drv)
	r.cfg.MaxWakes = 2
	r.start()
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			if _, err := r.wake(ref(fmt.Sprint("u", i), 5, 6), nil); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, 20*time.Second, "two wakes are under way", func() bool { return len(r.run.h.wakes) == 2 })
	_, err := r.wake(ref("late", 5, 6), func(w *hostv1.WakeRequest) { w.Deadline = timestampIn(200 * time.Millisecond) })
	if !errs.Is(err, errkind.Deadline) {
		t.Errorf("a wake that had to wait too long gave %v", err)
	}
	close(slow)
	wg.Wait()
}

// TestBusRestart: the bus goes and comes back; sessions, their grants and their execs go on.
func TestBusRestart(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	st := c.mustOpen(execOp("x1", "sh", "-c", "sleep 1; echo through; exit 5"))
	_ = st
	r.run.conn.NATS().ForceReconnect()
	c.conn.NATS().ForceReconnect()
	var again *cstream
	eventually(t, 10*time.Second, "the exec can be attached again", func() bool {
		var err error
		again, err = c.open(attachOp("x1", 0))
		return err == nil
	})
	if o, err := again.drain(); err != nil || string(o.stdout) != "through\n" || o.exit.GetCode() != 5 {
		t.Errorf("%q %v %v", o.stdout, o.exit, err)
	}
	r.sleepWhenIdle(one)
}

// TestKilledAtAnyMoment: hostagent is killed with SIGKILL at random moments of wakes and sleeps of
// real sandboxes. Each time the next start goes on: the session wakes with its newest file, and at
// the end nothing is left.
func TestKilledAtAnyMoment(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: -short")
	}
	r := realRig(t)
	p := newPeer(t, r)
	epoch, counter := uint64(10), 0
	last := (*corev1.SessionRef)(nil)
	rng := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	for round := range 8 {
		p.start()
		epoch++
		next := ref("ann", 5, epoch)
		// A kill somewhere in the wake, then the wake is asked for again as scheduler would.
		go func(d time.Duration) { time.Sleep(d); p.kill() }(time.Duration(rng.IntN(300)) * time.Millisecond)
		_, first := p.wake(next, last)
		p.dead()
		p.start()
		if _, err := p.wake(next, last); err != nil {
			// Spent means that the first one went well and its sandbox died with the kill.
			t.Fatalf("round %d: wake after a kill: %v (the first try: %v)", round, err, first)
		}
		r.sched.set(next, corev1.State_STATE_ACTIVE)
		c := p.client(next)
		if counter > 0 {
			if got, err := c.download("/root/counter"); err != nil || string(got) != fmt.Sprint(counter) {
				t.Fatalf("round %d: the counter is %q, want %d: %v", round, got, counter, err)
			}
		}
		counter++
		if _, err := c.upload("/root/counter", []byte(fmt.Sprint(counter))); err != nil {
			t.Fatal(err)
		}
		// A kill somewhere in the sleep, then the sleep is asked for again.
		go func(d time.Duration) { time.Sleep(d); p.kill() }(time.Duration(rng.IntN(200)) * time.Millisecond)
		r.sched.set(next, corev1.State_STATE_SLEEPING)
		_, _ = r.sleep(next, time.Time{}, true)
		p.dead()
		if r.sched.state(next) != corev1.State_STATE_ASLEEP {
			p.start()
			eventually(t, 20*time.Second, "the sleep goes on", func() bool {
				r.sched.set(next, corev1.State_STATE_SLEEPING)
				_, err := r.sleep(next, time.Time{}, true)
				return err == nil || errs.Is(err, errkind.StaleEpoch)
			})
			p.kill()
			p.dead()
		}
		last = next
	}
	p.start()
	must(t, r.delete(last))
	p.stop()
}

// peer is a hostagent in a process of its own.
type peer struct {
	t    *testing.T
	r    *rig
	dir  string
	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
	log  *os.File
}

func newPeer(t *testing.T, r *rig) *peer {
	p := &peer{t: t, r: r, dir: t.TempDir()}
	var err error
	p.log, err = os.Create(filepath.Join(p.dir, "log"))
	must(t, err)
	t.Cleanup(func() {
		if b, err := os.ReadFile(p.log.Name()); err == nil && t.Failed() {
			t.Logf("log of the hostagents:\n%s", b)
		}
	})
	login, err := r.bus.Login(subjects.Host(testHost))
	must(t, err)
	writeYAML(t, filepath.Join(p.dir, "login.yaml"), login)
	writeYAML(t, filepath.Join(p.dir, "config.yaml"), r.cfg)
	t.Cleanup(func() { p.kill() })
	return p
}

func writeYAML(t *testing.T, path string, v any) {
	b, err := yaml.Marshal(v)
	must(t, err)
	must(t, os.WriteFile(path, b, 0o600))
}

func (p *peer) start() {
	p.t.Helper()
	p.mu.Lock()
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), "BERTH_TEST_ROLE=hostagent", "BERTH_TEST_DIR="+p.dir)
	p.cmd.Stderr = p.log
	must(p.t, p.cmd.Start())
	cmd, done := p.cmd, make(chan struct{})
	p.done = done
	go func() { _ = cmd.Wait(); close(done) }()
	p.mu.Unlock()
	began := time.Now()
	p.r.alive = done
	eventually(p.t, 30*time.Second, "the hostagent answers", func() bool {
		// The bus may still hand a request to the process that was killed: ask again soon.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, err := bus.InvokeHost[*hostv1.DeleteReply](ctx, p.r.ask, testHost, "delete", &hostv1.DeleteRequest{Session: ref("nobody", 1, 1)})
		return err == nil
	})
	p.t.Logf("started in %s", time.Since(began))
}

func (p *peer) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
	}
}

func (p *peer) dead() { <-p.done }

func (p *peer) stop() {
	_ = p.cmd.Process.Signal(os.Interrupt)
	p.dead()
}

func (p *peer) wake(next, last *corev1.SessionRef) (*hostv1.WakeReply, error) {
	return p.r.wake(next, func(w *hostv1.WakeRequest) {
		tierTerms(corev1.Tier_TIER_CONTAINER)(w)
		if last != nil {
			resume(p.r, last)(w)
		}
	})
}

// client makes a client that seals to the peer's key.
func (p *peer) client(ref *corev1.SessionRef) *client {
	b, err := os.ReadFile(filepath.Join(p.r.cfg.Dir, "host.key"))
	must(p.t, err)
	k, err := seal.ParseSeed(string(b[:len(b)-1]))
	must(p.t, err)
	return p.r.clientWith(subjects.Frontend("acme", "web"), ref, k.Public())
}
