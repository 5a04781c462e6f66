package hostagent

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warmKeeper keeps the warm sandboxes of this process. What may be done with each is decided by shelf, under
// one lock, which is never held while something is made or removed. It is taken after a session's lock,
// never before one.
type warmKeeper struct {
	h *host

	mu    sync.Mutex
	shelf *shelf.Shelf
	all   map[ids.SandboxID]*warm
	// closed says why nothing is prepared any more.
	closed string
	// drained is when this host was last told to hand its sessions over.
	drained time.Time
	heard   heardTerm
	// listened is when a command of that term was taken last.
	listened time.Time
	// told is which kinds had one left when scheduler was told last.
	told map[shelf.Kind]bool
}

// warm is one sandbox on the shelf.
type warm struct {
	name   ids.SandboxID
	cancel context.CancelFunc // of its making
	made   chan struct{}      // closed when its making ended; what follows is set then
	gone   chan struct{}      // closed when nothing of it is left

	err   error
	sb    driver.Sandbox
	spec  driver.WarmSpec
	guest *hostend.Conn // nil: it is greeted once it is claimed
}

func newKeeper(h *host) *warmKeeper {
	return &warmKeeper{h: h, shelf: shelf.New(), all: map[ids.SandboxID]*warm{}, told: map[shelf.Kind]bool{}}
}

// order is what a prepare asks for.
type order struct {
	shelf.Item
	terms    *corev1.Terms
	most     int
	deadline time.Time
}

// begin puts a sandbox on the shelf and has it made, unless it is there already. others is the memory
// that sessions may use in all.
func (k *warmKeeper) begin(o order, others uint64) (*warm, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if w := k.all[o.Name]; w == nil {
		if err := k.mayBegin(o, others); err != nil {
			return nil, err
		}
	}
	begun, err := k.shelf.Begin(o.Item, o.most, time.Now())
	if err != nil || !begun {
		return k.all[o.Name], err
	}
	ctx, cancel := context.WithDeadline(k.h.ctx, o.deadline)
	w := &warm{name: o.Name, cancel: cancel, made: make(chan struct{}), gone: make(chan struct{})}
	k.all[o.Name] = w
	k.h.ops.Go(func() {
		defer cancel()
		k.make(ctx, w, o)
	})
	return w, nil
}

// drainFor is how long a host that hands its sessions over prepares nothing, unless one wakes here.
const drainFor = time.Minute

// mayBegin refuses when this host should not hold any more warm sandboxes. mu is held.
func (k *warmKeeper) mayBegin(o order, others uint64) error {
	const op = "prepare sandbox"
	switch room := k.h.cfg.Capacity.MemoryBytes; {
	case k.closed != "":
		return errs.E(op, errkind.Unavailable, string(o.Name), k.closed)
	case time.Since(k.drained) < drainFor:
		return errs.E(op, errkind.Unavailable, string(o.Name), "this host is draining")
	case o.Memory > room || others+k.shelf.Memory() > room-o.Memory:
		return errs.Errorf(op, errkind.NoCapacity, "sessions and warm sandboxes have the memory of this host: %s of %s", size(others+k.shelf.Memory()), size(room))
	}
	return nil
}

// make makes a sandbox; of one that fails, or was retired meanwhile, nothing is left.
func (k *warmKeeper) make(ctx context.Context, w *warm, o order) {
	p := &preparing{h: k.h, w: w, order: o}
	_, err := k.h.steps.Run(ctx, p.table())
	k.mu.Lock()
	ok := err == nil && k.shelf.Made(w.name, p.image.Digest, time.Now())
	if err == nil && !ok {
		err = errs.E("prepare sandbox", errkind.Superseded, string(w.name), "it was retired before it was ready")
	}
	if w.err = err; !ok {
		k.shelf.Retire(w.name, time.Now())
	}
	close(w.made)
	k.mu.Unlock()
	k.h.meters.prepared(time.Since(p.began), err)
	if !ok {
		if k.h.ctx.Err() == nil && !errs.Is(err, errkind.Superseded) {
			k.h.log.Warn("a warm sandbox could not be prepared", "sandbox", w.name, "template", o.Kind, "error", err)
		}
		k.remove(w)
		return
	}
	k.changed()
	if w.guest != nil {
		go k.mind(w)
	}
}

// mind waits for the end of the guest's channel while the sandbox waits.
func (k *warmKeeper) mind(w *warm) {
	select {
	case <-w.guest.Done():
		k.lost(w.name, "its guest does not answer")
	case <-w.gone:
	case <-k.h.ctx.Done():
	}
}

