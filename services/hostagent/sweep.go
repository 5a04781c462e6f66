package hostagent

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
)

// emptyAnswers is how many answers in a row must say that nothing is owned before live compute is
// taken for unowned: one could come from a control plane that lost its state.
const emptyAnswers = 3

// forgetAfter is how long an absent session that is not owned is remembered, so that late commands
// of its old epochs are refused.
const forgetAfter = time.Hour

// sweeps joins and sweeps at intervals and when asked to, until ctx ends or this host was removed.
func (h *host) sweeps(ctx context.Context) {
	tick := time.NewTicker(h.cfg.Sweep)
	defer tick.Stop()
	pause := settleAgain
	var again <-chan time.Time // one at a time: a host that gets no lease must not ask ever more often
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-again:
		case <-h.rejoin:
		}
		again = nil
		own, err := h.join(ctx)
		if h.wasRemoved(err) {
			close(h.removed)
			return
		}
		if err == nil {
			err = h.settle(ctx, own)
		}
		if err == nil {
			err = h.sweep(ctx, own)
		}
		if err != nil && ctx.Err() == nil {
			h.log.Warn("the sweep is not complete", "error", err)
		}
		if h.lease.over() { // soon again: until then nothing runs here
			again = time.After(pause)
			pause = min(2*pause, settleSlow)
		} else {
			pause = settleAgain
		}
		h.tellFacts(ctx, false)
	}
}

// The pauses before a host that lost its lease compares itself once more, the first and the longest.
const (
	settleAgain = 500 * time.Millisecond
	settleSlow  = 5 * time.Second
)

// sweep brings the host to what it owns. It needs an answer of scheduler that is positive, fresh
// and complete, and a driver that can list; without either nothing is touched.
func (h *host) sweep(ctx context.Context, own ownership) error {
	found, err := h.drv.List(ctx)
	if err != nil {
		return errs.Wrap("sweep", string(h.id), err)
	}
	if !h.credible(own, found) {
		return nil
	}
	var failed []error
	for _, ref := range own.erased {
		failed = append(failed, h.eraseFor(ctx, ref))
	}
	for _, s := range h.all() {
		failed = append(failed, s.compare(own))
	}
	failed = append(failed, h.removeOthers(ctx, found), h.net.sweep(ctx, found), h.sweepFolders())
	swept, err := h.disks.Sweep(ctx, h.judge)
	if n := len(swept.Detached) + len(swept.Strays); n > 0 {
		h.log.Info("detached disks that no sandbox uses", "disks", len(swept.Detached), "strays", swept.Strays)
	}
	failed = append(failed, err)
	for _, ref := range own.stale {
		failed = append(failed, h.dropStale(ctx, ref, own.asked))
	}
	h.forget(own)
	return errors.Join(failed...)
}

// sweepPlaces is how many sandboxes are removed at a time: a machine may take long to end, and its guest
// decides how long.
const sweepPlaces = 8

// removeOthers removes the sandboxes that nobody owns.
func (h *host) removeOthers(ctx context.Context, found []driver.Found) error {
	var mu sync.Mutex
	var failed error
	places := make(chan struct{}, sweepPlaces)
	var wg sync.WaitGroup
	for _, f := range found {
		if h.isOurs(f) {
			continue
		}
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			h.log.Info("removing a sandbox that nobody owns", "sandbox", f.ID, "parts", f.Parts)
			err := h.stop(ctx, f.ID)
			mu.Lock()
			defer mu.Unlock()
			failed = errors.Join(failed, err)
		})
	}
	wg.Wait()
	return failed
}

// credible refuses an answer that says nothing is owned while sandboxes run here, until it was
// given several times in a row.
func (h *host) credible(own ownership, found []driver.Found) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	erased := map[string]bool{}
	for _, ref := range own.erased {
		erased[ref.GetSession()] = true
	}
	live := 0
	for _, f := range found {
		if f.State == driver.Running && !erased[string(f.Session)] {
			live++
		}
	}
	if len(own.owned) > 0 || live == 0 {
		h.empties = 0
		return true
	}
	h.empties++
	if h.empties >= emptyAnswers {
		return true
	}
	h.log.Error("scheduler says that this host owns nothing, but sandboxes run here; nothing is removed",
		"sandboxes", live, "answers", h.empties)
	return false
}

