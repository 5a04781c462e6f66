package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
)

// TestSleepersAreEvictedLeastRecentlyUsedFirst: more sleeping sessions than the pool may hold. Those
// that slept longest lose their local image, never the newest one, and every one of them wakes with
// what it wrote.
func TestSleepersAreEvictedLeastRecentlyUsedFirst(t *testing.T) {
	_, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url, Disk: 160 << 20, Pool: 700 << 20, Reserve: 64 << 20, Evict: 50})
	c := e.Client("acme", "ann")
	const sessions = 6
	keys, want := make([]string, sessions), make([]string, sessions)
	for i := range sessions {
		o := sdk.OpenOptions{Name: fmt.Sprintf("s%d", i)}
		s := open(t, c, o)
		keys[i] = s.Key()
		want[i] = sh(t, s, "head -c 100000000 /dev/urandom > /root/f; sync; sha256sum /root/f")
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(images(t, e, keys[i])) == 0 {
			t.Errorf("the session that slept last, s%d, has no image", i)
		}
	}
	local := func() (out []bool) {
		for _, key := range keys {
			out = append(out, len(images(t, e, key)) > 0)
		}
		return out
	}
	var now []bool
	eventually(t, 20*time.Second, func() error {
		held := 0
		now = local()
		for _, is := range now {
			if is {
				held++
			}
		}
		if held > 3 { // 3 of 100 MB are below half of the pool
			return fmt.Errorf("there are still %d images: %v", held, now)
		}
		return nil
	})
	t.Logf("local images, in the order of their sleep: %v", now)
	if now[0] || !now[sessions-1] {
		t.Errorf("evicted were others than the least recently used: %v", now)
	}
	for i := 1; i < sessions; i++ {
		if now[i-1] && !now[i] {
			t.Errorf("s%d was evicted before s%d, which slept earlier: %v", i, i-1, now)
		}
	}
	for i := range sessions {
		s := open(t, c, sdk.OpenOptions{Name: fmt.Sprintf("s%d", i)})
		if got := sh(t, s, "sha256sum /root/f"); s.Origin() != sdk.Resumed || got != want[i] {
			t.Errorf("s%d is %s and holds %s, want %s", i, s.Origin(), got, want[i])
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
