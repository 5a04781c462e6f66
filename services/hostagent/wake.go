package hostagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/obs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/internal/box"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// sandbox is compute that answered in its epoch.
type sandbox struct {
	driver.Sandbox
	guest *hostend.Conn
	box   *box.Box // nil until served; of session.mu
	place []byte

	activate  sync.Mutex // of what follows
	activated bool
	oomTold   uint64 // kills for memory that an exit told of
	quiet     bool   // nothing runs in it any more, and all is written out

	saved *saved // of session.mu
}

// again is the same compute with another channel, or another data plane: whoever minds the sandbox
// as it was before lets go of it.
func (sb *sandbox) again(guest *hostend.Conn) *sandbox {
	sb.activate.Lock()
	defer sb.activate.Unlock()
	return &sandbox{Sandbox: sb.Sandbox, guest: guest, place: sb.place, activated: sb.activated, oomTold: sb.oomTold}
}

// wakeTime bounds a wake whose request has no deadline.
const wakeTime = 5 * time.Minute

// fill writes down what a wake asks for, before anything is made.
func (s *session) fill(rec *inventory.Record, req proto.Message) {
	w, ok := req.(*hostv1.WakeRequest)
	if !ok {
		return
	}
	rec.Tenant, rec.Name = ids.Tenant(w.GetSession().GetTenant()), w.GetSessionName()
	rec.Sandbox = string(driver.ID(s.key, rec.Generation, rec.Epoch))
	rec.Tier, rec.Terms = tierName(w.GetTerms().GetTier()), toJSON(w.GetTerms())
	rec.Reply, rec.Place, rec.Activated, rec.Actor = nil, nil, false, actorJSON(w)
}

// actorJSON is who had the session woken, for the record.
func actorJSON(w *hostv1.WakeRequest) json.RawMessage {
	if w.GetActor() == nil {
		return nil
	}
	return toJSON(w.GetActor())
}

// making is a wake under way.
type making struct {
	s     *session
	req   *hostv1.WakeRequest
	key   disk.Key
	epoch ids.Epoch
	image driver.Image
	disk  disk.Attachment
	sb    *sandbox
	link  *network.Link // nil: the sandbox has no network
	// asOf is set if the disk is an older one, as of then.
	asOf time.Time
	// warm is the one that no other wake gets meanwhile; cold says why there is none.
	warm *warm
	cold string
	// claimed: it is the session's.
	claimed    bool
	claimSteps []steps.Time
}

// wake makes the session's compute. After an error nothing of it is left, or the sweep finds it.
func (s *session) wake(o *operation) (reply proto.Message, sb *sandbox, err error) {
	req, ok := o.req.(*hostv1.WakeRequest)
	if !ok {
		return nil, nil, errs.E("wake", errkind.Internal, s.key.String(), "it has no request")
	}
	deadline := time.Now().Add(wakeTime)
	if d := req.GetDeadline(); d != nil && d.AsTime().Before(deadline) {
		deadline = d.AsTime()
	}
	ctx, cancel := context.WithDeadline(o.ctx, deadline)
	defer cancel()
	began := time.Now()
	if err := s.h.enter(ctx); err != nil {
		return nil, nil, err
	}
	defer s.h.leave()
	queued := time.Since(began)
	m := &making{s: s, req: req, epoch: grant.EpochOf(req.GetSession().GetEpoch())}
	m.key = disk.Key{Session: s.key, Generation: grant.GenerationOf(req.GetSession().GetGeneration())}
	times, err := s.h.steps.Run(ctx, m.table())
	s.h.meters.wake(time.Since(began), err)
	if err != nil {
		return nil, nil, errs.Wrap("wake", s.key.String(), err)
	}
	out := &hostv1.WakeReply{Origin: m.origin(), ImageDigest: m.image.Digest, Timing: m.timing(times, queued, began)}
	if m.claimed {
		out.Warm = string(m.warm.name)
		s.h.meters.claim("claimed")
	} else if s.h.keeper.missed(kindOf(req.GetTerms())) || req.GetReservation() != "" {
		out.ColdReason = m.cold
		s.h.meters.claim("missed")
	}
	if !m.asOf.IsZero() {
		out.RestoredAsOf = timestamppb.New(m.asOf)
	}
	return out, m.sb, nil
}

