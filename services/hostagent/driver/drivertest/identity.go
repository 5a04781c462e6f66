package drivertest

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

func sandboxID(s string) ids.SandboxID { return ids.SandboxID(s) }

// sameAtOnce: a request that is sent again while the first is still being served, and makes a second
// sandbox.
func (s *suite) sameAtOnce(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	const n = 8
	got := make([]driver.Sandbox, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			var err error
			if got[i], err = d.Create(ctx(t), spec); err != nil {
				t.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	for _, sb := range got {
		if sb.ID != got[0].ID || sb.PID != got[0].PID || sb.Channel != got[0].Channel {
			t.Errorf("two sandboxes: %+v and %+v", sb, got[0])
		}
	}
	only(t, d)
	s.talk(t, got[0])
}

// many: sandboxes of several sessions that are made and removed at the same time and get each other's
// parts.
func (s *suite) many(t *testing.T) {
	d := s.open(t)
	const n = 4
	var wg sync.WaitGroup
	specs := make([]driver.Spec, n)
	for i := range specs {
		specs[i] = s.spec(t, i+1, 1)
	}
	for _, spec := range specs {
		for range 2 { // each twice at the same time
			wg.Go(func() {
				if _, err := d.Create(ctx(t), spec); err != nil {
					t.Errorf("create: %v", err)
				}
			})
		}
	}
	wg.Wait()
	found := list(t, d)
	if len(found) != n {
		t.Fatalf("list shows %d: %+v", len(found), found)
	}
	for _, f := range found {
		wg.Go(func() {
			if err := d.Stop(ctx(t), f.ID); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
	}
	wg.Wait()
}

// epochsAtOnce: two hosts' worth of wakes at the same time that both get compute on one disk.
func (s *suite) epochsAtOnce(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	var made atomic.Int32
	var wg sync.WaitGroup
	for i := range uint64(4) {
		wg.Go(func() {
			own := spec
			own.Epoch.Index += i
			_, err := d.Create(ctx(t), own)
			if err == nil {
				made.Add(1)
			} else if !errs.Is(err, errkind.Busy) {
				t.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 1 {
		t.Errorf("%d epochs of one session run at once", made.Load())
	}
	only(t, d)
}

// took is how long one life of a sandbox takes to begin here.
func (s *suite) took(t *testing.T, d driver.Driver) time.Duration {
	t.Helper()
	began := time.Now()
	sb := s.create(t, d, s.spec(t, 9, 1))
	took := time.Since(began)
	s.stop(t, d, sb)
	return took
}

// stopWhileCreated: a delete that meets a start, after which a sandbox runs that nobody knows of, or a
// part of one is left.
func (s *suite) stopWhileCreated(t *testing.T) {
	d := s.open(t)
	whole := s.took(t, d)
	before := s.host.Left(t)
	for i := range 5 {
		spec := s.spec(t, 1, uint64(i+1))
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = d.Create(ctx(t), spec) }) // either order is right
		wg.Go(func() {
			<-time.After(whole * time.Duration(i) / 5)
			if err := d.Stop(ctx(t), spec.ID()); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
		wg.Wait()
		for _, f := range list(t, d) { // stopped before it was made
			if !s.named(f.ID, spec) || f.State != driver.Running {
				t.Errorf("a part is left: %+v", f)
			}
			s.stop(t, d, f.Sandbox)
		}
		s.nothing(t, d, before)
	}
}

// stopAtOnce: two deletes at once, of which one fails or hangs.
func (s *suite) stopAtOnce(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	sb, _ := s.start(t, d, 1, 1)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := d.Stop(ctx(t), sb.ID); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
	}
	wg.Wait()
	s.nothing(t, d, before)
}

// cancelled: a caller that gives up in the middle of a start and leaves what no list shows.
func (s *suite) cancelled(t *testing.T) {
	d := s.open(t)
	whole := s.took(t, d)
	before := s.host.Left(t)
	for i := range 6 {
		spec := s.spec(t, 1, uint64(i+1))
		c, cancel := context.WithTimeout(ctx(t), whole*time.Duration(i)/6)
		_, err := d.Create(c, spec)
		cancel()
		found := list(t, d)
		switch left := s.host.Left(t); {
		case err == nil && len(found) != 1:
			t.Errorf("made, and not shown: %+v", found)
		case err != nil && len(found) == 0 && len(left) > len(before):
			t.Errorf("given up after %d/6: %v is left and not shown", i, left)
		}
		if err := d.Stop(ctx(t), spec.ID()); err != nil {
			t.Errorf("stop: %v", err)
		}
		s.nothing(t, d, before)
	}
	s.start(t, d, 1, 9) // nothing of it stands in the way
}

// endless: a call that goes on after the time that its caller gave it.
func (s *suite) endless(t *testing.T) {
	d := s.open(t)
	c, cancel := context.WithCancel(ctx(t))
	cancel()
	began := time.Now()
	if _, err := d.Create(c, s.spec(t, 1, 1)); err == nil {
		return // made before it looked at the time
	} else if k := errs.Kind(err); k != errkind.Canceled && k != errkind.Deadline && k != errkind.Unavailable {
		t.Errorf("given up by its caller, and says %v: %v", k, err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it went on for %s", took)
	}
}
