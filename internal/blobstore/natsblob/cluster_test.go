package natsblob

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
	"gocloud.dev/blob"
	"gocloud.dev/blob/drivertest"
)

func TestConformanceOnThreeNodes(t *testing.T) {
	t.Parallel()
	c := bustest.StartCluster(t, host)
	conn, keeper := c.Connect(host), c.Connect(subjects.Keeper())
	drivertest.RunConformanceTests(t, func(context.Context, *testing.T) (drivertest.Harness, error) {
		return &harness{conn, keeper, 0}, nil
	}, []drivertest.AsTest{asTest{}})
}

// leaderOf is the node that leads the store's stream.
func leaderOf(t *testing.T, c *bustest.Cluster, keeper *bus.Conn) int {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		s, err := keeper.JetStream().Stream(ctx, "OBJ_"+store)
		cancel()
		if err == nil && s.CachedInfo().Cluster != nil && s.CachedInfo().Cluster.Leader != "" {
			return c.Index(s.CachedInfo().Cluster.Leader)
		}
	}
	t.Fatal("the store has no leader")
	return 0
}

func noise(n int, seed uint64) []byte {
	out := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range out {
		out[i] = byte(r.Uint32())
	}
	return out
}

// put repeats a write until it is acknowledged, as whoever saves a disk does.
func put(ctx context.Context, b *blob.Bucket, key string, data []byte) (failed int, err error) {
	for ; ; failed++ {
		if err = b.WriteAll(ctx, key, data, nil); err == nil || ctx.Err() != nil {
			return failed, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// The node that leads the store dies under writers and a reader: what was
// acknowledged is there whole, what was not is there whole or not at all, and
// the reader reads on.
func TestObjectsOutliveTheStoresLeader(t *testing.T) {
	t.Parallel()
	c := bustest.StartCluster(t, host)
	keeper := c.Connect(subjects.Keeper())
	leader := leaderOf(t, c, keeper)
	conn := c.Connect(host, (leader+1)%3)                                   // a lost connection ends a read, see the package
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // a write may stall once
	defer cancel()
	b := bucketOf(t, conn, 0)
	big := noise(24<<20, 7)
	if _, err := put(ctx, b, "big", big); err != nil {
		t.Fatal(err)
	}
	r, err := b.NewReader(ctx, "big", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	head := make([]byte, 1<<20)
	if _, err := io.ReadFull(r, head); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	acked, refused := map[string]uint64{}, 0
	var writers sync.WaitGroup
	begun := make(chan struct{}, 100)
	for w := range 3 {
		writers.Go(func() {
			for i := range 6 {
				key, seed := fmt.Sprintf("w%d/%d", w, i), uint64(w*100+i)
				n, err := put(ctx, b, key, noise(3<<20, seed))
				begun <- struct{}{}
				mu.Lock()
				refused += n
				if err == nil {
					acked[key] = seed
				}
				mu.Unlock()
			}
		})
	}
	<-begun
	c.Kill(leader)
	rest, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(append(head, rest...), big) {
		t.Errorf("the reader got %d of %d bytes: %v", len(head)+len(rest), len(big), err)
	}
	writers.Wait()
	if len(acked) != 18 {
		t.Errorf("%d of 18 writes were acknowledged", len(acked))
	}
	t.Logf("%d writes failed and were repeated", refused)
	c.Restart(leader)
	found := 0
	for list := b.List(nil); ; found++ {
		o, err := list.Next(ctx)
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := b.ReadAll(ctx, o.Key)
		want, known := acked[o.Key]
		if err != nil || known && !bytes.Equal(data, noise(3<<20, want)) {
			t.Errorf("%s: %d bytes, %v", o.Key, len(data), err)
		}
	}
	if found != 19 {
		t.Errorf("%d objects listed, want 19", found)
	}
}