// enter waits for one of the places of wakes.
func (h *host) enter(ctx context.Context) error {
	select {
	case h.wakes <- struct{}{}:
		return nil
	case <-ctx.Done():
		return errs.E("wait for other wakes", errs.Kind(ctx.Err()), "", ctx.Err())
	}
}

func (h *host) leave() { <-h.wakes }

// coldID names the sandbox that the wake makes if it claims none.
func (m *making) coldID() ids.SandboxID {
	return driver.ID(m.key.Session, m.key.Generation, m.epoch)
}

// table lists the steps of a wake with their undo. Once a sandbox is claimed, those that make one do
// nothing.
func (m *making) table() steps.Table {
	h, id := m.s.h, m.coldID()
	unless := func(undo func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if m.claimed {
				return nil
			}
			return undo(ctx)
		}
	}
	t := steps.Table{
		{{Name: "host.image", Do: h.traced("host.image", m.findImage), Undo: m.putBack}},
		{{Name: "host.disk.attach", Do: h.traced("host.disk.attach", m.attach), Undo: m.letGo}},
		{{Name: "host.claim", Do: h.traced("host.claim", m.claim), Undo: m.putBack}},
		{{Name: "host.place", Do: h.traced("host.place", m.writePlace), Undo: unless(func(context.Context) error { return os.RemoveAll(h.runFolder(id)) })}},
		{{Name: "host.network", Do: h.traced("host.network", m.network), Undo: unless(func(ctx context.Context) error { return h.net.remove(ctx, id) })}},
		{{Name: "host.driver.create", Do: h.traced("host.driver.create", m.create), Undo: unless(func(ctx context.Context) error { return h.stop(ctx, id) })}},
	}
	if h.bare {
		return t
	}
	return append(t, []steps.Step{{Name: "host.guest.hello", Do: h.traced("host.guest.hello", m.hello), Undo: m.hangUp},
		{Name: "host.bind", Do: h.traced("host.bind", m.connectCold), Undo: m.disconnect}})
}

// traced checks the lease before a step and makes it a span.
func (h *host) traced(name string, do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := h.may(name); err != nil {
			return err
		}
		ctx, span := obs.Start(ctx, name)
		err := do(ctx)
		obs.End(span, err)
		return err
	}
}

// findImage finds the image, and takes a warm sandbox that was made of it.
func (m *making) findImage(ctx context.Context) (err error) {
	t := m.req.GetTerms()
	ref, err := m.s.h.imageRef(t)
	if err != nil && m.req.GetImageDigest() == "" {
		return err
	}
	if m.image, err = m.s.h.findImage(ctx, ref, m.req.GetImageDigest(), tierName(t.GetTier())); err == nil {
		m.take()
		m.s.h.keeper.wakes(m.s.h.memory)
	}
	return err
}

// imageRef is the reference that the terms' name of an image stands for on this host.
func (h *host) imageRef(t *corev1.Terms) (string, error) {
	ref := t.GetImage()
	if known, ok := h.cfg.Images[ref]; ok {
		ref = known
	}
	if ref == "" && h.images != nil {
		return "", errs.E("find image", errkind.Invalid, "", "the terms name no image")
	}
	return ref, nil
}

// findImage finds the image of a digest, or, if there is none, the one that ref names now; for a machine
// it makes the file that it mounts, if that is not there yet.
func (h *host) findImage(ctx context.Context, ref, want, tier string) (driver.Image, error) {
	if h.images == nil {
		return driver.Image{Digest: want}, nil
	}
	img, err := h.nameImage(ctx, ref, want)
	if err == nil && h.raw(tier) {
		img, err = h.images.Block(ctx, img.Digest)
	}
	return img, err
}

// nameImage finds it: for a new disk the one that the template names now, later the very one that the
// disk is pinned to.
func (h *host) nameImage(ctx context.Context, ref, want string) (img driver.Image, err error) {
	if want != "" {
		if img, err = h.images.Get(want); !errs.Is(err, errkind.NotFound) {
			return img, err
		}
	}
	if ref == "" {
		return img, errs.E("find image", errkind.Invalid, "", "the terms name no image")
	}
	if img, err = h.images.Ensure(ctx, ref); err != nil {
		return img, err
	}
	if want != "" && img.Digest != want {
		return img, errs.Errorf("find image", errkind.Unavailable,
			"the disk is pinned to image %s, which is not on this host; %s is %s now", want, ref, img.Digest)
	}
	return img, nil
}

