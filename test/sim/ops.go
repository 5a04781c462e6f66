package sim

import (
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// wake makes the session's compute, modelled on services/hostagent/wake.go: every step asks for the
// lease first, and what was made is undone after an error.
func (a *agent) wake(t *task, s *sess, o *operation) (any, *box, error) {
	r, ok := o.req.(wakeReq)
	if !ok {
		return nil, nil, fail(errkind.Internal, "it has no request")
	}
	c := o.c
	if r.until != 0 {
		c = a.w.within(c, r.until-a.w.now)
	}
	key := host.Key{Session: s.key, Generation: r.ref.Generation}
	var img *image
	var b *box
	var asOf time.Time
	steps := []func() error{
		func() error { return t.sleep(c, a.w.between(time.Millisecond, 8*time.Millisecond)) },
		func() (err error) { img, asOf, err = a.attach(t, c, key, r); return err },
		func() (err error) { b, err = a.create(t, c, key, r, img); return err },
		func() error { return t.sleep(c, a.w.between(time.Millisecond, 20*time.Millisecond)) },
	}
	var err error
	for _, step := range steps {
		if err = a.check(); err == nil {
			err = step()
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		if b != nil {
			delete(a.m.boxes, b.id)
		}
		if img != nil {
			img.attached = false
		}
		return nil, nil, err
	}
	a.w.handed[placed{s.key, r.ref.Epoch}] = img.data
	return wakeReply{origin: origin(r, asOf), asOf: asOf}, b, nil
}

// attach takes the local image if it is the newest; else it makes one from the store first.
func (a *agent) attach(t *task, c *ctx, key host.Key, r wakeReq) (*image, time.Time, error) {
	want := host.Want{Key: key, Epoch: r.ref.Epoch, Head: r.head, LastActive: r.lastActive, Fresh: r.fresh, Size: r.terms.Limits.DiskBytes,
		Image: "sha256:image", Ephemeral: r.terms.Ephemeral}
	if err := t.sleep(c, a.w.between(time.Millisecond, 10*time.Millisecond)); err != nil {
		return nil, time.Time{}, err
	}
	img, _, err := a.m.attach(want)
	fetchable := is(err, errkind.NotFound) || is(err, errkind.StaleEpoch) || is(err, errkind.DataLoss)
	if !fetchable || want.Fresh || want.Head == "" || want.Ephemeral {
		if is(err, errkind.NotFound) && want.Head == "" && !want.Fresh {
			err = fail(errkind.DataLoss, "the session was never saved, so that its files are nowhere else")
		}
		var asOf time.Time
		if err == nil && r.unsaved {
			asOf = img.rec.AsOf
		}
		return img, asOf, err
	}
	if err := a.dataKey(t, c, key, r.ref, r.tenant); err != nil {
		return nil, time.Time{}, err
	}
	man, err := a.w.store.get(t, c, r.head)
	if err != nil {
		return nil, time.Time{}, err
	}
	if err := a.m.restore(key, r.lastActive, man); err != nil {
		return nil, time.Time{}, err
	}
	a.w.cov.hit("disk fetched from the store")
	img, _, err = a.m.attach(want)
	if err != nil {
		return nil, time.Time{}, err
	}
	var asOf time.Time
	if r.unsaved {
		asOf = man.at
	}
	return img, asOf, nil
}

// create makes a sandbox. Some take long, some fail half-way.
func (a *agent) create(t *task, c *ctx, key host.Key, r wakeReq, img *image) (*box, error) {
	a.claim(key.Session, r)
	d := a.w.between(5*time.Millisecond, 200*time.Millisecond)
	if a.w.chance(a.w.faults.slowWake) {
		a.w.cov.hit("wake takes long")
		d = a.w.between(5*time.Second, 60*time.Second)
	}
	b := &box{id: boxID(key.Session, key.Generation, r.ref.Epoch), key: key, epoch: r.ref.Epoch, img: img, mem: r.terms.Limits.MemoryBytes,
		active: a.w.activated[placed{key.Session, r.ref.Epoch}]}
	a.m.boxes[b.id] = b
	if err := t.sleep(c, d); err != nil {
		return b, err
	}
	if a.w.chance(a.w.faults.failWake) {
		a.w.cov.hit("wake failed on the host")
		return b, fail(errkind.Unavailable, "the sandbox does not start")
	}
	if a.m.boxes[b.id] != b {
		return nil, fail(errkind.Unavailable, "the sandbox ended while it began")
	}
	return b, nil
}

// stopBox takes all compute away.
func (a *agent) stopBox(t *task, c *ctx, o *operation) error {
	if o.inv.box == "" {
		return nil
	}
	if err := t.sleep(c, a.w.between(time.Millisecond, 60*time.Millisecond)); err != nil {
		return err
	}
	delete(a.m.boxes, o.inv.box)
	return nil
}

// sleep stops processes, takes the compute away, commits the manifest, and answers only then; see
// services/hostagent/sleep.go.
func (a *agent) sleep(t *task, s *sess, o *operation) (any, error) {
	r, _ := o.req.(sleepReq)
	c := o.c
	key := host.Key{Session: s.key, Generation: o.inv.st.Generation}
	if err := a.check(); err != nil {
		return nil, err
	}
	idle := !r.force && !r.idleSince.IsZero() && o.box != nil
	if idle {
		if err := a.storeReady(t, c); err != nil {
			_, _ = a.decide(s, host.Recall{}, nil)
			return nil, err
		}
	}
	if _, err := a.decide(s, host.Stop{}, nil); err != nil {
		return nil, err
	}
	if err := t.sleep(c, a.w.between(time.Millisecond, 100*time.Millisecond)); err != nil {
		return nil, err
	}
	if err := a.stopBox(t, c, o); err != nil {
		return nil, err
	}
	var err error
	if !idle {
		err = a.storeReady(t, c)
	}
	var man sched.ManifestInfo
	if err == nil {
		man, err = a.seal(t, c, key, o, r.parent)
	} else if img := a.m.disks[key]; img != nil {
		img.attached = false
	}
	switch kindOf(err) {
	case errkind.Unavailable, errkind.Deadline, errkind.NoCapacity, errkind.Exhausted, errkind.NotLeader, errkind.DataLoss, errkind.Denied:
		err = fail(errkind.Unsaved, err.Error())
	}
	if err != nil {
		return nil, err
	}
	return sleepReply{manifest: man}, nil
}

func (a *agent) storeReady(t *task, c *ctx) error {
	return a.w.store.reach(t, a.w.within(c, t.p.real(3*time.Second)))
}

// drop takes all compute away and leaves the disk as it is.
func (a *agent) drop(t *task, s *sess, o *operation) error {
	a.w.cov.hit("compute dropped, disk kept")
	if err := a.stopBox(t, o.c, o); err != nil {
		return err
	}
	key := host.Key{Session: s.key, Generation: o.inv.st.Generation}
	img := a.m.disks[key]
	if img == nil {
		return nil
	}
	return a.turn(t, o.c, img, true, func() error { img.attached = false; return nil })
}

// delete removes compute and disk.
func (a *agent) delete(t *task, s *sess, o *operation) (any, error) {
	if err := a.stopBox(t, o.c, o); err != nil {
		return nil, err
	}
	tenant := o.inv.tenant
	if r, ok := o.req.(deleteReq); ok {
		tenant = r.tenant
	}
	return a.eraseDisk(t, o.c, tenant, host.Key{Session: s.key, Generation: o.inv.st.Generation})
}

// eraseDisk removes a disk from this host and from the store; it says whether the store is clean. If the
// store does not answer soon, erasures cleans it later.
func (a *agent) eraseDisk(t *task, c *ctx, tenant ids.Tenant, key host.Key) (deleteReply, error) {
	drop := func() error {
		if tenant != "" {
			a.m.notes[key] = true
		}
		delete(a.m.disks, key)
		return nil
	}
	var err error
	if img := a.m.disks[key]; img != nil {
		err = a.turn(t, c, img, true, drop)
	} else {
		err = drop()
	}
	switch {
	case err != nil:
		return deleteReply{}, err
	case tenant == "":
		return deleteReply{erased: true}, nil
	case a.w.store.erase(t, a.w.within(c, t.p.real(time.Second)), key) != nil:
		a.w.cov.hit("deleted, and the store is not clean yet")
		a.erasing.fire(a.w)
		return deleteReply{}, nil
	}
	delete(a.m.notes, key)
	return deleteReply{erased: true}, nil
}

// erasures cleans the store of deleted generations.
func (a *agent) erasures(t *task) {
	for {
		a.erasing.take()
		for _, k := range sortedDisks(a.m.notes) {
			if a.w.store.erase(t, a.w.within(nil, 45*time.Second), k) == nil {
				delete(a.m.notes, k)
			}
		}
		t.wait(nil, 20*time.Second, &a.erasing)
	}
}

// turn works on a disk alone. Whoever is urgent ends a save that stands in the way.
func (a *agent) turn(t *task, c *ctx, img *image, urgent bool, f func() error) error {
	for img.busy != nil && !img.busy.dead {
		if urgent && img.save != nil {
			img.save.cancel(a.w, errkind.Superseded)
		}
		img.free = signal{}
		t.wait(c, 50*time.Millisecond, &img.free)
		if c.over() {
			return c.err()
		}
	}
	img.busy = t
	defer func() {
		if img.busy == t {
			img.busy = nil
			img.free.fire(a.w)
		}
	}()
	return f()
}

func (a *agent) dataKey(t *task, c *ctx, key host.Key, ref sched.Ref, tenant ids.Tenant) error {
	return a.persist(t, c, func(c *ctx) error {
		_, err := ask[struct{}](t, c, "credentials", "datakey", keyReq{tenant: tenant, ref: ref})
		return err
	})
}

// seal ends an epoch: what the disk holds becomes the session's head. A disk at rest may be sealed in a
// later epoch than the one that it was attached for.
func (a *agent) seal(t *task, c *ctx, key host.Key, o *operation, head string) (man sched.ManifestInfo, err error) {
	img := a.m.disks[key]
	if img == nil {
		return man, fail(errkind.NotFound, "this host has no disk of the session")
	}
	ref := sched.Ref{Session: key.Session, Generation: key.Generation, Epoch: o.inv.st.Epoch}
	err = a.turn(t, c, img, true, func() error {
		if err := a.settleProposal(t, c, img, ref, head); err != nil {
			return err
		}
		switch {
		case img.rec.Attached.Compare(ref.Epoch) < 0 && !img.attached:
			a.w.cov.hit("disk at rest saved in a later epoch")
			if img.rec.State == host.Blank {
				img.rec.State, img.rec.Epoch = host.Dirty, img.rec.Attached
			}
		case img.rec.Attached != ref.Epoch:
			return fail(errkind.StaleEpoch, "the disk belongs to another epoch")
		case img.rec.State == host.Blank:
			img.rec = img.rec.Activated(ref.Epoch)
		}
		img.attached, img.synced = false, img.data
		if img.rec.State == host.Clean {
			man.ID = img.rec.Base
			return nil
		}
		if p := img.rec.Pending; p.ID != "" {
			man.ID, man.Parent, man.TakenAt = p.ID, img.rec.Base, sched.At(p.TakenAt)
			return a.commitPending(t, c, img, ref)
		}
		man, err = a.keep(t, c, img, ref, o.inv.tenant, true)
		return err
	})
	return man, err
}

// save makes the disk of an awake session, as it is now, the session's head.
func (a *agent) save(t *task, c *ctx, img *image, ref sched.Ref, tenant ids.Tenant) error {
	return a.turn(t, c, img, false, func() error {
		c := a.w.under(c)
		img.save = c
		defer func() { img.save = nil }()
		if err := a.settleProposal(t, c, img, ref, ""); err != nil {
			return err
		}
		if !img.attached || img.rec.Attached != ref.Epoch {
			return fail(errkind.StaleEpoch, "the disk is not attached for this epoch")
		}
		img.synced = img.data
		if img.rec.State == host.Clean {
			return nil
		}
		img.rec = img.rec.Activated(ref.Epoch)
		_, err := a.keep(t, c, img, ref, tenant, false)
		return err
	})
}

// keep brings a still copy to the store and makes it the head; see services/hostagent/internal/saver.
func (a *agent) keep(t *task, c *ctx, img *image, ref sched.Ref, tenant ids.Tenant, sealed bool) (out sched.ManifestInfo, err error) {
	data, parent, taken, attached := img.data, img.rec.Base, t.p.wall(), img.rec.Attached
	if err := a.dataKey(t, c, img.rec.Key(), ref, tenant); err != nil {
		return out, err
	}
	if base := a.w.store.all[parent]; base != nil && base.data == data {
		if sealed {
			img.rec.State, img.rec.Slept = host.Clean, taken
		}
		return sched.ManifestInfo{ID: parent}, nil
	}
	if a.w.opt.Mutation == AckBeforeCommit && sealed && parent != "" {
		return sched.ManifestInfo{ID: parent}, nil
	}
	m, err := a.w.store.put(t, c, manifest{parent: parent, key: img.rec.Key(), epoch: ref.Epoch, data: data, at: taken.UTC(), host: a.m.id})
	if err != nil {
		return out, err
	}
	if err := a.mayCommit(); err != nil {
		return out, err
	}
	if img.rec.Attached != attached || img.rec.Base != parent || img.rec.State != host.Dirty || img.rec.Pending.ID != "" {
		return out, fail(errkind.StaleEpoch, "the disk has moved on")
	}
	img.rec.Pending = host.Pending{ID: m.id, Epoch: ref.Epoch, Sealed: sealed, TakenAt: m.at}
	out = sched.ManifestInfo{ID: m.id, Parent: parent, ImageDigest: "sha256:image", TakenAt: sched.At(m.at)}
	return out, a.commitPending(t, c, img, ref)
}

// commitPending makes a proposed manifest the head, or finds out that it never can be.
func (a *agent) commitPending(t *task, c *ctx, img *image, ref sched.Ref) error {
	if err := a.mayCommit(); err != nil {
		return err
	}
	p := img.rec.Pending
	err := a.persist(t, c, func(c *ctx) error {
		if err := a.mayCommit(); err != nil { // also between two tries
			return err
		}
		man := sched.ManifestInfo{ID: p.ID, Parent: img.rec.Base, ImageDigest: "sha256:image", TakenAt: sched.At(p.TakenAt)}
		_, err := ask[struct{}](t, c, "scheduler", "commit_manifest", commitReq{ref, man, p.Sealed})
		return err
	})
	switch {
	case img.rec.Pending.ID != p.ID: // the disk moved on while the answer was on its way
		return fail(errkind.StaleEpoch, "the disk has moved on")
	case err == nil:
		img.rec = img.rec.Committed(t.p.wall())
	case is(err, errkind.Conflict):
		img.rec.Pending = host.Pending{}
	}
	return err
}

// settleProposal finds out what became of a proposal that an earlier save left open.
func (a *agent) settleProposal(t *task, c *ctx, img *image, ref sched.Ref, head string) error {
	p := img.rec.Pending
	switch {
	case p.ID == "" || p.Sealed && p.Epoch == ref.Epoch:
		return nil
	case p.ID == head: // committed; the answer was lost
		img.rec = img.rec.Committed(t.p.wall())
		return nil
	case p.Epoch != ref.Epoch:
		img.rec.Pending = host.Pending{}
		return nil
	}
	a.w.cov.hit("open proposal settled")
	if err := a.commitPending(t, c, img, ref); err != nil && !is(err, errkind.Conflict) {
		return err
	}
	return nil
}

func sortErased(e []deleteReq) {
	slices.SortFunc(e, func(a, b deleteReq) int {
		if a.ref.Session != b.ref.Session {
			if a.ref.Session < b.ref.Session {
				return -1
			}
			return 1
		}
		return a.ref.Generation.Compare(b.ref.Generation)
	})
}
