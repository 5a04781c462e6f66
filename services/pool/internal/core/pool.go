package core

import (
	"time"

	poolv1 "github.com/berth-dev/berth/schemas/gen/berth/pool/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Pool is all that the leader of one term knows of one declared pool. It is for one goroutine at a time.
type Pool struct {
	spec Spec
}

// New begins a pool in a new term. caps are those that are stored: a host that has not answered in this
// term may have as many. demand is what an earlier leader kept; nil: nothing.
func New(spec Spec, tpl Template, caps Caps, demand *Demand, began time.Time) *Pool {
	return &Pool{}
}

// Declare changes what the pool should be.
func (p *Pool) Declare(spec Spec, tpl Template) {}

// Remove ends the pool: nothing more is prepared, everything is retired. Gone reports that nothing is
// left, and nothing under way.
func (p *Pool) Remove() {}

// Gone reports whether a removed pool has left nothing behind.
func (p *Pool) Gone() bool { return false }

// Observe takes in what is known of every host there is; one that is not among them was removed.
func (p *Pool) Observe(hosts []Host, now time.Time) {}

// Plan says what is to be done now. It changes nothing but the memory of recent goals.
func (p *Pool) Plan(now time.Time) Plan { return Plan{} }

// Stored tells that the caps of a plan are stored.
func (p *Pool) Stored(caps Caps) {}

// Begin is called before a preparation is sent. False: it must not be, any more.
func (p *Pool) Begin(s Step, id ids.SandboxID, now time.Time) bool { return false }

// End tells what came of it.
func (p *Pool) End(id ids.SandboxID, o Outcome, now time.Time) {}

// Retired tells that these are gone, or never were.
func (p *Pool) Retired(host string, gone []ids.SandboxID, now time.Time) {}

// Reserve decides an ask, or lets it wait. Idempotent by session and attempt.
func (p *Pool) Reserve(a Ask, now time.Time) Answer { return Answer{} }

// Settle ends a reservation and notes a claim. Idempotent.
func (p *Pool) Settle(s Settled, now time.Time) {}

// Granted returns the answers of asks that waited and wait no more, and ends what is over. next is when
// to call it again if nothing else happens; zero: no ask waits and nothing is reserved. Call it after
// Observe, End, Retired, Settle and at next.
func (p *Pool) Granted(now time.Time) (answers []Answer, next time.Time) { return nil, time.Time{} }

// Status is the pool as it stands.
func (p *Pool) Status(now time.Time) *poolv1.Status { return nil }

// Demand is what to keep for the next leader (JSON), every few minutes.
func (p *Pool) Demand() Demand { return Demand{} }