// attach takes the local image if it is the newest; else it makes one from the store first.
func (m *making) attach(ctx context.Context) error {
	t := m.req.GetTerms()
	want := disk.Want{
		Key: m.key, Epoch: m.epoch, Head: m.req.GetManifest(),
		LastActive: grant.EpochOf(m.req.GetLastActiveEpoch()), Fresh: m.req.GetFresh(),
		Size: t.GetLimits().GetDiskBytes(), Image: m.image.Digest, Ephemeral: ephemeral(t),
		Raw: m.s.h.raw(tierName(t.GetTier())),
	}
	if m.req.GetVmWritten() && !want.Raw {
		return errs.Errorf("attach disk", errkind.Refused, "%s; it wakes in a virtual machine only, and tier %s is none on this host", errkind.VMWritten, tierName(t.GetTier()))
	}
	var err error
	if m.req.GetRestore() == "" {
		if m.disk, err = m.s.h.disks.Attach(ctx, want); !fetchable(err) || want.Fresh || want.Head == "" || want.Ephemeral {
			if m.req.GetUnsaved() { // an earlier try fetched it, and did not get so far as to say so
				m.asOf = m.disk.AsOf
			}
			return gone(want, err)
		}
		m.s.h.log.Info("the disk comes from the store", "session", m.key.Session, "reason", err)
	}
	began := time.Now()
	if want.Head, err = m.fetch(ctx, want.Head); err != nil {
		return err
	}
	took := time.Since(began)
	// What was fetched is clean and the head, whatever epoch was the last one.
	if m.disk, err = m.s.h.disks.Attach(ctx, want); err != nil {
		return err
	}
	for i := range m.disk.Steps {
		m.disk.Steps[i].Start += took
	}
	m.disk.Steps = append([]steps.Time{{Name: "disk.fetch", Took: took}}, m.disk.Steps...)
	return nil
}

// letGo detaches the disk of a wake that failed, and forgets the key that a restore asked for.
func (m *making) letGo(ctx context.Context) error {
	return errors.Join(m.s.h.saves.Stop(ctx, m.key), m.s.h.disks.Detach(ctx, m.key))
}

// gone says that files are lost when the disk of a session that was never saved is not here.
func gone(want disk.Want, err error) error {
	if want.Head == "" && !want.Fresh && errs.Is(err, errkind.NotFound) {
		return errs.Errorf("find disk", errkind.DataLoss, "the session was never saved, so that its files are nowhere else: %w", err)
	}
	return err
}

// fetchable reports whether the host has no image that may be used.
func fetchable(err error) bool {
	switch errs.Kind(err) {
	case errkind.NotFound, errkind.StaleEpoch, errkind.DataLoss:
		return err != nil
	}
	return false
}

// fetch makes the local image of the head, or of the snapshot that is to be brought back, and
// returns the head. It tells how far it is.
func (m *making) fetch(ctx context.Context, head string) (string, error) {
	h, ref := m.s.h, m.req.GetSession()
	on := saver.Session{Key: m.key, Tenant: ids.Tenant(ref.GetTenant()), Epoch: m.epoch, Keep: keepOf(m.req.GetTerms())}
	p := &progress{tell: func(done, total uint64) {
		h.tell(ref, telling{what: "restoring", done: done, total: total, again: true,
			reason: fmt.Sprintf("The session's disk comes from the store: %s of %s are here.", size(done), size(total))})
	}}
	defer p.end()
	f, err := h.saves.Fetch(ctx, on, saver.Wanted{
		Head: head, LastActive: grant.EpochOf(m.req.GetLastActiveEpoch()), Unsaved: m.req.GetUnsaved(), Snapshot: m.req.GetRestore(), Progress: p.at,
	})
	if err != nil {
		return "", err
	}
	if m.req.GetUnsaved() || m.req.GetRestore() != "" {
		m.asOf = f.AsOf
	}
	return f.Head, nil
}

func (m *making) origin() corev1.Origin {
	switch {
	case m.req.GetFresh():
		return corev1.Origin_ORIGIN_CREATED
	case !m.asOf.IsZero():
		return corev1.Origin_ORIGIN_RESTORED
	}
	return corev1.Origin_ORIGIN_RESUMED
}

