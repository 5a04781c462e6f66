package containerd

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// TestSandboxesAreRemovedWhileTheHostHasNoLease: all are frozen together, and stay so; one that this host
// does not own any more is removed all the same, whether it was frozen or killed by then, and those beside
// it do not run meanwhile.
func TestSandboxesAreRemovedWhileTheHostHasNoLease(t *testing.T) {
	for _, killed := range []bool{false, true} {
		for _, tier := range []driver.Tier{driver.Container, driver.GVisor} {
			t.Run(string(tier)+map[bool]string{true: "/killed", false: "/frozen"}[killed], func(t *testing.T) {
				h := newHost(t)
				d := openDriver(t, h)
				sb, _ := start(t, d, h.Spec(t, 1, 1), tier)
				other, _ := start(t, d, h.Spec(t, 2, 1), tier)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				if err := d.cgroup.Freeze(ctx, d.cfg.Cgroup, true); err != nil {
					t.Fatal(err)
				}
				if killed {
					if err := d.cgroup.Stop(ctx, d.cfg.Cgroup); err != nil {
						t.Fatal(err)
					}
					if err := d.cgroup.Freeze(ctx, d.cfg.Cgroup, true); err != nil {
						t.Fatal(err)
					}
				}
				before, err := d.Stats(ctx, other.ID)
				if err != nil {
					t.Fatal(err)
				}
				if err := d.Stop(ctx, sb.ID); err != nil {
					t.Errorf("a sandbox is not removed: %v", err)
				}
				if after, err := d.Stats(ctx, other.ID); err != nil || after.CPU-before.CPU > 5*time.Millisecond {
					t.Errorf("the one beside it ran: %v %v, %v", before.CPU, after.CPU, err)
				}
				if err := d.Stop(ctx, other.ID); err != nil {
					t.Errorf("the other is not removed: %v", err)
				}
				if err := d.cgroup.Freeze(ctx, d.cfg.Cgroup, false); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