// lost removes a sandbox that ended while it waited. One that a wake has is that wake's to notice, which
// does not put it back.
func (k *warmKeeper) lost(id ids.SandboxID, why string) {
	k.mu.Lock()
	is := k.shelf.Is(id)
	ready := (is == shelf.Ready || is == shelf.Taken) && k.closed == "" // else it stays for the next process
	k.mu.Unlock()
	if ready {
		k.h.log.Warn("a warm sandbox ended", "sandbox", id, "reason", why)
		k.retire([]ids.SandboxID{id})
	}
}

// retire takes sandboxes off the shelf and has them removed. It returns those that are not gone yet, and
// the names of those that are a session's or about to be.
func (k *warmKeeper) retire(names []ids.SandboxID) (going []*warm, claimed []ids.SandboxID) {
	k.mu.Lock()
	for _, name := range names {
		remove, taken := k.shelf.Retire(name, time.Now())
		w := k.all[name]
		switch {
		case taken:
			claimed = append(claimed, name)
			continue
		case w == nil:
			continue
		case remove:
			k.letGo(w)
		}
		going = append(going, w)
	}
	k.mu.Unlock()
	k.changed()
	return going, claimed
}

// letGo has a sandbox removed that the shelf has as retiring: by who makes it, if it is still being
// made. mu is held.
func (k *warmKeeper) letGo(w *warm) {
	select {
	case <-w.made:
		k.h.ops.Go(func() { k.remove(w) })
	default:
		w.cancel()
	}
}

// retireAll retires everything, and waits until what no wake has is gone, or ctx.
func (k *warmKeeper) retireAll(ctx context.Context) error {
	k.mu.Lock()
	names := k.shelf.Names(shelf.Preparing, shelf.Ready, shelf.Taken, shelf.Retiring)
	k.mu.Unlock()
	going, _ := k.retire(names)
	return awaitGone(ctx, going)
}

func awaitGone(ctx context.Context, going []*warm) error {
	for _, w := range going {
		select {
		case <-w.gone:
		case <-ctx.Done():
			return errs.E("remove warm sandbox", errs.Kind(ctx.Err()), string(w.name), ctx.Err())
		}
	}
	return nil
}

// remove removes a sandbox that the shelf has as retiring, again until nothing of it is left. What this
// process does not get done is found by the next one.
func (k *warmKeeper) remove(w *warm) {
	if w.guest != nil {
		_ = w.guest.Close()
	}
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		ctx, cancel := context.WithTimeout(k.h.ctx, endTime)
		err := k.h.stop(ctx, w.name)
		cancel()
		if err == nil {
			err = os.RemoveAll(k.h.runFolder(w.name))
		}
		if err == nil {
			break
		}
		k.h.log.Warn("a warm sandbox could not be removed yet", "sandbox", w.name, "error", err)
		select {
		case <-time.After(pause):
		case <-k.h.ctx.Done():
			return
		}
	}
	k.mu.Lock()
	k.shelf.Gone(w.name, time.Now())
	delete(k.all, w.name)
	k.mu.Unlock()
	close(w.gone)
}

// drain retires what waits, since the host hands its sessions over.
func (k *warmKeeper) drain() {
	k.mu.Lock()
	k.drained = time.Now()
	names := k.shelf.Names(shelf.Preparing, shelf.Ready, shelf.Taken)
	k.mu.Unlock()
	k.retire(names)
}

// wakes says that a session is placed here, which has taken one if there was one for it, and makes room
// for its memory. It counts among others, which are added up only where something waits.
func (k *warmKeeper) wakes(others func() uint64) {
	k.mu.Lock()
	k.drained = time.Time{}
	idle := k.shelf.Memory() == 0
	k.mu.Unlock()
	if idle {
		return
	}
	sessions := others()
	var names []ids.SandboxID
	k.mu.Lock()
	if used := sessions + k.shelf.Memory(); used > k.h.cfg.Capacity.MemoryBytes {
		names = k.shelf.Excess(used - k.h.cfg.Capacity.MemoryBytes)
	}
	k.mu.Unlock()
	if len(names) > 0 {
		k.h.log.Info("warm sandboxes make room for a session", "sandboxes", len(names))
		k.retire(names)
	}
}

// shut ends all making: the process ends.
func (k *warmKeeper) shut(why string) {
	k.mu.Lock()
	k.closed = why
	names := k.shelf.Names(shelf.Preparing)
	k.mu.Unlock()
	k.retire(names)
}

// close lets go of the guests. The sandboxes stay for the next process to remove.
func (k *warmKeeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, w := range k.all {
		if w.guest != nil {
			_ = w.guest.Close()
		}
	}
}

// names lists everything on the shelf.
func (k *warmKeeper) names() []ids.SandboxID {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.all))
}

// has reports whether a sandbox is on the shelf: made by this process, and not among its sessions yet.
func (k *warmKeeper) has(id ids.SandboxID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.shelf.Has(id)
}

// get tells of one sandbox on the shelf.
func (k *warmKeeper) get(id ids.SandboxID) (shelf.Item, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.shelf.Get(id)
}