func (h *host) eraseFor(ctx context.Context, ref *corev1.SessionRef) error {
	key, err := ids.ParseSessionKey(ref.GetSession())
	if err != nil {
		return errs.E("erase", errkind.Internal, "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	_, err = h.session(key).delete(ctx, grant.GenerationOf(ref.GetGeneration()), &hostv1.DeleteRequest{Session: ref})
	return err
}

// compare brings one session to what scheduler says of it. What changed here after scheduler was
// asked is left to the next sweep.
func (s *session) compare(own ownership) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.op != nil || s.touched >= own.asked {
		return nil
	}
	o := own.of(s.key, s.st)
	if o.GetState() == corev1.State_STATE_ACTIVE && s.st.Phase == core.Absent && !s.st.Slept {
		// An earlier report may have been lost with this process's predecessor.
		s.h.report(s.rec, core.Report{What: "exited", Reason: "the host has no sandbox of it"})
		return nil
	}
	if keeps(o, s.st.Phase) {
		return nil
	}
	cmds, err := s.decide(core.Disown{}, nil)
	if err != nil {
		return err
	}
	s.command(cmds, nil)
	return nil
}

// isOurs reports whether a sandbox is the current one of a session that has compute or is at it, or waits
// for one.
func (h *host) isOurs(f driver.Found) bool {
	if h.keeper.has(f.ID) { // before the sessions: that is the way it goes
		return true
	}
	h.mu.Lock()
	s := h.sessions[f.Session]
	h.mu.Unlock()
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.has(f) && (s.st.Phase != core.Absent || s.op != nil)
}

// has reports whether a sandbox is that of the session's epoch. Until a wake has ended nobody wrote down
// whether it claimed one that has a name of its own. mu is held.
func (s *session) has(f driver.Found) bool {
	return s.rec.Sandbox == string(f.ID) || s.op != nil && s.at(f)
}

// at reports whether a sandbox was made for the session's generation and epoch. mu is held.
func (s *session) at(f driver.Found) bool {
	return f.Session == s.key && f.Generation == s.st.Generation && f.Epoch == s.st.Epoch
}

// judge keeps a disk attached as long as its session has compute or is at it. No sweep removes a
// disk: only a delete does.
func (h *host) judge(d disk.Disk) disk.Verdict {
	h.mu.Lock()
	s := h.sessions[d.ID.Session]
	h.mu.Unlock()
	if s == nil {
		return disk.KeepDetached
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.op != nil || s.st.Generation == d.ID.Generation && s.st.Phase != core.Absent {
		return disk.Keep
	}
	return disk.KeepDetached
}

// sweepFolders removes run folders of sandboxes that are gone.
func (h *host) sweepFolders() error {
	entries, err := os.ReadDir(filepath.Join(h.cfg.Dir, "run"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return errs.E("sweep run folders", errkind.Internal, "", err)
	}
	keep := map[string]bool{}
	for _, id := range h.keeper.names() { // before the sessions: that is the way they go
		keep[string(id)] = true
	}
	maps.Copy(keep, h.held())
	var failed []error
	for _, e := range entries {
		if !keep[e.Name()] {
			failed = append(failed, os.RemoveAll(filepath.Join(h.cfg.Dir, "run", e.Name())))
		}
	}
	return errors.Join(failed...)
}

// held names the sandboxes of sessions that have compute or are at it.
func (h *host) held() map[string]bool {
	out := map[string]bool{}
	for _, s := range h.all() {
		s.mu.Lock()
		if s.st.Phase != core.Absent || s.op != nil {
			out[s.rec.Sandbox] = true
		}
		s.mu.Unlock()
	}
	return out
}

// forget drops the records of sessions that were absent and unowned for long.
func (h *host) forget(own ownership) {
	for _, s := range h.all() {
		s.mu.Lock()
		idle := (s.st.Phase == core.Absent || s.st.Phase == "") && s.op == nil && own.owned[s.key] == nil
		s.gone = idle && time.Since(s.rec.Changed) > forgetAfter
		if s.gone {
			h.mu.Lock()
			delete(h.sessions, s.key)
			h.mu.Unlock()
			if err := h.inv.Remove(s.key); err != nil {
				h.log.Warn("cannot forget a session", "session", s.key, "error", err)
			}
		}
		s.mu.Unlock()
	}
}

// recover takes over what an earlier process left: it adopts every live sandbox that is owned, and
// reports those that are gone. The sweep that follows cleans what is not owned.
func (h *host) recover(ctx context.Context, own ownership) error {
	found, err := h.drv.List(ctx)
	if err != nil {
		return errs.Wrap("take over sandboxes", string(h.id), err)
	}
	running := map[ids.SessionKey][]driver.Found{}
	for _, f := range found {
		if f.State == driver.Running {
			running[f.Session] = append(running[f.Session], f)
		}
	}
	places := make(chan struct{}, 8)
	var wg sync.WaitGroup
	for key, o := range own.owned {
		s := h.session(key)
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			s.takeOver(ctx, o, running[key])
		})
	}
	wg.Wait()
	return nil
}

// takeOver adopts the sandbox of one owned session, or notes that there is none.
func (s *session) takeOver(ctx context.Context, o *schedulerv1.OwnedSession, running []driver.Found) {
	switch o.GetState() {
	case corev1.State_STATE_ACTIVE, corev1.State_STATE_WAKING, corev1.State_STATE_SLEEPING:
	default:
		return
	}
	s.mu.Lock()
	s.learn(o)
	f, live := s.pick(o.GetSession(), running)
	told := o.GetState() != corev1.State_STATE_WAKING // that it is awake in this epoch
	usable := live && (s.st.Phase == core.Awake || (s.st.Phase == core.Absent || s.st.Phase == core.Waking) && !s.st.Spent && told)
	if usable {
		s.rec.Sandbox = string(f.ID)
	}
	s.mu.Unlock()
	var fresh *sandbox
	var execs []string
	reason := "the sandbox is gone"
	if usable {
		var err error
		old := &sandbox{Sandbox: f.Sandbox, place: s.rec.Place}
		old.oomTold, _ = s.h.oomKills(f.ID) // what the process before told is not known
		if fresh, execs, err = s.h.reattach(ctx, old); err != nil {
			reason = "the guest does not answer: " + err.Error()
		}
	}
	if fresh == nil {
		s.miss(o, reason)
		return
	}
	s.adopt(fresh, execs)
}

// pick finds the sandbox of the session's epoch: the one that its record names, or, where the process
// died before it was written down, the one that its driver knows by generation and epoch. mu is held.
func (s *session) pick(ref *corev1.SessionRef, running []driver.Found) (best driver.Found, ok bool) {
	if grant.GenerationOf(ref.GetGeneration()) != s.st.Generation || grant.EpochOf(ref.GetEpoch()) != s.st.Epoch {
		return best, false
	}
	for _, f := range running {
		if s.at(f) && (!ok || string(f.ID) == s.rec.Sandbox) {
			best, ok = f, true
		}
	}
	return best, ok
}

// learn fills the record of a session whose own one is missing or of another epoch. mu is held.
func (s *session) learn(o *schedulerv1.OwnedSession) {
	g, e := grant.GenerationOf(o.GetSession().GetGeneration()), grant.EpochOf(o.GetSession().GetEpoch())
	s.rec.Tenant = ids.Tenant(o.GetSession().GetTenant())
	if s.st.Generation == g && s.st.Epoch == e {
		return
	}
	if s.st.Phase != "" && s.st.Phase != core.Absent {
		return // another epoch's compute: the sweep removes it first
	}
	s.st = core.State{Phase: core.Absent, Generation: g, Epoch: e}
	s.rec.Generation, s.rec.Epoch, s.rec.Phase = g, e, string(core.Absent)
	s.rec.Name, s.rec.Terms, s.rec.Tier = o.GetSessionName(), toJSON(o.GetTerms()), tierName(o.GetTerms().GetTier())
	s.rec.Sandbox, s.rec.Reply, s.rec.Place, s.rec.Actor = string(driver.ID(s.key, g, e)), nil, nil, nil
}

// miss notes that an owned session has no compute here.
func (s *session) miss(o *schedulerv1.OwnedSession, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if lost := s.st.Phase == core.Awake; lost || torn(o, s.st.Phase) {
		var ev core.Event = core.Lost{Epoch: s.st.Epoch, Reason: reason}
		if !lost {
			ev = core.Disown{Why: reason}
			s.h.report(s.rec, core.Report{What: "exited", Reason: reason})
		}
		cmds, err := s.decide(ev, nil)
		if err == nil {
			s.command(cmds, nil)
		}
		return
	}
	if o.GetState() == corev1.State_STATE_ACTIVE && (s.st.Phase == core.Absent || s.st.Phase == "") && !s.st.Slept {
		s.touched = s.h.lease.now() // told once for this answer of scheduler
		s.h.report(s.rec, core.Report{What: "exited", Reason: reason})
	}
}

func (s *session) adopt(sb *sandbox, running []string) {
	s.mu.Lock()
	if len(sb.place) == 0 {
		sb.place = s.placeText()
	}
	_, err := s.decide(core.Adopt{Generation: s.st.Generation, Epoch: s.st.Epoch, At: time.Now()}, nil)
	if err == nil {
		s.sb = sb
		s.h.link(sb, s)
		s.h.net.adopt(s.h.ctx, s.rec, sb.ID)
	}
	s.mu.Unlock()
	if err == nil {
		err = s.serve(sb, running)
	}
	if err != nil {
		if sb.guest != nil {
			_ = sb.guest.Close()
		}
		s.h.log.Error("cannot take over a sandbox", "session", s.key, "error", err)
		return
	}
	s.h.log.Info("took over a sandbox", "session", s.key, "sandbox", sb.ID, "execs", len(running))
}
