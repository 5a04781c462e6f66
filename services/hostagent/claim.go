package hostagent

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/shelf"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// share is why a wake that was told to starts cold.
const share = "the tenant has had its share of the warm sandboxes"

// take gives a wake a warm sandbox that fits, or says why none was there that did.
func (k *warmKeeper) take(kind shelf.Kind, image string, spec driver.Spec) (*warm, string) {
	drv, ok := k.h.drv.(driver.Preparer)
	if !ok {
		return nil, ""
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	name, why := k.shelf.Take(kind, image, func(id ids.SandboxID) string {
		w := k.all[id]
		if g := w.guest; g != nil && g.Err() != nil {
			return "the guest of the warm one does not answer"
		}
		spec.RunDir, spec.Link = w.spec.RunDir, w.spec.Link // they become the session's
		return drv.Fits(w.spec, spec)
	})
	if name == "" && why == "" && k.shelf.HasPool(kind) {
		why = "none of the template's warm sandboxes was left here"
	}
	return k.all[name], why
}

// putBack ends a take whose claim has not begun, and has what a claim began on removed: it returns it
// if it is not gone yet.
func (k *warmKeeper) putBack(w *warm) *warm {
	k.mu.Lock()
	if k.shelf.PutBack(w.name) {
		k.letGo(w)
	}
	state := k.shelf.Is(w.name)
	switch state {
	case shelf.Claiming, shelf.Claimed:
		if k.shelf.GiveUp(w.name) {
			k.letGo(w)
		}
	}
	k.mu.Unlock()
	k.changed()
	if state == shelf.Ready || state == "" {
		return nil
	}
	return w
}

// claiming begins the claim of a sandbox that was taken; from here on it is the session's or removed.
func (k *warmKeeper) claiming(w *warm) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.shelf.Claim(w.name) && k.shelf.Is(w.name) != shelf.Claiming {
		return errs.E("claim sandbox", errkind.NotFound, string(w.name), "the warm sandbox is not there any more")
	}
	return nil
}

// bound counts a claim that went well.
func (k *warmKeeper) bound(w *warm) {
	k.mu.Lock()
	k.shelf.Bind(w.name)
	k.mu.Unlock()
	k.changed()
}

// moved says that a session has the sandbox for good. The session's record names it already.
func (k *warmKeeper) moved(id ids.SandboxID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shelf.Moved(id, time.Now())
	delete(k.all, id)
}

// missed counts a wake that started cold though there is a pool; it reports whether there is one.
func (k *warmKeeper) missed(kind shelf.Kind) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shelf.Missed(kind)
	return k.shelf.HasPool(kind)
}

func kindOf(t *corev1.Terms) shelf.Kind {
	return shelf.Kind{Template: t.GetTemplate(), Tier: tierName(t.GetTier())}
}

func limitsOf(l *corev1.Limits) driver.Limits {
	return driver.Limits{CPUMillis: l.GetCpuMillis(), MemoryBytes: l.GetMemoryBytes(), PIDs: l.GetPids(),
		DiskBytesPerSecond: l.GetDiskBytesPerSecond(), DiskOpsPerSecond: l.GetDiskOpsPerSecond(), OpenFiles: l.GetOpenFiles()}
}

// warmSpec is what a sandbox of these terms is like that has no session yet.
func (h *host) warmSpec(id ids.SandboxID, t *corev1.Terms, img driver.Image) driver.WarmSpec {
	w := driver.WarmSpec{
		ID: id, Tier: driver.Tier(tierName(t.GetTier())), Image: img, RunDir: h.runFolder(id),
		Guest: h.cfg.Guest, Env: img.Env, Hostname: hostname, Limits: limitsOf(t.GetLimits()),
	}
	if c := h.drv.Capabilities()[w.Tier]; h.net.has(w.Tier) && c.Disk && c.Native {
		w.Over = netOver
	}
	return w
}

// hostname is that of every sandbox.
const hostname = "berth"

// spec is what the wake asks a driver for.
func (m *making) spec(id ids.SandboxID) driver.Spec {
	s := m.s.h.warmSpec(id, m.req.GetTerms(), m.image).Spec(m.key.Session, m.key.Generation, m.epoch)
	s.Disk, s.DiskImage, s.Link = m.disk.Root, m.disk.File, m.link
	return s
}

// take reserves a warm sandbox, once the image is known: no other wake gets it.
func (m *making) take() {
	h := m.s.h
	switch {
	case m.warm != nil:
	case m.req.GetCold():
		m.cold = share
	default:
		m.warm, m.cold = h.keeper.take(kindOf(m.req.GetTerms()), m.image.Digest, m.spec(m.coldID()))
	}
}

// putBack undoes take, and a claim: of what a claim began on nothing is left.
func (m *making) putBack(ctx context.Context) error {
	w := m.warm
	if w == nil {
		return nil
	}
	m.warm = nil
	if going := m.s.h.keeper.putBack(w); going != nil {
		return awaitGone(ctx, []*warm{going})
	}
	return nil
}

