// Package storm has many users claim sandboxes of a pool at once while hosts, schedulers and the pool's
// own leader are killed, at random from a seed that is printed, and looks at every host meanwhile. It
// holds that no sandbox is ever two sessions', that none is a session's again after it was one's, that no
// session has two, that there are never more that nobody has claimed than the ceiling allows, and that
// every request is served in the end.
//
// BERTH_CLAIMS says how many opens (3,000; in make test-long 10,000), BERTH_SEED repeats a run as far as a machine repeats itself.
package storm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/testsize"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/first"
	"github.com/berth-dev/berth/test/testenv"
)

const (
	claims   = 3_000
	many     = 10_000 // claims at full size
	clients  = 50
	ceiling  = 60
	tries    = 5 // of one request, each with the SDK's own patience
	poolFile = "pools:\n  - {template: default, minimum: 40, ceiling: 60, in_flight: 16, share: 0.6, wait: 100ms, max_age: 1m}\n"
)

// TestNoSandboxIsClaimedTwiceWhateverDies: 50 clients of two tenants, three hosts, random kills.
func TestNoSandboxIsClaimedTwiceWhateverDies(t *testing.T) {
	opens := uint64(claims)
	if testsize.Long() {
		opens = many
	}
	total, seed := testenv.Number(t, "BERTH_CLAIMS", opens), testenv.Number(t, "BERTH_SEED", rand.Uint64())
	t.Logf("%d claims; to repeat the kills: BERTH_SEED=%d", total, seed)
	e := testenv.Cluster(t, "--hosts", "3", "--schedulers", "3", "--nats", "1", "--driver", "null", "--idle", "1h")
	ctx := t.Context()
	if err := e.ApplyPools(ctx, poolFile); err != nil {
		t.Fatal(err)
	}
	if err := e.AwaitWarm(ctx, "default", 30); err != nil {
		t.Fatal(err)
	}
	w := newWatch(t, e)
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer stop()
	watch.Go(func() { w.run(watching) })
	watch.Go(func() { killer{e: e, rng: rand.New(rand.NewPCG(seed, 0))}.run(watching) })
	var opened, warm atomic.Int64
	var load sync.WaitGroup
	for i := range clients {
		client := e.Client([]string{"acme", "globex"}[i%2], fmt.Sprintf("user%d", i))
		load.Go(func() {
			for n := 0; opened.Add(1) <= int64(total); n++ {
				if one(t, client, fmt.Sprintf("n%d", n)) {
					warm.Add(1)
				}
			}
		})
	}
	load.Wait()
	stop()
	watch.Wait()
	t.Logf("%d of %d opens were claims; looked at the hosts %d times, saw %d claimed sandboxes and at most %d that nobody had claimed (ceiling %d)",
		warm.Load(), total, w.looks, len(w.whose), w.most, ceiling)
	if warm.Load() == 0 || len(w.whose) == 0 || w.looks == 0 {
		t.Error("nothing was claimed, or nobody looked")
	}
}

// one opens a session and deletes it; it reports whether a warm sandbox was claimed.
func one(t *testing.T, c *sdk.Client, name string) (warm bool) {
	ctx := t.Context()
	err := again(func() error {
		s, err := c.Open(ctx, sdk.OpenOptions{Name: name})
		if lost(err) { // with its host, whose disks were in memory: begun anew
			return errors.Join(err, c.DeleteSession(ctx, sdk.UserSession{Name: name}))
		}
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		warm = first.Claimed(s)
		if err := s.Delete(ctx); err != nil {
			return fmt.Errorf("delete: %w", err)
		}
		return nil
	})
	if err != nil {
		t.Errorf("session %s is not served: %v", name, err)
	}
	return warm
}

func lost(err error) bool {
	var e *sdk.Error
	return errors.As(err, &e) && e.Kind == errkind.DataLoss
}

func again(do func() error) (err error) {
	for range tries {
		if err = do(); err == nil {
			return nil
		}
	}
	return err
}

// killer kills a member every few seconds; each is started again by its supervisor.
type killer struct {
	e   *testenv.Env
	rng *rand.Rand
}

func (k killer) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second + time.Duration(k.rng.Int64N(int64(3*time.Second)))):
		}
		all := k.e.Members()
		m := all[k.rng.IntN(len(all))]
		switch m.Service {
		case "hostagent", "pool", "scheduler", "lifecycle", "identity", "credentials":
			k.e.Member(m.Name).Kill()
		}
	}
}
