package linear

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// host is a host in memory that does at once what it is asked. It keeps the
// contract of a host: exact epochs, and a manifest committed before a sleep is
// acknowledged. Each of its commits is an operation of the history.
type host struct {
	id   ids.Host
	conn *bus.Conn
	rec  *recorder
	who  int

	mu    sync.Mutex
	boxes map[string]*box
	last  int
}

// box is what a host has of one session. Its mutex is held while it changes.
type box struct {
	mu      sync.Mutex
	ref     *corev1.SessionRef
	running bool
	origin  corev1.Origin
	head    string
	saved   *corev1.Manifest // of the sleep of this epoch
}

func (c *cluster) host(id ids.Host, rec *recorder, who int) *host {
	c.t.Helper()
	h := &host{id: id, conn: c.connect(subjects.Host(id)), rec: rec, who: who, boxes: map[string]*box{}}
	svc, err := h.conn.Serve(within(c.t, 10*time.Second), bus.ServiceConfig{Name: "host"})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, err := range []error{bus.Handle(svc, "wake", h.wake), bus.Handle(svc, "sleep", h.sleep), bus.Handle(svc, "delete", h.delete)} {
		if err != nil {
			c.t.Fatal(err)
		}
	}
	return h
}

// keep joins, and renews the lease, until ctx ends. joined is closed after the first join.
func (h *host) keep(ctx context.Context, joined chan<- struct{}) {
	for ctx.Err() == nil {
		_, err := bus.Invoke[*schedulerv1.JoinReply](ctx, h.conn, "scheduler", "join", &schedulerv1.JoinRequest{
			Host: h.id.String(), Boot: "b1", HostKey: "key", Tiers: []corev1.Tier{corev1.Tier_TIER_NULL},
			Capacity: &corev1.Limits{CpuMillis: 2_000_000, MemoryBytes: 1 << 40, Pids: 1 << 20, DiskBytes: 1 << 50}})
		if err == nil && joined != nil {
			close(joined)
			joined = nil
		}
		for err == nil {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
			_, err = bus.Invoke[*schedulerv1.LeaseReply](ctx, h.conn, "scheduler", "lease", &schedulerv1.LeaseRequest{Host: h.id.String(), Boot: "b1"})
			if err != nil && !errs.Is(err, errkind.StaleEpoch) {
				err = nil // ask again
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (h *host) box(key string) *box {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.boxes[key]
	if b == nil {
		b = &box{}
		h.boxes[key] = b
	}
	return b
}

func same(a, b *corev1.Stamp) bool { return stampOf(a) == stampOf(b) }

func (h *host) wake(_ context.Context, _ bus.Request, r *hostv1.WakeRequest) (*hostv1.WakeReply, error) {
	b := h.box(r.GetSession().GetSession())
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.ref
	again := was != nil && same(was.GetGeneration(), r.GetSession().GetGeneration()) && same(was.GetEpoch(), r.GetSession().GetEpoch())
	switch {
	case again && b.running:
	case again && b.saved != nil:
		return nil, errs.E("fake wake", errkind.StaleEpoch, "", "this epoch was put to sleep here")
	case was != nil && stampOf(was.GetEpoch()).compare(stampOf(r.GetSession().GetEpoch())) > 0:
		return nil, errs.E("fake wake", errkind.StaleEpoch, "", "a later epoch was here")
	default:
		b.ref, b.running, b.saved, b.head = r.GetSession(), true, nil, r.GetManifest()
		b.origin = corev1.Origin_ORIGIN_RESUMED
		if r.GetFresh() {
			b.origin = corev1.Origin_ORIGIN_CREATED
		} else if r.GetUnsaved() {
			b.origin = corev1.Origin_ORIGIN_RESTORED
		}
	}
	return &hostv1.WakeReply{Origin: b.origin, ImageDigest: "sha256:abc"}, nil
}

func (h *host) sleep(ctx context.Context, _ bus.Request, r *hostv1.SleepRequest) (*hostv1.SleepReply, error) {
	b := h.box(r.GetSession().GetSession())
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ref == nil || !same(b.ref.GetGeneration(), r.GetSession().GetGeneration()) || !same(b.ref.GetEpoch(), r.GetSession().GetEpoch()) {
		return nil, errs.E("fake sleep", errkind.NotFound, "", "no sandbox of that epoch")
	}
	if b.saved != nil { // asked again
		return &hostv1.SleepReply{Manifest: b.saved}, nil
	}
	b.head = r.GetParent() // an earlier commit may have gone unanswered
	m, err := h.commit(ctx, b)
	if err != nil {
		return nil, err
	}
	b.saved, b.running = m, false
	return &hostv1.SleepReply{Manifest: m}, nil
}

func (h *host) delete(_ context.Context, _ bus.Request, r *hostv1.DeleteRequest) (*hostv1.DeleteReply, error) {
	b := h.box(r.GetSession().GetSession())
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ref != nil && same(b.ref.GetGeneration(), r.GetSession().GetGeneration()) {
		b.running, b.saved = false, nil
	}
	return &hostv1.DeleteReply{Removed: true}, nil
}

// snapshot commits a manifest for what was here last, whether it still owns it or not: a scheduler
// must refuse an old owner.
func (h *host) snapshot(ctx context.Context, key string) {
	b := h.box(key)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ref != nil {
		_, _ = h.commit(ctx, b)
	}
}

// commit moves the head. The box is locked.
func (h *host) commit(ctx context.Context, b *box) (*corev1.Manifest, error) {
	h.mu.Lock()
	h.last++
	m := &corev1.Manifest{Id: fmt.Sprintf("%s-%d", h.id, h.last), Parent: b.head, ImageDigest: "sha256:abc", Host: h.id.String(),
		Generation: b.ref.GetGeneration(), Epoch: b.ref.GetEpoch()}
	h.mu.Unlock()
	in := Input{Kind: Commit, Session: b.ref.GetSession(), Generation: stampOf(m.GetGeneration()), Epoch: stampOf(m.GetEpoch()),
		Host: m.GetHost(), Parent: m.GetParent(), ID: m.GetId()}
	call := h.rec.now()
	_, err := bus.Invoke[*schedulerv1.CommitManifestReply](ctx, h.conn, "scheduler", "commit_manifest",
		&schedulerv1.CommitManifestRequest{Session: b.ref, Manifest: m})
	switch {
	case err == nil:
		b.head = m.GetId()
		h.rec.add(h.who, call, in, Output{})
	case errs.Is(err, errkind.StaleEpoch), errs.Is(err, errkind.Conflict), errs.Is(err, errkind.NotFound):
		// The request may have been sent twice, and the first one done and
		// overtaken when the second was refused; after that it cannot happen.
		h.rec.add(h.who, call, in, Output{Unknown: true})
	default:
		h.rec.addUnknown(h.who, call, in)
	}
	return m, err
}

func stampOf(s *corev1.Stamp) Stamp { return Stamp{s.GetIncarnation(), s.GetIndex()} }

func phaseOf(s corev1.State) Phase {
	return cmp.Or(map[corev1.State]Phase{
		corev1.State_STATE_WAKING: Waking, corev1.State_STATE_ACTIVE: Active, corev1.State_STATE_SLEEPING: Sleeping,
		corev1.State_STATE_DELETING: Deleting, corev1.State_STATE_DELETED: Deleted}[s], Rest)
}
