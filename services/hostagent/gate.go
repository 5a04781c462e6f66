package hostagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/box"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/layer"
	"github.com/berth-dev/berth/services/hostagent/internal/saver"
)

// gate decides for the data plane of one sandbox. It implements box.Gate.
type gate struct {
	s          *session
	sb         *sandbox
	generation ids.Generation
	epoch      ids.Epoch
}

// Admit begins a piece of work. The first one of an epoch proves that scheduler committed it, since
// only then there are grants; the disk is marked as written before anything can write.
func (g *gate) Admit(context.Context) (func(), error) {
	if err := g.s.h.may("admit"); err != nil {
		return nil, err
	}
	g.s.mu.Lock()
	_, err := g.s.decide(core.Admit{Generation: g.generation, Epoch: g.epoch, At: time.Now()}, nil)
	g.s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := g.activate(); err != nil {
		g.release()
		return nil, err
	}
	return g.release, nil
}

func (g *gate) release() {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	if g.s.st.Generation != g.generation || g.s.st.Epoch != g.epoch {
		return // another epoch's work is not ours to end
	}
	if _, err := g.s.decide(core.Release{At: time.Now()}, nil); err != nil {
		g.s.h.log.Error("the end of work was refused", "session", g.s.key, "error", err)
	}
}

func (g *gate) activate() error {
	g.sb.activate.Lock()
	defer g.sb.activate.Unlock()
	if g.sb.activated {
		return nil
	}
	err := g.s.h.disks.Activate(disk.Key{Session: g.s.key, Generation: g.generation}, g.epoch)
	g.sb.activated = err == nil
	return err
}

// guestSync bounds the writing out before a snapshot; a guest that does not answer has none.
const guestSync = 15 * time.Second

// flush has the guest write out what it holds itself.
func flush(ctx context.Context, sb *sandbox) error {
	if sb == nil || sb.guest == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, guestSync)
	defer cancel()
	if err := sb.guest.Sync(ctx); err != nil {
		return fmt.Errorf("have the guest write out its files: %w", err)
	}
	return nil
}

// saving names the disk that the gate is for.
func (g *gate) saving() saver.Session {
	g.s.mu.Lock()
	on := g.s.h.saving(g.s.rec)
	g.s.mu.Unlock()
	on.Generation, on.Epoch = g.generation, g.epoch
	return on
}

// Checkpoint makes the disk as it is the session's head while the session is awake, with all that
// was written before it was asked for.
func (g *gate) Checkpoint(ctx context.Context) (*corev1.Manifest, error) {
	g.s.mu.Lock()
	t := termsOf(g.s.rec)
	g.s.mu.Unlock()
	if ephemeral(t) {
		return nil, errs.E("checkpoint", errkind.Refused, g.s.key.String(), "an ephemeral session is never saved")
	}
	if err := g.s.h.may("checkpoint"); err != nil {
		return nil, err
	}
	if err := flush(ctx, g.sb); err != nil {
		return nil, err
	}
	r, err := g.s.h.saves.Save(ctx, g.saving())
	g.s.h.meters.saved(r, err)
	switch kind := errs.Kind(err); {
	case err == nil:
	case ctx.Err() == nil && (kind == errkind.Unavailable || kind == errkind.Deadline || kind == errkind.NotLeader):
		return nil, errs.E("checkpoint", errkind.Unsaved, g.s.key.String(), err)
	default:
		return nil, err
	}
	return g.s.h.manifest(g.generation, r.Info), nil
}

// Export writes the session's own files as they are now, from a still copy of its disk, or, where the
// host may not look at that, from inside while the session goes on.
func (g *gate) Export(ctx context.Context, w io.Writer) (out layer.Stats, err error) {
	if err := flush(ctx, g.sb); err != nil {
		return out, err
	}
	if g.s.h.raw(string(g.sb.Tier)) {
		return g.exportInside(ctx, w)
	}
	v, err := g.s.h.disks.View(ctx, disk.Key{Session: g.s.key, Generation: g.generation}, g.epoch)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	root, err := os.OpenFile(v.Root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return out, err
	}
	defer root.Close()
	upper, err := disk.Beneath(root, disk.Upper, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return out, err
	}
	defer upper.Close()
	return layer.Write(ctx, w, upper, layer.Limits{})
}

// exportInside has the machine write the archive: no host reads a disk that one wrote. What comes is
// passed on to the session's user, and bounded by what the disk could hold.
func (g *gate) exportInside(ctx context.Context, w io.Writer) (out layer.Stats, err error) {
	rec, err := g.s.h.disks.Get(disk.Key{Session: g.s.key, Generation: g.generation})
	if err != nil {
		return out, err
	}
	n, said, err := g.sb.guest.Export(ctx, w, 2*rec.Size+exportRoom)
	if err != nil {
		return out, err
	}
	out = layer.Stats{Bytes: n, Entries: said.Entries, Skipped: said.Skipped, Attributes: said.Attributes}
	for _, name := range said.Names {
		out.SkippedNames = append(out.SkippedNames, strings.ToValidUTF8(string(name), "?"))
	}
	return out, nil
}

