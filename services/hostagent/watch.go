package hostagent

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/core"
)

// oomNews is how long the news that a process was killed for memory explains the end of a sandbox.
const oomNews = 10 * time.Second

// watch notices the end of sandboxes: by the driver's events, and by looking, since an event may be
// lost together with the runtime that should have told it.
func (h *host) watch(ctx context.Context) {
	var events <-chan driver.Event
	tick := time.NewTicker(h.cfg.Poll)
	defer tick.Stop()
	for ctx.Err() == nil {
		if w, ok := h.drv.(driver.Watcher); ok && events == nil {
			var err error
			if events, err = w.Watch(ctx); err != nil {
				events = nil
				h.log.Warn("cannot watch the runtime", "error", err)
			}
		}
		select {
		case <-ctx.Done():
		case ev, ok := <-events:
			if !ok {
				events = nil
				time.Sleep(100 * time.Millisecond) // the runtime went away; the poll goes on
				continue
			}
			h.news(ev)
		case <-tick.C:
			h.poll(ctx)
			h.net.look(ctx)
		}
	}
}

// news handles one event of the driver.
func (h *host) news(ev driver.Event) {
	h.mu.Lock()
	s := h.bySand[ev.ID]
	if s != nil && ev.Kind == driver.EventOOM {
		h.oom[ev.ID] = time.Now()
	}
	tell := s != nil && ev.Kind != driver.EventExited && h.limitNews(ev.ID, ev.Kind, time.Now())
	h.mu.Unlock()
	switch {
	case s == nil && ev.Kind == driver.EventExited:
		h.keeper.lost(ev.ID, exitReason(ev.ExitStatus))
	case s == nil:
	case ev.Kind == driver.EventExited:
		s.ended(ev.ID, exitReason(ev.ExitStatus))
	case tell:
		s.mu.Lock()
		rec := s.rec
		s.mu.Unlock()
		if t, ok := limitText[ev.Kind]; ok {
			go h.tell(refOf(rec), t)
		}
	}
}

// limitText is what the user of a session reads that ran into a limit. A disk that is full is told by
// quotas. How many files a process has open is counted by nobody but the process: it alone sees EMFILE.
var limitText = map[driver.EventKind]telling{
	driver.EventOOM:  {what: "oom", reason: "a process was ended because the session is out of memory", again: true},
	driver.EventPIDs: {what: "quota", reason: "A process could not be started: the session has as many processes as it may have.", again: true},
}

// limitEvery is how often the news of one limit of one sandbox is told at most.
const limitEvery = time.Minute

// limitNews reports whether a limit that was hit is to be told now. mu is held.
func (h *host) limitNews(id ids.SandboxID, kind driver.EventKind, now time.Time) bool {
	if h.limits[id] == nil {
		h.limits[id] = map[driver.EventKind]time.Time{}
	}
	if last, told := h.limits[id][kind]; told && now.Sub(last) < limitEvery {
		return false
	}
	h.limits[id][kind] = now
	return true
}

func exitReason(status uint32) string {
	if status == 0 {
		return "the sandbox ended by itself"
	}
	return fmt.Sprintf("the sandbox ended with status %d", status)
}

// oomKills is how many processes of a sandbox were ended for memory; ok is false if nobody counts.
func (h *host) oomKills(id ids.SandboxID) (kills uint64, ok bool) {
	m, ok := h.drv.(driver.Meter)
	if !ok {
		return 0, false
	}
	st, err := m.Stats(h.ctx, id)
	return st.OOMKills, err == nil
}

// hadOOM reports whether memory ran out in a sandbox a moment ago.
func (h *host) hadOOM(id ids.SandboxID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	at, ok := h.oom[id]
	return ok && time.Since(at) < oomNews
}

// ended says that the sandbox of this id is gone.
func (s *session) ended(id ids.SandboxID, reason string) {
	s.mu.Lock()
	sb := s.sb
	s.mu.Unlock()
	if sb != nil && sb.ID == id {
		s.lose(sb, s.h.hadOOM(id), reason)
	}
}

// poll compares what is awake with what the driver runs. An error of the driver says nothing.
func (h *host) poll(ctx context.Context) {
	asked, at := h.lease.now(), time.Now()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	found, err := h.drv.List(ctx)
	h.health.note("runtime", err, "the runtime of sandboxes does not answer")
	if err != nil {
		h.log.Warn("cannot look after the sandboxes", "error", err)
		return
	}
	h.keeper.compare(found, at)
	running := map[ids.SandboxID]bool{}
	for _, f := range found {
		if f.State == driver.Running {
			running[f.ID] = true
		}
	}
	for _, s := range h.all() {
		s.mu.Lock()
		lost := s.sb != nil && s.st.Phase == core.Awake && s.touched < asked && !running[s.sb.ID]
		id := ids.SandboxID(s.rec.Sandbox)
		s.mu.Unlock()
		if lost {
			s.ended(id, "the sandbox was removed from outside")
		}
	}
}
