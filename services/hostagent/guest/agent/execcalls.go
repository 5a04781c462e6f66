package agent

import (
	"errors"
	"sort"
	"syscall"
	"time"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// execsPerPage keeps a page of execs inside one frame.
const execsPerPage = 64

// find waits for the start of an exec to be over and returns it.
func (a *Agent) find(key wire.Text) (*execution, error) {
	if x := a.lookup(string(key)); x != nil {
		<-x.started
		if x.failed == nil {
			return x, nil
		}
	}
	return nil, wire.Failf(wire.KindNoSuchExec, "no exec %q", string(key))
}

func (c *call) execRef() (*execution, error) {
	var req wire.ExecRef
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	return c.agent.find(req.Key)
}

func (c *call) execAttach() (any, error) {
	var req wire.ExecAttach
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	x, err := c.agent.find(req.Key)
	if err != nil {
		return nil, err
	}
	return c.follow(x, req.From, true)
}

func (c *call) execDetach() (any, error) {
	x, err := c.execRef()
	if err != nil {
		return nil, err
	}
	if err := x.detach(c.ctx); err != nil {
		return nil, err
	}
	return x.info(true), nil
}

func (c *call) execSignal() (any, error) {
	var req wire.ExecSignal
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if req.Signal < 1 || req.Signal > 64 {
		return nil, wire.Failf(wire.KindInvalid, "signal %d does not exist", req.Signal)
	}
	x, err := c.agent.find(req.Key)
	if err != nil {
		return nil, err
	}
	err = c.agent.reaper.signalGroup(x.pid, syscall.Signal(req.Signal))
	if errors.Is(err, syscall.ESRCH) {
		return nil, wire.Failf(wire.KindExited, "exec %s has ended", req.Key)
	}
	return struct{}{}, err
}

func (c *call) execList() (any, error) {
	var req wire.ExecList
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	a := c.agent
	a.mu.Lock()
	keys := make([]string, 0, len(a.execs))
	for key := range a.execs {
		if key > string(req.After) {
			keys = append(keys, key)
		}
	}
	a.mu.Unlock()
	sort.Strings(keys)
	page := wire.ExecPage{Execs: []wire.ExecInfo{}}
	if len(keys) > execsPerPage {
		keys, page.More = keys[:execsPerPage], true
	}
	for _, key := range keys {
		if x, err := a.find(wire.Text(key)); err == nil {
			page.Execs = append(page.Execs, x.info(true))
		}
	}
	return page, nil
}

// finished keeps the record of an exec for its lifetime, then forgets it.
func (a *Agent) finished(x *execution) {
	a.mu.Lock()
	a.live--
	a.trimLocked()
	a.mu.Unlock()
	time.AfterFunc(a.opts.RecordLifetime, func() {
		a.mu.Lock()
		if a.execs[x.key] == x {
			delete(a.execs, x.key)
		}
		a.mu.Unlock()
		x.forget()
	})
}

// trimLocked bounds the records, and the output kept by finished execs: the one
// that ended first goes first, those whose reader took everything before others. What a
// reader may still want is never dropped: admitLocked refuses starts instead.
func (a *Agent) trimLocked() {
	tooMany := len(a.execs) > MaxRecords
	if !tooMany && a.ringUsed.Load() <= RingBudget {
		return
	}
	type candidate struct {
		x     *execution
		ended time.Time
		taken bool
		held  bool
	}
	var ended []candidate
	for _, x := range a.execs {
		x.mu.Lock()
		if x.exit != nil {
			taken := x.acked[0] == x.ring.lanes[0].end && x.acked[1] == x.ring.lanes[1].end
			ended = append(ended, candidate{x, x.exit.EndedAt, taken, x.held})
		}
		x.mu.Unlock()
	}
	sort.Slice(ended, func(i, j int) bool {
		if ended[i].taken != ended[j].taken {
			return ended[i].taken
		}
		return ended[i].ended.Before(ended[j].ended)
	})
	// An eighth more than needed, so that this is not done for every exec.
	excess := len(a.execs) - MaxRecords*7/8
	for _, c := range ended {
		switch {
		case tooMany && excess > 0:
			delete(a.execs, c.x.key)
			excess--
			c.x.forget()
		case a.ringUsed.Load() <= RingBudget*7/8:
		case c.taken:
			c.x.dropTaken()
		case !c.held:
			c.x.dropAll()
		}
	}
}

// dropTaken frees output that the reader has.
func (x *execution) dropTaken() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dropLocked(x.acked)
}

// dropAll frees the output of an exec without a reader; the next one gets a gap.
func (x *execution) dropAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.held {
		x.dropLocked([2]uint64{^uint64(0), ^uint64(0)})
	}
}

func (x *execution) dropLocked(before [2]uint64) {
	x.agent.ringUsed.Add(-int64(x.ring.dropOldest(before, x.ring.size)))
}
