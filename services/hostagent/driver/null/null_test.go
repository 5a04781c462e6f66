package null

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest/answer"
	"github.com/berth-dev/berth/services/hostagent/driver/router"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// host is a drivertest.Host in memory.
type host struct {
	dir   string
	world *World
	last  *Driver
	// wrap puts another driver around it.
	wrap func(driver.Driver) driver.Driver
}

var (
	_ drivertest.Host     = (*host)(nil)
	_ drivertest.Killer   = (*host)(nil)
	_ drivertest.Litterer = (*host)(nil)
	_ drivertest.Breaker  = (*host)(nil)
)

// guest is a probe that knows how to end.
func guest(_ context.Context, in io.Reader, out io.Writer) (status uint32) {
	answer.Serve(in, out, func(op string, args []string) (string, error) {
		if op != "exit" {
			return "", errors.ErrUnsupported
		}
		n, err := strconv.Atoi(args[0])
		status = uint32(n)
		return "", errors.Join(err, io.EOF)
	})
	return status
}

func (h *host) Open(t testing.TB) driver.Driver {
	t.Helper()
	d, err := Open(Config{Dir: h.dir, World: h.world, Guest: guest})
	if err != nil {
		t.Fatal(err)
	}
	h.last = d
	if h.wrap != nil {
		return h.wrap(d)
	}
	return d
}

func (h *host) Spec(t testing.TB, session int, epoch uint64) driver.Spec {
	t.Helper()
	return driver.Spec{
		Session:    ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint(session), "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: epoch},
		Tier: driver.Null, Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, PIDs: 64},
	}
}

func (h *host) Left(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(h.dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// Crash implements drivertest.Host.
func (h *host) Crash(_ driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return h.fail([]string{"sandbox.folder", "sandbox.pipes"}, n, hard)
}

// Break implements drivertest.Breaker.
func (h *host) Break(_ driver.Driver, _ driver.Tier, n int, hard bool) bool {
	return h.fail([]string{"sandbox.folder", "sandbox.pipes", "sandbox.claim", "sandbox.guest"}, n, hard)
}

func (h *host) fail(points []string, n int, hard bool) bool {
	if n >= len(points) {
		return false
	}
	h.last.run = steps.Runner{Crash: hard}
	if n >= 0 {
		h.last.run.Fault = func(name string) error {
			if name == points[n] {
				return errors.New("fault of the test")
			}
			return nil
		}
	}
	return true
}

// Kill implements drivertest.Killer.
func (h *host) Kill(_ testing.TB, sb driver.Sandbox) { h.world.Kill(sb.ID) }

// Litter implements drivertest.Litterer.
func (h *host) Litter(t testing.TB, _ driver.Tier, id ids.SandboxID) bool {
	t.Helper()
	if err := os.Mkdir(filepath.Join(h.dir, string(id)), 0o700); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestConformance(t *testing.T) {
	drivertest.Run(t, &host{dir: t.TempDir(), world: &World{}})
}

// TestConformanceBehindTheRouter: what puts several drivers behind one keeps the contract as well.
func TestConformanceBehindTheRouter(t *testing.T) {
	drivertest.Run(t, &host{dir: t.TempDir(), world: &World{}, wrap: func(d driver.Driver) driver.Driver {
		r, err := router.New(d)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}})
}

// TestConformanceOfClaimed: what was prepared for nobody is as good as what was made for its session.
func TestConformanceOfClaimed(t *testing.T) {
	drivertest.Run(t, drivertest.Claimed(&host{dir: t.TempDir(), world: &World{}}))
}

// TestBareClaimsAtOnceCostNothing: three hundred claims start no goroutine and leave no file, and each gets
// a sandbox of its own.
func TestBareClaimsAtOnceCostNothing(t *testing.T) {
	h := &host{dir: t.TempDir()}
	d, err := Open(Config{Dir: h.dir, Bare: true})
	if err != nil {
		t.Fatal(err)
	}
	const n = 300
	routines := runtime.NumGoroutine()
	var names [n]ids.SandboxID
	for i := range names {
		names[i] = ids.NewWarmID()
		if _, err := d.Prepare(t.Context(), driver.WarmSpec{ID: names[i], Tier: driver.Null, Limits: h.Spec(t, i, 1).Limits}); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() {
			if sb, err := d.Claim(t.Context(), name, h.Spec(t, i, 1)); err != nil || sb.ID != name {
				t.Errorf("claim: %+v, %v", sb, err)
			}
		})
	}
	wg.Wait()
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > routines && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // those of the claims end
	}
	found, err := d.List(t.Context())
	if err != nil || len(found) != n || len(h.Left(t)) != 0 || runtime.NumGoroutine() > routines {
		t.Errorf("%d claimed, %v, %d files, %d goroutines, before %d", len(found), err, len(h.Left(t)), runtime.NumGoroutine(), routines)
	}
}

func TestTheDefaultGuestReturnsWhatItReads(t *testing.T) {
	d, err := Open(Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{}
	sb, err := d.Create(context.Background(), h.Spec(t, 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.OpenFile(sb.Channel.Stdin, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Open(sb.Channel.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.WriteString("hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(out, b); err != nil || !bytes.Equal(b, []byte("hello")) {
		t.Errorf("got %q, %v", b, err)
	}
	if err := d.Stop(context.Background(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if n, err := out.Read(b); err != io.EOF {
		t.Errorf("after the stop: %d bytes, %v", n, err)
	}
	_ = in.Close()
	_ = out.Close()
}

func BenchmarkCreateStop(b *testing.B) {
	d, err := Open(Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	h := &host{}
	for n := range b.N {
		sb, err := d.Create(context.Background(), h.Spec(b, n, 1))
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Stop(context.Background(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}