// compare drops what waited before the driver was asked and is not among what it found.
func (k *warmKeeper) compare(found []driver.Found, asked time.Time) {
	live := map[ids.SandboxID]bool{}
	for _, f := range found {
		live[f.ID] = f.State == driver.Waiting
	}
	k.mu.Lock()
	all := k.shelf.All()
	k.mu.Unlock()
	for _, it := range all {
		if it.State == shelf.Ready && it.MadeAt.Before(asked) && !live[it.Name] {
			k.lost(it.Name, "it is not there any more")
		}
	}
}

// load counts what waits, for scheduler.
func (k *warmKeeper) load() map[string]uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	ready := k.shelf.Ready()
	if len(ready) == 0 {
		return nil
	}
	out := make(map[string]uint32, len(ready))
	for kind, n := range ready {
		if len(out) == maxKinds {
			break
		}
		out[kind.String()] = uint32(n)
		k.told[kind] = n > 0
	}
	return out
}

// maxKinds is how many kinds a host tells of.
const maxKinds = 256

// changed has scheduler told soon if a kind has one now and had none when it was told last, or the other
// way.
func (k *warmKeeper) changed() {
	k.mu.Lock()
	news := false
	for kind, n := range k.shelf.Ready() {
		told, known := k.told[kind]
		news = news || !known || told != (n > 0)
	}
	k.mu.Unlock()
	if news {
		select {
		case k.h.retell <- struct{}{}:
		default:
		}
	}
}

// resolver says what digest a reference stands for in this process; empty: it was not looked up.
type resolver interface{ Resolved(ref string) string }

// list tells what nobody has claimed, with what is stale now.
func (k *warmKeeper) list() ([]shelf.Item, map[shelf.Kind]shelf.Use) {
	names, _ := k.h.images.(resolver)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shelf.Mark(func(it shelf.Item) string {
		if names == nil {
			return ""
		}
		if now := names.Resolved(it.ImageRef); now != "" && now != it.ImageDigest {
			return "its image is " + now + " now"
		}
		return ""
	})
	return k.shelf.All(), k.shelf.Uses()
}

// preparing is a sandbox being made for nobody.
type preparing struct {
	h *host
	w *warm
	order
	image driver.Image
	link  *network.Link
	began time.Time
}

// table lists the steps. They have no undo: what fails is removed as whatever is retired.
func (p *preparing) table() (t steps.Table) {
	p.began = time.Now()
	t = steps.Table{
		{p.step("warm.image", p.findImage)},
		{p.step("warm.folder", p.makeFolder), p.step("warm.network", p.network)},
		{p.step("warm.driver.prepare", p.prepare)},
	}
	if !p.h.bare && greetsEarly(driver.Tier(p.Kind.Tier)) {
		t = append(t, []steps.Step{p.step("warm.guest.hello", p.hello)})
	}
	return t
}

func (p *preparing) step(name string, do func(context.Context) error) steps.Step {
	return steps.Step{Name: name, Do: func(ctx context.Context) error {
		if err := p.h.may("prepare"); err != nil {
			return err
		}
		return do(ctx)
	}}
}

// greetsEarly reports whether the guest of a tier answers before it has a session: in machines and where
// each call is a process of its own it begins with the claim.
func greetsEarly(t driver.Tier) bool {
	return slices.Contains([]driver.Tier{driver.Container, driver.GVisor, driver.Kata, driver.Null}, t)
}

func (p *preparing) findImage(ctx context.Context) (err error) {
	p.image, err = p.h.findImage(ctx, p.ImageRef, "", p.Kind.Tier)
	return err
}

// network gives it a link that is nobody's.
func (p *preparing) network(ctx context.Context) (err error) {
	if p.link == nil {
		p.link, err = p.h.net.make(ctx, p.w.name, driver.Tier(p.Kind.Tier))
	}
	return err
}

func (p *preparing) makeFolder(context.Context) error {
	if !hasDisk(p.h.caps) {
		return nil
	}
	return makeRunFolder(p.h.runFolder(p.w.name))
}

func (p *preparing) prepare(ctx context.Context) (err error) {
	drv, ok := p.h.drv.(driver.Preparer)
	if !ok {
		return errs.E("prepare sandbox", errkind.Unimplemented, string(p.w.name), "the driver prepares nothing")
	}
	p.w.spec = p.h.warmSpec(p.w.name, p.terms, p.image)
	p.w.spec.Link = p.link
	p.w.sb, err = drv.Prepare(ctx, p.w.spec)
	return err
}

func (p *preparing) hello(ctx context.Context) (err error) {
	if p.w.guest == nil && p.w.sb.Channel != (driver.Channel{}) {
		p.w.guest, err = p.h.greet(ctx, p.w.sb.Channel)
	}
	return err
}
