package drivertest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// warmTheme is the theme of the checks of warm sandboxes.
const warmTheme = "warm"

// preparer opens a driver that makes warm sandboxes.
func (s *suite) preparer(t *testing.T) (driver.Driver, driver.Preparer) {
	t.Helper()
	d := s.open(t)
	p, ok := d.(driver.Preparer)
	if !ok {
		t.Fatal("it declares that it prepares sandboxes, and is no Preparer")
	}
	return d, p
}

func prepare(t *testing.T, p driver.Preparer, w driver.WarmSpec) driver.Sandbox {
	t.Helper()
	sb, err := p.Prepare(ctx(t), w)
	if err != nil {
		t.Fatalf("prepare: %v", err)
	}
	return sb
}

// claim claims a sandbox and lets its first process enter.
func (s *suite) claim(t *testing.T, p driver.Preparer, id ids.SandboxID, spec driver.Spec) (driver.Sandbox, *Talk) {
	t.Helper()
	sb, err := p.Claim(ctx(t), id, spec)
	if err != nil {
		t.Fatalf("claim: %v", err)
	}
	if err := enter(t, s.host, sb); err != nil {
		t.Fatalf("enter: %v", err)
	}
	return sb, s.talk(t, sb)
}

// waiting checks that the one sandbox that the driver shows is warm and nobody's.
func waiting(t *testing.T, d driver.Driver, id ids.SandboxID) {
	t.Helper()
	f := only(t, d)
	if f.ID != id || f.State != driver.Waiting || !f.Warm() || !f.Generation.IsZero() || !f.Epoch.IsZero() || len(f.Parts) == 0 {
		t.Errorf("a warm sandbox is shown as %+v", f)
	}
}

// refusesClaim checks that a sandbox that was warm once cannot be had by anybody.
func (s *suite) refusesClaim(t *testing.T, p driver.Preparer, id ids.SandboxID, spec driver.Spec) {
	t.Helper()
	if sb, err := p.Claim(ctx(t), id, spec); !errs.Is(err, errkind.NotFound) && !errs.Is(err, errkind.Conflict) {
		t.Errorf("it was warm before, and a claim of it gives %+v, %v", sb, err)
	}
}

// warmWaits: a prepared sandbox that is taken for a session's, or that nobody finds again, or a repeated
// request that prepares a second one under one name.
func (s *suite) warmWaits(t *testing.T) {
	d, p := s.preparer(t)
	before := s.host.Left(t)
	w := warmOf(s.spec(t, 1, 1))
	sb := prepare(t, p, w)
	if sb.ID != w.ID || !sb.Warm() || sb.Tier != s.tier || len(sb.Steps) == 0 {
		t.Errorf("asked for %s, got %+v", w.ID, sb)
	}
	waiting(t, d, w.ID)
	if again := prepare(t, p, w); again.ID != sb.ID || again.PID != sb.PID || again.Channel != sb.Channel {
		t.Errorf("prepared again: %+v, first %+v", again, sb)
	}
	waiting(t, d, w.ID)
	for range 2 {
		s.stop(t, d, sb)
		s.nothing(t, d, before)
	}
}

// warmAtOnce: requests at the same time that prepare two sandboxes under one name, or one for two names.
func (s *suite) warmAtOnce(t *testing.T) {
	d, p := s.preparer(t)
	spec := s.spec(t, 1, 1)
	one, two := warmOf(spec), warmOf(spec)
	var wg sync.WaitGroup
	for _, w := range []driver.WarmSpec{one, two, one, two} {
		wg.Go(func() {
			if sb, err := p.Prepare(ctx(t), w); err != nil || sb.ID != w.ID {
				t.Errorf("prepare: %+v, %v", sb, err)
			}
		})
	}
	wg.Wait()
	if found := list(t, d); len(found) != 2 {
		t.Errorf("two were prepared, and list shows %+v", found)
	}
}

