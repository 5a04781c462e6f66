package e2e

import (
	"context"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// killFor is how long TestKillNineWhileDisksAreSaved goes on.
const killFor = 30 * time.Second

// worker writes ever larger numbers to a session's file, saves it, puts it to sleep, wakes it and brings
// back earlier states, until everything is killed. It knows which numbers may be found afterwards.
type worker struct {
	name string
	next int
	// least is the last number whose write was acknowledged.
	least int
	// asked is set once a restore to the number old was asked for after all numbers up to since;
	// agreed, once it was also acknowledged.
	asked, agreed bool
	old, since    int
	saved         map[int]string // snapshots, by the number that they hold
	done          map[string]int // what was acknowledged, for the log
}

// allowed reports whether a number may be found.
func (w *worker) allowed(n int) bool {
	switch {
	case !w.asked:
		return n >= w.least
	case n == w.old || n > w.since:
		return true
	}
	return !w.agreed && n >= w.least
}

// found is what was there after a start: the reference from now on.
func (w *worker) found(n int) { w.least, w.asked, w.agreed = n, false, false }

// work goes on until ctx ends or something fails, as it does once everything is killed.
func (w *worker) work(ctx context.Context, e *testenv.Env, c *sdk.Client) {
	for round := 0; ctx.Err() == nil; round++ {
		s, err := c.Open(ctx, sdk.OpenOptions{Name: w.name, Risk: sdk.OwnCode()})
		if err != nil {
			return
		}
		w.next++
		if _, err := s.Files().Write(ctx, "/root/n", strings.NewReader(strconv.Itoa(w.next)), sdk.WriteOptions{}); err != nil {
			return
		}
		w.found(w.next)
		_ = s.Run(ctx, sdk.Cmd{Args: []string{"sh", "-c", "head -c 3000000 /dev/urandom > /root/bulk." + strconv.Itoa(w.next%7)}})
		m, err := s.Checkpoint(ctx)
		if err != nil {
			return
		}
		w.done["checkpoint"]++
		w.saved[w.next] = m.ID
		if rand.IntN(2) == 0 {
			continue
		}
		if err := s.Close(ctx); err != nil {
			return
		}
		w.done["sleep"]++
		if rand.IntN(2) == 0 && !w.restore(ctx, e, s.Key()) {
			return
		}
	}
}

// restore asks for one of the earlier states.
func (w *worker) restore(ctx context.Context, e *testenv.Env, key string) bool {
	for n, id := range w.saved {
		w.asked, w.agreed, w.old, w.since = true, false, n, w.next
		cmd := exec.CommandContext(ctx, e.Bin, "disk", "restore", key, "--snapshot", id)
		cmd.Env = append(os.Environ(), "BERTH_DIR="+e.Dir)
		if cmd.Run() != nil {
			return false
		}
		w.agreed = true
		w.done["restore"]++
		break
	}
	return true
}

// TestKillNineWhileDisksAreSaved kills berth up, or the whole machine, at random moments while disks are
// saved, put to sleep, woken and restored. After every start each session opens with a file that is no
// older than what was acknowledged, and can be written to: it is not frozen. In the end no clone, view
// or half-made image is left in the pool, and all that is stored is whole.
func TestKillNineWhileDisksAreSaved(t *testing.T) {
	_, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url, Disk: 128 << 20, Every: 5 * time.Second})
	workers := []*worker{}
	for _, name := range []string{"a", "b"} {
		workers = append(workers, &worker{name: name, saved: map[int]string{}, done: map[string]int{}})
	}
	kills, crashes := 0, 0
	for began := time.Now(); time.Since(began) < killFor; {
		workUntilKilled(t, e, workers, time.Duration(200+rand.IntN(2500))*time.Millisecond)
		if kills++; rand.IntN(4) == 0 {
			e.Crash()
			crashes++
		}
		e.Up()
		for _, w := range workers {
			s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{Name: w.name, Risk: sdk.OwnCode()})
			n, _ := strconv.Atoi(content(t, s, "/root/n"))
			if !w.allowed(n) {
				t.Fatalf("after %d kills session %s (%s) holds %d: %+v", kills, w.name, s.Origin(), n, *w)
			}
			put(t, s, "/root/alive", "alive")
			w.found(n)
		}
	}
	for _, w := range workers {
		t.Logf("%d kills, %d of the whole machine; %s: %d writes, %v", kills, crashes, w.name, w.next, w.done)
	}
	nothingIsLeft(t, e, workers)
}

func workUntilKilled(t *testing.T, e *testenv.Env, workers []*worker, after time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	for _, w := range workers {
		c := e.Client("acme", "ann")
		go func() { w.work(ctx, e, c); ended <- struct{}{} }()
	}
	time.Sleep(after) // the fault itself: any moment
	e.Kill()
	cancel()
	for range workers {
		<-ended
	}
}

// nothingIsLeft looks at a host whose sessions all sleep.
func nothingIsLeft(t *testing.T, e *testenv.Env, workers []*worker) {
	t.Helper()
	keys := map[string]bool{}
	for _, w := range workers {
		s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{Name: w.name, Risk: sdk.OwnCode()})
		keys[s.Key()] = true
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		verified(t, e, s.Key())
	}
	e.Down()
	e.Up()
	inv := &hostv1.InventoryReply{}
	if err := e.Operator().CallHost(t.Context(), "local", "inventory", &hostv1.InventoryRequest{}, inv); err != nil {
		t.Fatal(err)
	}
	if len(inv.GetStrays()) > 0 || len(inv.GetDisks()) != len(workers) {
		t.Errorf("the host has %d disks and strays %v", len(inv.GetDisks()), inv.GetStrays())
	}
	for _, m := range e.Mounts() {
		if strings.Contains(m, "/disks/mnt/") {
			t.Errorf("%s is still mounted", m)
		}
		if strings.HasPrefix(m, e.PoolDir()) && exec.CommandContext(t.Context(), "fsfreeze", "--unfreeze", m).Run() == nil {
			t.Errorf("%s was frozen", m)
		}
	}
	folders, err := filepath.Glob(filepath.Join(e.PoolDir(), "sessions", "*"))
	if err != nil || len(folders) != len(workers) {
		t.Errorf("folders of disks: %v %v", folders, err)
	}
	for _, dir := range folders {
		key, _, _ := strings.Cut(filepath.Base(dir), ".")
		if !keys[key] {
			t.Errorf("%s belongs to no session", dir)
		}
		files, _ := filepath.Glob(filepath.Join(dir, "*"))
		for _, f := range files {
			if name := filepath.Base(f); !slices.Contains([]string{"disk.img", "record.json", "base.img", "base.index"}, name) {
				t.Errorf("%s is left of a save or restore", f)
			}
		}
	}
}
