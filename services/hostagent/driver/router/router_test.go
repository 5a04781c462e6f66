package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/driver/drivertest/answer"
	"github.com/berth-dev/berth/services/hostagent/driver/null"
)

// tiered is a driver in memory that calls its tier something else.
type tiered struct {
	*null.Driver
	tier    driver.Tier
	strays  []ids.SandboxID // cgroups that it finds below the shared parent
	stopped atomic.Int32
	froze   atomic.Int32
	hold    chan struct{} // Create waits for it
}

func (d *tiered) Capabilities() map[driver.Tier]driver.Capabilities {
	return map[driver.Tier]driver.Capabilities{d.tier: d.Driver.Capabilities()[driver.Null]}
}

func (d *tiered) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	if d.hold != nil {
		<-d.hold
	}
	spec.Tier = driver.Null
	sb, err := d.Driver.Create(ctx, spec)
	sb.Tier = d.tier
	return sb, err
}

func (d *tiered) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	w.Tier = driver.Null
	sb, err := d.Driver.Prepare(ctx, w)
	sb.Tier = d.tier
	return sb, err
}

func (d *tiered) Claim(ctx context.Context, warm ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	if d.hold != nil {
		<-d.hold
	}
	spec.Tier = driver.Null
	sb, err := d.Driver.Claim(ctx, warm, spec)
	sb.Tier = d.tier
	return sb, err
}

func (d *tiered) Freeze(ctx context.Context, id ids.SandboxID) error {
	d.froze.Add(1)
	return d.Driver.Freeze(ctx, id)
}

func (d *tiered) Stop(ctx context.Context, id ids.SandboxID) error {
	d.stopped.Add(1)
	return d.Driver.Stop(ctx, id)
}

func (d *tiered) List(ctx context.Context) ([]driver.Found, error) {
	out, err := d.Driver.List(ctx)
	for i := range out {
		out[i].Tier = d.tier
	}
	for _, id := range d.strays {
		out = append(out, driver.Found{Sandbox: driver.Sandbox{ID: id}, State: driver.Partial, Parts: []string{"cgroup"}})
	}
	return out, err
}

// plain is a driver that can do nothing besides.
type plain struct{ driver.Driver }

func guest(_ context.Context, in io.Reader, out io.Writer) (status uint32) {
	pr, pw := io.Pipe()
	go func() { _, err := io.Copy(pw, in); _ = pw.CloseWithError(err) }()
	answer.Serve(pr, out, func(op string, args []string) (string, error) {
		if op != "exit" {
			return "", errors.ErrUnsupported
		}
		n, err := strconv.Atoi(args[0])
		status = uint32(n)
		_ = pr.Close()
		return "", err
	})
	return status
}

func open(t testing.TB, dir string, world *null.World, tier driver.Tier) *tiered {
	t.Helper()
	d, err := null.Open(null.Config{Dir: dir, World: world, Guest: guest})
	if err != nil {
		t.Fatal(err)
	}
	return &tiered{Driver: d, tier: tier}
}

