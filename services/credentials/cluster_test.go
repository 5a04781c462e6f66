package credentials

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"os"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestMain(m *testing.M) {
	bustest.Child()
	os.Exit(m.Run())
}

// A restore elsewhere needs its data key, and an open its grant, while the
// bucket has no leader; a deletion waits for one, and then no replica gives
// the key out any more.
func TestKeysAndGrantsOutliveTheBucketsLeader(t *testing.T) {
	t.Parallel()
	c := bustest.StartCluster(t, subjects.Host("h1"))
	w := &world{dir: t.TempDir(), identity: c.Connect(subjects.Service("identity")),
		sched: c.Connect(subjects.Service("scheduler")), host: c.Connect(subjects.Host("h1"))}
	var err error
	if w.box, err = seal.RandomBox(); err != nil {
		t.Fatal(err)
	}
	_, w.proof, _ = ed25519.GenerateKey(rand.Reader)
	w.record = &schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_WAKING, Host: "h1"}
	if err := w.serveShow(t).Announce(); err != nil { // as scheduler does: a lost request is sent again
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	cfg := NewConfig()
	cfg.KeyDir = w.dir
	go func() {
		done <- Run(ctx, cfg, c.Connect(subjects.Service("credentials")), bustest.Log(t), func() { close(ready) })
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	first, err := w.invokeDataKey(t, w.host, ref(10, 12))
	if err != nil {
		t.Fatal(err)
	}
	// With two of three nodes dead the bucket has no leader until one is back,
	// however slow this machine is.
	leader := c.Replicated("KV_BERTH_DATAKEYS")
	other := (leader + 1) % 3
	c.Kill(leader, other)
	began := time.Now()
	again, err := w.invokeDataKey(t, w.host, ref(10, 12))
	if err != nil || !bytes.Equal(first, again) {
		t.Errorf("the key after the kill: same %v, %v", bytes.Equal(first, again), err)
	}
	t.Logf("data key after %s", time.Since(began).Round(time.Millisecond))
	if _, err := w.mint(t, w.mintReq(10, 12)); err != nil {
		t.Errorf("mint: %v", err)
	}
	t.Logf("grant after %s", time.Since(began).Round(time.Millisecond))
	c.Restart(leader, other)
	if err := w.revoke(t, 10); err != nil {
		t.Fatal(err)
	}
	t.Logf("revoked after %s", time.Since(began).Round(time.Millisecond))
	w.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_WAKING, Host: "h1"})
	_, err = w.invokeDataKey(t, w.host, ref(10, 12))
	wantKind(t, err, errkind.Superseded)
}