// putPlace writes what the sandbox is into its run folder.
func (m *making) putPlace(id ids.SandboxID) error {
	if m.sb == nil {
		p := describe(string(m.key.Session), m.req.GetSessionName(), m.req.GetTerms(), m.image.Digest, m.origin(), m.asOf, time.Now())
		if m.s.h.net.has(m.tier()) {
			p = p.reaches()
		}
		m.sb = &sandbox{place: p.json()}
	}
	if !hasDisk(m.s.h.caps) {
		return nil
	}
	return writePlace(m.s.h.runFolder(id), m.sb.place)
}

func (m *making) writePlace(context.Context) error {
	if m.claimed {
		return nil
	}
	return m.putPlace(m.coldID())
}

func (m *making) create(ctx context.Context) (err error) {
	if m.claimed {
		return nil
	}
	h, spec := m.s.h, m.spec(m.coldID())
	m.sb.Sandbox, err = h.drv.Create(ctx, spec)
	if err != nil || !m.sb.ID.IsWarm() {
		return err
	}
	// An earlier try of this epoch claimed it and did not get to its end: it may lack something.
	if err := h.stop(ctx, m.sb.ID); err != nil {
		return err
	}
	m.sb.Sandbox, err = h.drv.Create(ctx, spec)
	return err
}

func (m *making) hello(ctx context.Context) (err error) {
	if m.claimed {
		return nil
	}
	if m.sb.guest, err = m.s.h.greet(ctx, m.sb.Channel); err != nil {
		return err
	}
	return m.s.h.minds(m.sb)
}

func (m *making) hangUp(context.Context) error {
	if m.sb != nil && m.sb.guest != nil {
		return m.sb.guest.Close()
	}
	return nil
}

// greet attaches to a guest and waits for its answer: only then it is ready.
func (h *host) greet(ctx context.Context, ch driver.Channel) (*hostend.Conn, error) {
	return h.greetWithin(ctx, ch, h.cfg.Hello)
}

func (h *host) greetWithin(ctx context.Context, ch driver.Channel, hello time.Duration) (*hostend.Conn, error) {
	const op = "wait for the guest's hello"
	ctx, cancel := context.WithTimeout(ctx, hello)
	defer cancel()
	pipe, err := hostend.OpenChannel(ctx, ch.Stdin, ch.Stdout, ch.Socket)
	if err != nil {
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	conn, err := hostend.Attach(ctx, pipe, pipe, hostend.Options{Log: h.log})
	if err != nil {
		_ = pipe.Close()
		return nil, errs.E(op, errkind.Unavailable, "", err)
	}
	return conn, nil
}

func (h *host) runFolder(id ids.SandboxID) string { return filepath.Join(h.cfg.Dir, "run", string(id)) }

// timing puts the steps of disk and driver below those of the wake.
func (m *making) timing(times []steps.Time, queued time.Duration, began time.Time) *corev1.Timing {
	t := &corev1.Timing{Total: durationpb.New(time.Since(began))}
	add := func(name string, start, took time.Duration) {
		t.Steps = append(t.Steps, &corev1.Step{Name: name, Start: durationpb.New(start), Took: durationpb.New(took)})
	}
	add("host.queue", 0, queued)
	for _, s := range times {
		if m.skipped(s.Name) {
			continue
		}
		add(s.Name, queued+s.Start, s.Took)
		var inner []steps.Time
		switch {
		case s.Name == "host.disk.attach":
			inner = m.disk.Steps
		case s.Name == "host.claim" && m.claimed:
			inner = m.claimTiming()
		case s.Name == "host.driver.create" && !m.claimed:
			inner = m.sb.Steps
		}
		for _, i := range inner {
			add(fmt.Sprintf("%s.%s", s.Name, i.Name), queued+s.Start+i.Start, i.Took)
		}
	}
	return t
}

// skipped says that a step had nothing to do: a sandbox is either claimed or made.
func (m *making) skipped(step string) bool {
	switch step {
	case "host.claim":
		return !m.claimed
	case "host.network", "host.bind":
		return m.claimed || m.link == nil
	case "host.place", "host.driver.create", "host.guest.hello":
		return m.claimed
	}
	return false
}
