package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// breaker is what makes a Prepare or a Claim fail.
func (s *suite) breaker(t *testing.T) Breaker {
	t.Helper()
	b, ok := s.host.(Breaker)
	if !ok {
		t.Fatal("the host cannot make a claim fail: nothing was tried")
	}
	return b
}

// tryClaim prepares a sandbox and claims it, one of which has to fail.
func (s *suite) tryClaim(t *testing.T, p driver.Preparer, n int, spec driver.Spec) driver.WarmSpec {
	t.Helper()
	w := warmOf(spec)
	_, err := p.Prepare(ctx(t), w)
	if err == nil {
		_, err = p.Claim(ctx(t), w.ID, spec)
	}
	if err == nil {
		t.Errorf("no failure at point %d", n)
	}
	return w
}

// claimFails: a failed claim of which something is left, or after which another session gets what was
// half made for the first.
func (s *suite) claimFails(t *testing.T) {
	b := s.breaker(t)
	d, p := s.preparer(t)
	before := s.host.Left(t)
	n := 0
	for ; b.Break(d, s.tier, n, false); n++ {
		w := s.tryClaim(t, p, n, s.spec(t, 1, 1))
		s.refusesClaim(t, p, w.ID, s.spec(t, 2, 1))
		s.nothing(t, d, before)
	}
	if n == 0 {
		t.Error("the host has no point of failure: nothing was tried")
	}
	b.Break(d, s.tier, -1, false)
	_, k := s.start(t, d, 1, 1) // the wake goes on without it
	k.must(t, "echo", "works after all")
}

// claimCrashes: an agent that is killed in the middle of a claim, at every step, after which the session
// runs half-bound, or another one gets its sandbox, or the remains stand in the way.
func (s *suite) claimCrashes(t *testing.T) {
	b := s.breaker(t)
	n := 0
	for ; ; n++ {
		dead := s.host.Open(t)
		if !b.Break(dead, s.tier, n, true) {
			_ = dead.Close()
			break
		}
		spec, p := s.spec(t, 1, 1), dead.(driver.Preparer)
		w := s.tryClaim(t, p, n, spec)
		s.refusesClaim(t, p, w.ID, s.spec(t, 2, 1))
		_ = dead.Close()
		d := s.host.Open(t)
		if f := only(t, d); f.ID != w.ID || f.Session != "" && f.Session != spec.Session || f.State == driver.Waiting {
			t.Errorf("point %d: after the crash it is shown as %+v", n, f)
		}
		s.refusesClaim(t, d.(driver.Preparer), w.ID, s.spec(t, 2, 1))
		if n%2 == 0 { // the sweep of the next start, or the same wake again
			s.stop(t, d, only(t, d).Sandbox)
			s.nothing(t, d, nil)
		}
		_, k := s.start(t, d, 1, 1)
		k.must(t, "echo", "healed")
		k.Close()
		s.clean(t, d)
	}
	if n == 0 {
		t.Error("the host has no point of failure: nothing was tried")
	}
	s.open(t) // and lets go of the disks
}

// warmOfAnother: a restart after which a warm sandbox is handed out that nobody knows the making of, or
// is kept for ever.
func (s *suite) warmOfAnother(t *testing.T) {
	first := s.host.Open(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	w := warmOf(spec)
	prepare(t, first.(driver.Preparer), w)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d, p := s.preparer(t)
	if f := only(t, d); f.ID != w.ID || f.State != driver.Partial || !f.Warm() || len(f.Parts) == 0 {
		t.Errorf("a warm one of an earlier driver is shown as %+v", f)
	}
	if _, err := p.Claim(ctx(t), w.ID, spec); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a claim of what an earlier driver prepared: %v", err)
	}
	s.stop(t, d, only(t, d).Sandbox)
	s.nothing(t, d, before)
}