// exportRoom is more than the headers of an archive take that holds little else.
const exportRoom = 1 << 30

// Env is what programs find that bring roots of their own.
func (g *gate) Env() []string {
	if g.s.h.net.find(g.sb.ID) == nil {
		return nil
	}
	return netEnv()
}

// Place is the text of session.json.
func (g *gate) Place() string { return string(g.sb.place) }

// OutOfMemory reports whether a process of the sandbox was ended for memory of which no exit told
// yet. The kernel counts a kill before the process ends; the runtime's event comes later.
func (g *gate) OutOfMemory() bool {
	kills, ok := g.s.h.oomKills(g.sb.ID)
	if !ok {
		return g.s.h.hadOOM(g.sb.ID)
	}
	g.sb.activate.Lock()
	defer g.sb.activate.Unlock()
	if g.sb.oomTold >= kills {
		return false
	}
	g.sb.oomTold++
	return true
}

// serve opens the data plane of a sandbox and looks after its channel. running are execs that the
// guest runs already.
func (s *session) serve(sb *sandbox, running []string) error {
	if s.h.bare {
		return nil
	}
	s.mu.Lock()
	want := s.binding()
	g := &gate{s: s, sb: sb, generation: s.st.Generation, epoch: s.st.Epoch}
	s.mu.Unlock()
	b, err := s.h.box.Serve(want, sb.guest, g, running)
	if err != nil {
		go s.lose(sb, false, "its data plane could not be opened: "+err.Error())
		return err
	}
	s.mu.Lock()
	current := s.sb == sb && s.st.Phase == core.Awake
	if current {
		sb.box = b
	}
	s.mu.Unlock()
	if !current {
		b.Close("the session is not awake any more")
		return nil
	}
	go s.mind(sb)
	return nil
}

// lose says that a sandbox is gone though nobody stopped it.
func (s *session) lose(sb *sandbox, oom bool, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sb != sb {
		return
	}
	lost := core.Lost{Epoch: s.st.Epoch, OOM: oom, Reason: reason}
	if s.h.wasStopped(s.touched) {
		lost.OOM, lost.Reason, lost.Why = false, "its host could not keep its lease", leaseLost
	}
	cmds, err := s.decide(lost, nil)
	if err != nil {
		s.h.log.Error("cannot note that a sandbox is gone", "session", s.key, "error", err)
		return
	}
	s.command(cmds, nil)
}

// wasStopped reports whether the watchdog stopped sandboxes of this host after since.
func (h *host) wasStopped(since time.Duration) bool {
	return h.fence != nil && h.fence.Stopped() > since
}

// mind waits for the loss of the guest's channel. When the sandbox still runs it attaches again,
// with a new marker, and serves what runs in it; else the sandbox counts as gone.
func (s *session) mind(sb *sandbox) {
	select {
	case <-sb.guest.Done():
	case <-s.h.ctx.Done():
		return
	}
	s.mu.Lock()
	current := s.sb == sb && s.st.Phase == core.Awake
	s.mu.Unlock()
	if !current {
		return
	}
	cause := sb.guest.Err()
	_ = sb.guest.Close()
	s.h.log.Warn("lost the channel of a guest", "session", s.key, "error", cause)
	fresh, running, err := s.h.reattach(s.h.ctx, sb)
	if err != nil {
		s.lose(sb, s.h.hadOOM(sb.ID), fmt.Sprintf("the guest does not answer: %v", err))
		return
	}
	s.mu.Lock()
	current = s.sb == sb && s.st.Phase == core.Awake
	old := sb.box
	if current {
		fresh.saved = sb.saved
		s.sb = fresh
		s.h.link(fresh, s)
	}
	s.mu.Unlock()
	if !current {
		_ = fresh.guest.Close()
		return
	}
	if old != nil {
		defer old.Close("the guest was attached again; attach again too")
	}
	if err := s.serve(fresh, running); err != nil {
		s.h.log.Error("cannot serve a guest that was attached again", "session", s.key, "error", err)
	}
}

// reattach makes a new channel to a running sandbox and lists what runs in it.
func (h *host) reattach(ctx context.Context, sb *sandbox) (*sandbox, []string, error) {
	if h.bare {
		return &sandbox{Sandbox: sb.Sandbox, place: sb.place}, nil, nil
	}
	if err := h.goesOn(sb); err != nil {
		return nil, nil, err
	}
	conn, err := h.greet(ctx, sb.Channel)
	if err != nil {
		return nil, nil, err
	}
	lctx, cancel := context.WithTimeout(ctx, h.cfg.Hello)
	defer cancel()
	running, err := box.RunningExecs(lctx, conn)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	fresh := sb.again(conn)
	if err := h.minds(fresh); err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return fresh, running, nil
}
