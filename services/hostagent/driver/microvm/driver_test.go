//go:build linux

package microvm

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest"
)

// openDriver opens a driver that stops everything at the end of the test.
func openDriver(t testing.TB, h *host) *Driver {
	t.Helper()
	d := h.Open(t).(*Driver)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		found, err := d.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, f := range found {
			if err := d.Stop(ctx, f.ID); err != nil {
				t.Error(err)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if left := h.Left(t); len(left) > 0 {
			t.Errorf("left on the host: %v", left)
		}
	})
	return d
}

func start(t testing.TB, d *Driver, spec driver.Spec) (driver.Sandbox, *drivertest.Talk) {
	t.Helper()
	sb, err := d.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	k, err := drivertest.Open(sb.Channel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	if _, err := k.Do("echo", "hello"); err != nil {
		t.Fatal(err)
	}
	return sb, k
}

func TestConformance(t *testing.T) { drivertest.Run(t, newHost(t)) }

// TestConformanceOfClaimed: a machine that was prepared is walled off like one that was made for its session.
func TestConformanceOfClaimed(t *testing.T) { drivertest.RunShared(t, drivertest.Claimed(newHost(t))) }