// claim makes the warm sandbox that was taken the session's. When that fails, for whatever reason, the
// sandbox is removed and the wake goes on cold.
func (m *making) claim(ctx context.Context) error {
	if m.warm == nil || m.claimed {
		return nil
	}
	h := m.s.h
	times, err := h.steps.Run(ctx, m.claimTable())
	if err == nil {
		h.keeper.bound(m.warm)
		m.claimed, m.claimSteps = true, times
		return nil
	}
	h.log.Warn("a warm sandbox could not be claimed; the session starts cold", "session", m.key.Session, "sandbox", m.warm.name, "error", err)
	h.meters.claim("failed")
	m.cold, m.sb, m.link = "the claim failed: "+err.Error(), nil, nil
	if h.steps.Crash {
		return err
	}
	w := m.warm
	m.warm = nil
	going := h.keeper.putBack(w)
	if going == nil || refused(err) {
		return nil
	}
	// What the claim began on may hold the disk. If it is not gone in time the driver says so.
	ctx, cancel := context.WithTimeout(ctx, removeWait)
	defer cancel()
	_ = awaitGone(ctx, []*warm{going})
	return nil
}

// removeWait is how long a wake waits for the end of a sandbox whose claim failed.
const removeWait = 10 * time.Second

// refused reports whether a claim was refused before it changed anything.
func refused(err error) bool {
	switch errs.Kind(err) {
	case errkind.NotFound, errkind.Unimplemented, errkind.Busy:
		return true
	}
	return false
}

// claimTable lists the steps of a claim. What they do is undone by the removal of the sandbox.
func (m *making) claimTable() steps.Table {
	h := m.s.h
	t := steps.Table{
		{{Name: "host.claim.place", Do: h.traced("host.claim.place", m.claimPlace)}},
		{{Name: "host.claim.bind", Do: h.traced("host.claim.bind", m.bind)},
			{Name: "host.claim.network", Do: h.traced("host.claim.network", m.connect)}},
	}
	if h.bare {
		return t
	}
	return append(t, []steps.Step{{Name: "host.claim.guest", Do: h.traced("host.claim.guest", m.enter)}})
}

// claimPlace begins the claim: the run folder of the sandbox is the session's from here on.
func (m *making) claimPlace(context.Context) error {
	if err := m.s.h.keeper.claiming(m.warm); err != nil {
		return err
	}
	m.link = m.warm.spec.Link // it was prepared with one of its own
	return m.putPlace(m.warm.name)
}

// bind makes the sandbox the session's.
func (m *making) bind(ctx context.Context) (err error) {
	if m.sb.ID != "" {
		return nil
	}
	drv, ok := m.s.h.drv.(driver.Preparer)
	if !ok {
		return errs.E("claim sandbox", errkind.Unimplemented, string(m.warm.name), "the driver prepares nothing")
	}
	sb, err := drv.Claim(ctx, m.warm.name, m.spec(m.warm.name))
	if err != nil {
		return err
	}
	if sb.ID != m.warm.name {
		return errs.Errorf("claim sandbox", errkind.Internal, "the driver gave %s for %s", sb.ID, m.warm.name)
	}
	m.sb.Sandbox = sb
	return nil
}

// enter has the first process make the session's root its own where that is for it to do. The channel is
// the one that the sandbox was greeted on.
func (m *making) enter(ctx context.Context) (err error) {
	if m.sb.guest != nil {
		return nil
	}
	h, guest := m.s.h, m.warm.guest
	known := guest != nil && guest.Err() == nil && m.warm.sb.Channel == m.sb.Channel
	if !known {
		if guest != nil {
			_ = guest.Close()
		}
		if guest, err = h.greet(ctx, m.sb.Channel); err != nil {
			return err
		}
	}
	switch {
	case m.sb.Enter != "":
		err = within(ctx, answerWait, func(ctx context.Context) error { return guest.Enter(ctx, m.sb.Enter) })
	case known: // ready means that it answered in this very epoch
		err = within(ctx, answerWait, func(ctx context.Context) error { _, err := guest.Ping(ctx); return err })
	}
	if err != nil {
		_ = guest.Close()
		return err
	}
	m.sb.guest = guest
	return h.minds(m.sb)
}

// answerWait is how long the guest of a claimed sandbox may take to answer; a cold start is as quick.
const answerWait = 3 * time.Second

func within(ctx context.Context, wait time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return do(ctx)
}

// claimTiming puts the steps of a claim, and the driver's own, below it.
func (m *making) claimTiming() (out []steps.Time) {
	for _, s := range m.claimSteps {
		out = append(out, steps.Time{Name: strings.TrimPrefix(s.Name, "host.claim."), Start: s.Start, Took: s.Took})
		if s.Name != "host.claim.bind" {
			continue
		}
		for _, i := range m.sb.Steps {
			out = append(out, steps.Time{Name: fmt.Sprintf("bind.%s", i.Name), Start: s.Start + i.Start, Took: i.Took})
		}
	}
	return out
}
