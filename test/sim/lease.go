package sim

import (
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// The lease; see services/hostagent/lease.go. One that was lost is not simply had again by the next
// grant: until the host has compared itself with what it owns nothing begins, and what is frozen stays so.

func (a *agent) end() time.Duration { return a.until - leaseMargin }

func (a *agent) stopAt() time.Duration { return a.until - leaseMargin/4 }

// noticed sees whether the lease has ended.
func (a *agent) noticed() {
	if a.sure && a.m.clock() >= a.end() && a.w.opt.Mutation != HostIgnoresLease {
		a.unsettle()
	}
}

func (a *agent) unsettle() {
	a.losses++
	if a.sure {
		a.w.cov.hit("lease lost")
		a.sure, a.again = false, signal{}
	}
}

func (a *agent) check() error {
	if a.noticed(); a.sure {
		return nil
	}
	a.w.cov.hit("effect refused: no lease")
	return fail(errkind.Unavailable, "this host has no lease, or does not know yet what it owns")
}

// granted notes the answer to a request that was sent at sent, and says whether the host may go on.
func (a *agent) granted(sent time.Duration) bool {
	a.noticed()
	a.until = max(a.until, sent+leaseTerm)
	if !a.m.dog.up {
		a.m.dog.start()
	}
	if a.m.stop = a.stopAt(); a.sure || a.w.opt.Mutation == ThawsUnseen {
		a.m.fence = a.end()
	}
	return a.sure
}

// lost says that scheduler does not know of this lease any more. Nothing may run at once.
func (a *agent) lost() {
	a.unsettle()
	a.m.fence = 0
}

// settle lets things run and begin again, by an answer that was asked for after the loss.
func (a *agent) settle(t *task, own ownership) error {
	if a.noticed(); a.sure {
		return nil
	}
	if a.losses == own.losses {
		if err := a.part(t, own); err != nil {
			return err
		}
		if a.losses == own.losses && a.m.clock() < a.end() {
			a.w.cov.hit("lease lost and had again")
			a.sure = true
			a.again.fire(a.w)
			a.m.fence, a.m.stop = a.end(), a.stopAt()
			return nil
		}
	}
	return fail(errkind.Unavailable, "the lease was lost meanwhile")
}

func (a *agent) keepLease(t *task) {
	for {
		t.sleep(nil, leaseTerm/3)
		sent := a.m.clock()
		_, err := ask[struct{}](t, a.w.within(nil, t.p.real(leaseTerm/3)), "scheduler", "lease", leaseReq{a.m.id, a.boot})
		switch {
		case err == nil && a.granted(sent):
		case err == nil:
			a.rejoin.fire(a.w)
		case gone(err):
			a.lost()
			a.rejoin.fire(a.w)
		}
	}
}

// ownership is a positive, fresh and complete answer of scheduler.
type ownership struct {
	owned  map[ids.SessionKey]*sched.Session
	erased []deleteReq
	stale  []sched.Ref
	asked  time.Duration
	losses int
}

func (a *agent) join(t *task, c *ctx) (ownership, error) {
	a.noticed()
	own := ownership{owned: map[ids.SessionKey]*sched.Session{}, asked: a.w.now, losses: a.losses}
	sent := a.m.clock()
	r, err := ask[joinReply](t, c, "scheduler", "join", joinReq{a.m.id, a.boot, a.m.cap})
	if err != nil {
		if is(err, errkind.Denied) {
			a.w.cov.hit("join of a removed host refused")
		}
		return own, err
	}
	a.granted(sent)
	for _, s := range r.owned {
		own.owned[s.Key] = s
	}
	own.erased, own.stale = r.erased, r.stale
	return own, nil
}

// mayCommit is asked before every step of a commit.
func (a *agent) mayCommit() error {
	if a.w.opt.Mutation == CommitAnyEpoch {
		return nil
	}
	return a.check()
}