func join(t testing.TB, all ...driver.Driver) *Driver {
	t.Helper()
	r, err := New(all...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func spec(t testing.TB, session int, epoch uint64, tier driver.Tier) driver.Spec {
	t.Helper()
	return driver.Spec{
		Session:    ids.DeriveSessionKey([]byte("k"), t.Name(), "t", fmt.Sprint(session), "default"),
		Generation: ids.Generation{Incarnation: 1, Index: 1}, Epoch: ids.Epoch{Incarnation: 1, Index: epoch},
		Tier: tier, Limits: driver.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, PIDs: 64},
	}
}

// TestASessionIsInOneTierAtATime: also while the other one is being made, and after a restart.
func TestASessionIsInOneTierAtATime(t *testing.T) {
	dir := t.TempDir()
	var wa, wb null.World
	a, b := open(t, dir+"/a", &wa, "a"), open(t, dir+"/b", &wb, "b")
	a.hold = make(chan struct{})
	r := join(t, a, b)
	done := make(chan error, 1)
	go func() { _, err := r.Create(t.Context(), spec(t, 1, 1, "a")); done <- err }()
	for r.maker(spec(t, 1, 1, "a").ID()) == nil {
		time.Sleep(time.Millisecond)
	}
	if _, err := r.Create(t.Context(), spec(t, 1, 2, "b")); !errs.Is(err, errkind.Busy) {
		t.Errorf("while it is made in another tier: %v", err)
	}
	close(a.hold)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	again := join(t, open(t, dir+"/a", &wa, "a"), open(t, dir+"/b", &wb, "b"))
	if _, err := again.Create(t.Context(), spec(t, 1, 2, "b")); !errs.Is(err, errkind.Busy) {
		t.Errorf("after a restart: %v", err)
	}
	if _, err := again.Create(t.Context(), spec(t, 1, 3, "c")); !errs.Is(err, errkind.Unimplemented) {
		t.Errorf("an unknown tier: %v", err)
	}
	// It ended behind the router's back: the note of it is not believed.
	if err := a.Driver.Stop(t.Context(), spec(t, 1, 1, "a").ID()); err != nil {
		t.Fatal(err)
	}
	sb, err := again.Create(t.Context(), spec(t, 1, 2, "b"))
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Stop(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
}

// TestWhoMadeItHandlesIt: after a restart, and where the drivers share the parent of the cgroups, so
// that each finds a part of the other's sandboxes.
func TestWhoMadeItHandlesIt(t *testing.T) {
	dir := t.TempDir()
	var wa, wb null.World
	first := join(t, open(t, dir+"/a", &wa, "a"), open(t, dir+"/b", &wb, "b"))
	sb, err := first.Create(t.Context(), spec(t, 1, 1, "b"))
	if err != nil {
		t.Fatal(err)
	}
	a := open(t, dir+"/a", &wa, "a")
	b := open(t, dir+"/b", &wb, "b")
	stray := driver.ID(sb.Session, sb.Generation, ids.Epoch{Incarnation: 9, Index: 9})
	a.strays = []ids.SandboxID{sb.ID, stray}
	b.strays = []ids.SandboxID{stray}
	r := join(t, a, b)
	if err := r.Freeze(t.Context(), sb.ID); err != nil || a.froze.Load() != 0 || b.froze.Load() != 1 {
		t.Errorf("freeze: %v, asked %d and %d", err, a.froze.Load(), b.froze.Load())
	}
	found, err := r.List(t.Context())
	if err != nil || len(found) != 2 {
		t.Fatalf("list: %+v, %v", found, err)
	}
	for _, f := range found {
		if f.ID == sb.ID && (f.Tier != "b" || f.State != driver.Running) {
			t.Errorf("the sandbox is told as %+v", f)
		}
	}
	if err := r.Stop(t.Context(), sb.ID); err != nil || a.stopped.Load() != 0 || b.stopped.Load() != 1 {
		t.Errorf("stop: %v, asked %d and %d", err, a.stopped.Load(), b.stopped.Load())
	}
	a.strays, b.strays = []ids.SandboxID{stray}, nil
	if err := r.Stop(t.Context(), stray); err != nil || a.stopped.Load() != 1 || b.stopped.Load() != 2 {
		t.Errorf("what nobody has: %v, asked %d and %d", err, a.stopped.Load(), b.stopped.Load())
	}
}

// TestASandboxThatIsBeingMadeIsNoStray: a neighbour that finds its cgroup must not have it swept.
func TestASandboxThatIsBeingMadeIsNoStray(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir+"/a", &null.World{}, "a"), open(t, dir+"/b", &null.World{}, "b")
	b.hold = make(chan struct{})
	want := spec(t, 1, 1, "b")
	r := join(t, a, b)
	done := make(chan error, 1)
	go func() { _, err := r.Create(t.Context(), want); done <- err }()
	for r.maker(want.ID()) == nil {
		time.Sleep(time.Millisecond)
	}
	a.strays = []ids.SandboxID{want.ID()}
	if found, err := r.List(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("list: %+v, %v", found, err)
	}
	close(b.hold)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestWhatADriverCannotDoIsRefused, and what does not exist is not found.
func TestWhatADriverCannotDoIsRefused(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir+"/a", &null.World{}, "a")
	b := open(t, dir+"/b", &null.World{}, "b")
	r := join(t, plain{a}, b)
	sb, err := r.Create(t.Context(), spec(t, 1, 1, "a"))
	if err != nil {
		t.Fatal(err)
	}
	calls := func(id ids.SandboxID) map[string]error {
		_, netns := r.Netns(t.Context(), id)
		return map[string]error{
			"freeze": r.Freeze(t.Context(), id), "thaw": r.Thaw(t.Context(), id), "netns": netns,
			"resize": r.Resize(t.Context(), id, driver.Limits{}), "disk": r.ResizeDisk(t.Context(), id, 1),
		}
	}
	for name, err := range calls(sb.ID) {
		if !errs.Is(err, errkind.Unimplemented) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, err := range calls(driver.ID(sb.Session, sb.Generation, ids.Epoch{Incarnation: 7, Index: 7})) {
		if !errs.Is(err, errkind.NotFound) {
			t.Errorf("%s of nothing: %v", name, err)
		}
	}
	if err := r.Snapshot(t.Context(), "a", driver.Image{}, driver.Limits{}); err != nil {
		t.Errorf("a tier that does not clone: %v", err)
	}
	if _, err := New(a, open(t, dir+"/c", &null.World{}, "a")); !errs.Is(err, errkind.Invalid) {
		t.Errorf("two drivers of one tier: %v", err)
	}
}

// brief is a driver whose watch ends.
type brief struct{ *tiered }

func (brief) Watch(context.Context) (<-chan driver.Event, error) {
	c := make(chan driver.Event)
	close(c)
	return c, nil
}

// TestAWatchThatEndsEndsAll: or the events of one driver would be missing for ever.
func TestAWatchThatEndsEndsAll(t *testing.T) {
	dir := t.TempDir()
	r := join(t, open(t, dir+"/a", &null.World{}, "a"), brief{open(t, dir+"/b", &null.World{}, "b")})
	events, err := r.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	select {
	case ev, ok := <-events:
		if ok {
			t.Errorf("got %+v", ev)
		}
	case <-time.After(5 * time.Second):
		t.Error("it goes on")
	}
}