// claimedAdopted: a restart that ends claimed sessions, or forgets whose they are.
func (s *suite) claimedAdopted(t *testing.T) {
	first := s.host.Open(t)
	spec := s.spec(t, 1, 1)
	w := warmOf(spec)
	prepare(t, first.(driver.Preparer), w)
	sb, k := s.claim(t, first.(driver.Preparer), w.ID, spec)
	k.Close()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	d, p := s.preparer(t)
	f := only(t, d)
	if f.State != driver.Running || f.ID != sb.ID || f.Session != spec.Session || f.Generation != spec.Generation || f.Epoch != spec.Epoch ||
		f.Channel != sb.Channel || f.PID != sb.PID {
		t.Fatalf("after a restart %+v, before %+v", f, sb)
	}
	s.talk(t, f.Sandbox).must(t, "echo", "after")
	if again := s.create(t, d, spec); again.ID != sb.ID || again.PID != sb.PID {
		t.Errorf("created again after a restart: %+v, first %+v", again, sb)
	}
	s.refusesClaim(t, p, w.ID, s.spec(t, 2, 1))
}

// warmEnds: a session that gets a sandbox whose first process has ended while it waited.
func (s *suite) warmEnds(t *testing.T) {
	d, p := s.preparer(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	w := warmOf(spec)
	sb := prepare(t, p, w)
	s.kill(t, sb)
	eventually(t, "it is not listed as waiting", func() bool { return only(t, d).State != driver.Waiting })
	if _, err := p.Claim(ctx(t), w.ID, spec); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a claim of one that has ended: %v", err)
	}
	s.stop(t, d, sb)
	s.nothing(t, d, before)
	s.start(t, d, 1, 1)
}

// warmStopRace: a sandbox that is taken away while it is claimed, after which it runs unknown to all, or a
// part of it is left.
func (s *suite) warmStopRace(t *testing.T) {
	d, p := s.preparer(t)
	before := s.host.Left(t)
	for i := range 4 {
		spec := s.spec(t, 1, uint64(i+1))
		w := warmOf(spec)
		prepare(t, p, w)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = p.Claim(ctx(t), w.ID, spec) }) // either order is right
		wg.Go(func() {
			if err := d.Stop(ctx(t), w.ID); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
		wg.Wait()
		s.nothing(t, d, before)
		s.refusesClaim(t, p, w.ID, spec)
	}
}

// warmPrivate: what one session left in a sandbox, or on what it is made of, for the next one's eyes.
func (s *suite) warmPrivate(t *testing.T) {
	d, p := s.preparer(t)
	one, two := s.spec(t, 1, 1), s.spec(t, 2, 1)
	const secret = "MARK=4711-of-the-first"
	one.Env = append(slices.Clone(one.Env), secret)
	a, b := warmOf(one), warmOf(two)
	prepare(t, p, a)
	prepare(t, p, b) // it waits while the first session works
	first, k := s.claim(t, p, a.ID, one)
	paths := []string{"/etc/left", "/var/left"}
	if s.caps.Native {
		paths = append(paths, "/tmp/left", "/run/left", "/dev/shm/left")
	}
	for _, path := range paths {
		k.must(t, "write", path, secret)
	}
	look := func(w driver.WarmSpec) {
		t.Helper()
		sb, k := s.claim(t, p, w.ID, two)
		for _, path := range paths {
			if got, err := k.Do("read", path); err == nil {
				t.Errorf("it reads %s of another session: %q", path, got)
			}
		}
		if strings.Contains(k.must(t, "env"), secret) {
			t.Error("it has the environment of another session")
		}
		if s.caps.Native {
			for _, below := range []string{"/proc", "/run", "/dev"} {
				if found, err := k.Do("find", below, string(one.Session)); err != nil || found != "" {
					t.Errorf("the name of another session is below %s: %s %v", below, found, err)
				}
			}
		}
		s.stop(t, d, sb)
	}
	look(b)
	s.stop(t, d, first)
	next := warmOf(two) // of what the first one had: ids, folders, memory
	prepare(t, p, next)
	two.Epoch.Index++
	look(next)
}

