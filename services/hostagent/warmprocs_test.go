package hostagent

import (
	"context"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

// readyProcs are procs that can be prepared. Those of an earlier life are nobody's to claim.
type readyProcs struct {
	*procs
	life  int
	made  map[ids.SandboxID]int // in which life
	most  int                   // how many there were at once that had no session
	half  map[ids.SandboxID]bool
	fault string // what goes wrong with the next claims
	// stall holds up Prepare until it is closed.
	stall chan struct{}
}

func newReadyProcs(t *testing.T) *readyProcs {
	p := &readyProcs{procs: newProcs(t), made: map[ids.SandboxID]int{}, half: map[ids.SandboxID]bool{}}
	p.caps = map[driver.Tier]driver.Capabilities{driver.Null: {Native: true, Adopts: true, Holds: true, Warm: true}}
	return p
}

var _ driver.Preparer = (*readyProcs)(nil)

func (p *readyProcs) Prepare(ctx context.Context, w driver.WarmSpec) (driver.Sandbox, error) {
	p.mu.Lock()
	stall := p.stall
	p.mu.Unlock()
	if stall != nil {
		select {
		case <-stall:
		case <-ctx.Done():
			return driver.Sandbox{}, ctx.Err()
		}
	}
	if err := w.Check(p.Capabilities()); err != nil {
		return driver.Sandbox{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.all[w.ID]; q != nil {
		return q.Sandbox, nil
	}
	q, err := p.spawn(w.ID, w.Spec("", ids.Generation{}, ids.Epoch{}))
	if err != nil {
		return driver.Sandbox{}, err
	}
	p.all[w.ID], p.made[w.ID] = q, p.life
	n := 0
	for _, q := range p.all {
		if q.Session == "" {
			n++
		}
	}
	p.most = max(p.most, n)
	return q.Sandbox, nil
}

func (p *readyProcs) Fits(w driver.WarmSpec, spec driver.Spec) string {
	if w.Limits != spec.Limits {
		return "its limits are others"
	}
	return ""
}

// The faults of a claim.
const (
	claimRefused = "refused"          // before anything changed
	claimHalf    = "half-way"         // it has the session and nothing more
	claimEnter   = "root not entered" // the guest cannot make the root its own
	claimDead    = "guest dead"       // and the claim went well all the same
)

func (p *readyProcs) Claim(_ context.Context, id ids.SandboxID, spec driver.Spec) (driver.Sandbox, error) {
	const op = "claim sandbox"
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.all[id]
	switch {
	case q == nil || p.made[id] != p.life:
		return driver.Sandbox{}, errs.E(op, errkind.NotFound, string(id), "there is none")
	case q.Session != "":
		return driver.Sandbox{}, errs.E(op, errkind.Conflict, string(id), "it was claimed before")
	case p.fault == claimRefused:
		return driver.Sandbox{}, errs.E(op, errkind.Unimplemented, string(id), "it was asked to refuse")
	}
	for _, other := range p.all {
		if other.Session == spec.Session {
			return driver.Sandbox{}, errs.E(op, errkind.Busy, string(id), "the session has compute here")
		}
	}
	q.Session, q.Generation, q.Epoch = spec.Session, spec.Generation, spec.Epoch
	out := q.Sandbox
	switch p.fault {
	case claimHalf:
		p.half[id] = true
		return driver.Sandbox{}, errs.E(op, errkind.Internal, string(id), "it was asked to fail")
	case claimEnter:
		out.Enter = "/nowhere"
	case claimDead:
		_ = q.cmd.Process.Kill()
		<-q.done
	}
	return out, nil
}

func (p *readyProcs) Create(ctx context.Context, spec driver.Spec) (driver.Sandbox, error) {
	p.mu.Lock()
	for _, q := range p.all {
		if q.Session == spec.Session && q.Generation == spec.Generation && q.Epoch == spec.Epoch && !p.half[q.ID] {
			p.mu.Unlock()
			return q.Sandbox, nil
		}
	}
	p.mu.Unlock()
	return p.procs.Create(ctx, spec)
}

func (p *readyProcs) List(ctx context.Context) ([]driver.Found, error) {
	out, err := p.procs.List(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, f := range out {
		switch {
		case f.Session == "" && p.made[f.ID] != p.life, p.half[f.ID]:
			out[i].State = driver.Partial
		case f.Session == "" && f.State == driver.Running:
			out[i].State = driver.Waiting
		}
	}
	return out, err
}

// warm lists the sandboxes that have no session.
func (p *readyProcs) warm() (out []ids.SandboxID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, q := range p.all {
		if q.Session == "" {
			out = append(out, id)
		}
	}
	return out
}

func (p *readyProcs) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}