// warmWrong: a request without a name of its own, or for a wall that is not there, that makes something;
// or a claim of nothing that gives something.
func (s *suite) warmWrong(t *testing.T) {
	d, p := s.preparer(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	for name, wrong := range map[string]struct {
		change func(*driver.WarmSpec)
		kind   errkind.Kind
	}{
		"no name":            {func(w *driver.WarmSpec) { w.ID = "" }, errkind.Invalid},
		"a session's name":   {func(w *driver.WarmSpec) { w.ID = spec.ID() }, errkind.Invalid},
		"a path":             {func(w *driver.WarmSpec) { w.ID = "w../../../../../../../../et" }, errkind.Invalid},
		"another tier":       {func(w *driver.WarmSpec) { w.Tier = "strongest" }, errkind.Unimplemented},
		"no memory":          {func(w *driver.WarmSpec) { w.Limits.MemoryBytes = 0 }, errkind.Invalid},
		"no host name":       {func(w *driver.WarmSpec) { w.Hostname = "a b/c" }, errkind.Invalid},
		"variable with NUL":  {func(w *driver.WarmSpec) { w.Env = []string{"A=\x00"} }, errkind.Invalid},
		"program without it": {func(w *driver.WarmSpec) { w.Init = []string{"", "x"} }, errkind.Invalid},
	} {
		w := warmOf(spec)
		wrong.change(&w)
		if _, err := p.Prepare(ctx(t), w); !errs.Is(err, wrong.kind) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := p.Claim(ctx(t), ids.NewWarmID(), spec); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a claim of what was never prepared: %v", err)
	}
	s.nothing(t, d, before)
	w := warmOf(spec)
	prepare(t, p, w)
	bad := spec
	bad.Session = "../../../etc"
	if _, err := p.Claim(ctx(t), w.ID, bad); !errs.Is(err, errkind.Invalid) {
		t.Errorf("a claim for no session: %v", err)
	}
	waiting(t, d, w.ID)
}

// claimers is how many want one sandbox at the same time.
const claimers = 50

// claimedOnce: one sandbox that two sessions get.
func (s *suite) claimedOnce(t *testing.T) {
	d, p := s.preparer(t)
	before := s.host.Left(t)
	spec := s.spec(t, 1, 1)
	w := warmOf(spec)
	prepare(t, p, w)
	won := make(chan driver.Sandbox, claimers)
	var wg sync.WaitGroup
	for i := range claimers {
		wg.Go(func() {
			own := spec
			own.Session = ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint("claimer", i), "default")
			sb, err := p.Claim(ctx(t), w.ID, own)
			switch {
			case err == nil && sb.Session == own.Session:
				won <- sb
			case err == nil:
				t.Errorf("%s claimed it, and it is of %s", own.Session, sb.Session)
			case !errs.Is(err, errkind.Conflict) && !errs.Is(err, errkind.NotFound):
				t.Errorf("claim: %v", err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 {
		t.Fatalf("%d claims of one sandbox were granted", len(won))
	}
	sb := <-won
	if f := only(t, d); f.ID != w.ID || f.ID != sb.ID || f.Session != sb.Session || f.Epoch != spec.Epoch || f.State != driver.Running {
		t.Errorf("claimed as %+v, shown as %+v", sb, f)
	}
	if err := enter(t, s.host, sb); err != nil {
		t.Fatal(err)
	}
	s.talk(t, sb).must(t, "echo", "mine alone")
	s.refusesClaim(t, p, w.ID, s.spec(t, 2, 1))
	s.stop(t, d, sb)
	s.refusesClaim(t, p, w.ID, s.spec(t, 2, 1))
	s.nothing(t, d, before)
}

// claimedIsIt: a claimed sandbox beside which a repeated or a later request starts a second one.
func (s *suite) claimedIsIt(t *testing.T) {
	d, p := s.preparer(t)
	spec := s.spec(t, 1, 1)
	w := strange(p, spec)
	prepare(t, p, w)
	sb, k := s.claim(t, p, w.ID, spec)
	if again := s.create(t, d, spec); again.ID != sb.ID || again.PID != sb.PID || again.Channel != sb.Channel {
		t.Errorf("created after its claim: %+v, claimed %+v", again, sb)
	}
	next := spec
	next.Epoch.Index++
	if _, err := d.Create(ctx(t), next); !errs.Is(err, errkind.Busy) {
		t.Errorf("two epochs of one session: %v", err)
	}
	k.must(t, "echo", "untouched")
	f := only(t, d)
	if f.State != driver.Running || f.Session != spec.Session || f.Generation != spec.Generation || f.Epoch != spec.Epoch || f.Tier != sb.Tier ||
		f.Channel != sb.Channel || f.PID != sb.PID || f.Cgroup != sb.Cgroup {
		t.Errorf("claimed %+v, shown %+v", sb, f)
	}
	s.stop(t, d, sb)
	if sb = s.create(t, d, next); sb.Epoch != next.Epoch {
		t.Errorf("the next epoch is %+v", sb)
	}
}

// claimBusy: a session that gets a second sandbox by a claim, or a refused claim that uses a sandbox up.
func (s *suite) claimBusy(t *testing.T) {
	d, p := s.preparer(t)
	spec := s.spec(t, 1, 1)
	awake, k := s.start(t, d, 1, 1)
	w := warmOf(spec)
	prepare(t, p, w)
	for i := range uint64(2) { // the epoch that is awake, and a later one
		own := spec
		own.Epoch.Index += i
		if _, err := p.Claim(ctx(t), w.ID, own); !errs.Is(err, errkind.Busy) {
			t.Errorf("claimed for a session that is awake: %v", err)
		}
	}
	k.must(t, "echo", "untouched")
	s.stop(t, d, awake)
	waiting(t, d, w.ID)
	spec.Epoch.Index++
	_, k = s.claim(t, p, w.ID, spec)
	k.must(t, "echo", "now")
}

// claimsOfOne: two claims and a start of one session at the same time, which give it two sandboxes, or use
// up what they refuse.
func (s *suite) claimsOfOne(t *testing.T) {
	d, p := s.preparer(t)
	for i := range uint64(3) {
		spec := s.spec(t, 1, i+1)
		warm := []driver.WarmSpec{warmOf(spec), warmOf(spec)}
		got, errors := make([]driver.Sandbox, 3), make([]error, 3)
		for _, w := range warm {
			prepare(t, p, w)
		}
		var wg sync.WaitGroup
		for n, w := range warm {
			wg.Go(func() { got[n], errors[n] = p.Claim(ctx(t), w.ID, spec) })
		}
		wg.Go(func() { got[2], errors[2] = d.Create(ctx(t), spec) })
		wg.Wait()
		if errors[2] != nil {
			t.Fatalf("create: %v", errors[2])
		}
		for n, w := range warm {
			at := slices.IndexFunc(list(t, d), func(f driver.Found) bool { return f.ID == w.ID })
			switch {
			case errors[n] == nil && got[n].ID != got[2].ID:
				t.Errorf("claimed as %s and created as %s", got[n].ID, got[2].ID)
			case errors[n] != nil && !errs.Is(errors[n], errkind.Busy):
				t.Errorf("claim: %v", errors[n])
			case errors[n] != nil && (at < 0 || list(t, d)[at].State != driver.Waiting):
				t.Errorf("the refused claim of %s used it up: %+v", w.ID, list(t, d))
			}
		}
		for _, f := range list(t, d) {
			if f.Session != "" && f.ID != got[2].ID {
				t.Errorf("beside %s there is %+v", got[2].ID, f)
			}
			s.stop(t, d, f.Sandbox)
		}
	}
}

// claimUnfit: a claim that binds less than was asked for, or a refused one that changes something.
func (s *suite) claimUnfit(t *testing.T) {
	d, p := s.preparer(t)
	spec := s.spec(t, 1, 1)
	w := warmOf(spec)
	prepare(t, p, w)
	before := s.host.Left(t)
	if why := p.Fits(w, spec); why != "" {
		t.Errorf("it was prepared for just this, and does not fit: %s", why)
	}
	unfit := 0
	for name, change := range map[string]func(*driver.Spec){
		"tier": func(x *driver.Spec) { x.Tier = "strongest" },
		"image": func(x *driver.Spec) {
			x.Image.Digest, x.Image.Lower, x.Image.Block = "sha256:other", "/no/such", "/no/such"
		},
		"program":     func(x *driver.Spec) { x.Guest, x.Init = "", []string{"/no/such/program"} },
		"run folder":  func(x *driver.Spec) { x.RunDir += "-other" },
		"memory":      func(x *driver.Spec) { x.Limits.MemoryBytes += 32 << 20 },
		"cpu":         func(x *driver.Spec) { x.Limits.CPUMillis += 3000 },
		"open files":  func(x *driver.Spec) { x.Limits.OpenFiles = 99 },
		"environment": func(x *driver.Spec) { x.Env = append(slices.Clone(x.Env), "OTHER=1") },
		"host name":   func(x *driver.Spec) { x.Hostname = "another" },
	} {
		own := spec
		change(&own)
		why := p.Fits(w, own)
		if why == "" {
			continue // a claim binds it, which other checks look at
		}
		unfit++
		t.Logf("another %s does not fit: %s", name, why)
		if _, err := p.Claim(ctx(t), w.ID, own); !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("claimed with another %s: %v", name, err)
		}
		waiting(t, d, w.ID)
	}
	if unfit == 0 {
		t.Error("it fits everything, another tier too")
	}
	if left := s.host.Left(t); len(left) != len(before) {
		t.Errorf("before the refused claims %v, after them %v", before, left)
	}
	_, k := s.claim(t, p, w.ID, spec)
	k.must(t, "echo", "it fits")
}

// claimGivenUp: a caller that gives up in the middle of a claim and leaves what no list shows, or what
// another one can claim half-bound.
func (s *suite) claimGivenUp(t *testing.T) {
	d, p := s.preparer(t)
	w := warmOf(s.spec(t, 9, 1))
	prepare(t, p, w)
	began := time.Now()
	sb, err := p.Claim(ctx(t), w.ID, s.spec(t, 9, 1))
	if err != nil {
		t.Fatal(err)
	}
	whole := time.Since(began)
	s.stop(t, d, sb)
	before := s.host.Left(t)
	for i := range 6 {
		spec := s.spec(t, 1, uint64(i+1))
		w := warmOf(spec)
		prepare(t, p, w)
		c, cancel := context.WithTimeout(ctx(t), whole*time.Duration(i)/6)
		_, err := p.Claim(c, w.ID, spec)
		cancel()
		found := list(t, d)
		switch left := s.host.Left(t); {
		case err == nil && (len(found) != 1 || found[0].State != driver.Running):
			t.Errorf("claimed, and shown as %+v", found)
		case err != nil && len(found) == 0 && len(left) > len(before):
			t.Errorf("given up after %d/6: %v is left and not shown", i, left)
		case err != nil && len(found) == 1 && found[0].State == driver.Waiting: // nothing was changed
			s.claim(t, p, w.ID, spec)
		}
		if err := d.Stop(ctx(t), w.ID); err != nil {
			t.Errorf("stop: %v", err)
		}
		s.nothing(t, d, before)
	}
}