// claimedIsBound: a claimed sandbox with the environment, the host name, the files or the run folder of
// what was prepared, and not of its session.
func (s *suite) claimedIsBound(t *testing.T) {
	_, p := s.preparer(t)
	spec := s.spec(t, 1, 1)
	spec.Env = append(slices.Clone(spec.Env), "OWN=1")
	w := strange(p, spec)
	prepare(t, p, w)
	_, k := s.claim(t, p, w.ID, spec)
	env := k.must(t, "env")
	if !slices.Contains(strings.Split(env, "\n"), "OWN=1") || strings.Contains(env, "of-the-warm-one") {
		t.Errorf("its environment is %q", env)
	}
	if got := k.must(t, "read", "/etc/changed"); got != "image" {
		t.Errorf("a file of the image says %q", got)
	}
	k.must(t, "write", "/etc/mine", "kept")
	if !s.caps.RawDisk {
		if got := readHost(t, filepath.Join(spec.Disk, "upper/etc/mine")); got != "kept" {
			t.Errorf("on its disk is %q", got)
		}
	}
	if !s.caps.Native {
		return
	}
	if got := k.must(t, "hostname"); got != spec.Hostname {
		t.Errorf("it was given the name %q and is called %q", spec.Hostname, got)
	}
	if s.caps.RawDisk {
		return
	}
	if err := os.WriteFile(filepath.Join(spec.RunDir, "session.json"), []byte("news"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := k.must(t, "read", "/run/berth/session.json"); got != "news" {
		t.Errorf("its run folder says %q", got)
	}
}

// warmCopies: two warm sandboxes that are alike, or that live in the time of their making.
func (s *suite) warmCopies(t *testing.T) {
	d, p := s.preparer(t)
	one, two := s.spec(t, 1, 1), s.spec(t, 2, 1)
	a, b := warmOf(one), warmOf(two)
	prepare(t, p, a)
	prepare(t, p, b)
	pair := &pair{d: d, one: one, two: two}
	pair.a, pair.ka = s.claim(t, p, a.ID, one)
	pair.b, pair.kb = s.claim(t, p, b.ID, two)
	sub := &suite{host: s.host, tier: s.tier, caps: s.caps, all: s.all, pair: pair}
	sub.random(t)
	sub.clock(t)
}

// claimedLimits: a claimed sandbox with the limits of what was prepared, or with none.
func (s *suite) claimedLimits(t *testing.T) {
	d, p := s.preparer(t)
	m := optional[driver.Meter](t, d, "Meter")
	spec := s.spec(t, 1, 1)
	w := strange(p, spec)
	w.Limits.CPUMillis, w.Limits.MemoryBytes = 2*spec.Limits.CPUMillis, 2*spec.Limits.MemoryBytes
	spec.Limits.CPUMillis = 200
	if why := p.Fits(w, spec); why != "" {
		t.Logf("these limits are for a cold start: %s", why)
		w.Limits = spec.Limits
	}
	own := spec
	own.Limits.OpenFiles = 100
	files := s.caps.Native && s.caps.OpenFiles && p.Fits(w, own) == ""
	if files {
		spec = own
	}
	prepare(t, p, w)
	sb, k := s.claim(t, p, w.ID, spec)
	if share := s.share(t, m, sb, k, 1500); share > 0.3 || share < 0.01 {
		t.Errorf("it got %.2f of a core with a limit of 0.20", share)
	}
	if files {
		if n := number(t, k.must(t, "openmany", "1000")); n > 100 || n < 10 {
			t.Errorf("a process opened %d files with a limit of 100", n)
		}
	}
	if s.caps.Memory && !s.hog(t, k, int(spec.Limits.MemoryBytes>>20)*3/2) {
		t.Error("it took more than its memory")
	}
}

// claimedDetaches: the disk of a session that was claimed for, held by what is left of its sandbox, or by a
// warm one that was made while the disk was mounted and has a copy of the host's mounts.
func (s *suite) claimedDetaches(t *testing.T) {
	d, p := s.preparer(t)
	h, ok := s.host.(Detacher)
	if !ok {
		t.Skip("skipped: this test's host takes no disk off")
	}
	spec := s.spec(t, 1, 1)
	w, other := warmOf(spec), warmOf(s.spec(t, 2, 1))
	prepare(t, p, w)
	sb, k := s.claim(t, p, w.ID, spec)
	holder := prepare(t, p, other)
	if !s.caps.RawDisk && holder.PID != 0 {
		table := readHost(t, fmt.Sprintf("/proc/%d/mountinfo", holder.PID))
		if strings.Contains(table, " "+deviceOf(t, spec.Disk)+" ") {
			t.Error("a warm sandbox holds the disk of another session")
		}
	}
	k.must(t, "write", "/etc/mine", "kept")
	s.stop(t, d, sb)
	if err := WhileBusy(func() error { return h.Detach(t, spec) }); err != nil {
		t.Errorf("right after the stop its disk cannot be taken off: %v", err)
	}
}

// deviceOf is the number of the device at a path, as tables of mounts have it.
func deviceOf(t *testing.T, path string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
}
