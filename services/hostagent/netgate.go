package hostagent

import (
	"context"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/obs"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
)

// gateState is what this host knows of its gate. Of nets.mu.
type gateState struct {
	answers bool
	failed  string // what was logged last of a gate that does not
	closed  string // why it says that nothing leaves
}

// answers reports whether the gate took what it was told last.
func (n *nets) answers() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.gate.answers
}

// answered notes how the gate is, and tells of a change.
func (n *nets) answered(err error) {
	n.mu.Lock()
	was := n.gate
	n.gate.answers, n.gate.failed = err == nil, ""
	if err != nil {
		n.gate.failed = "it does not answer"
	}
	now := n.gate
	n.mu.Unlock()
	switch {
	case now.answers && !was.answers:
		n.h.meters.gated(1)
	case was.answers && !now.answers:
		n.h.meters.gated(-1)
	}
	switch {
	case now.failed != was.failed && err != nil:
		n.h.log.Warn("the gate of this host does not answer: what wakes has no way out until it does", "error", err)
	case err == nil && !was.answers:
		n.h.log.Info("the gate of this host has all bindings")
	}
}

// closed notes why the gate lets nothing out.
func (n *nets) closed(why string) {
	n.mu.Lock()
	news := n.gate.closed != why
	n.gate.closed = why
	n.mu.Unlock()
	switch {
	case news && why != "":
		n.h.log.Warn("the gate of this host lets nothing out", "reason", why)
	case news:
		n.h.log.Info("the gate of this host lets out what policies allow")
	}
}

// ask has the gate told of all bindings soon.
func (n *nets) ask() {
	select {
	case n.told <- struct{}{}:
	default:
	}
}

// keepGate tells the gate of all bindings with every grant of the lease, and again until it answers. Nothing
// waits for it.
func (n *nets) keepGate(ctx context.Context) {
	ctx = obs.Untraced(ctx) // it is said several times a minute
	n.h.meters.gated(0)     // it is shown before the gate is heard of
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.told:
		}
		for again := true; again && ctx.Err() == nil; {
			var err error
			if again, err = n.sync(ctx); err == nil {
				continue
			}
			select {
			case <-ctx.Done():
			case <-time.After(gateAgain):
			}
		}
	}
}

// gateAgain is the pause before a gate is asked again that did not answer.
const gateAgain = 100 * time.Millisecond

// sync tells the gate of everything, and binds what it had not heard of. again: the gate does not know all
// that this host knows now.
func (n *nets) sync(ctx context.Context) (again bool, err error) {
	h := n.h
	all, changes := n.now()
	req := &egressv1.SyncRequest{Boot: h.boot, LeaseUntil: h.lease.untilNanos()}
	for _, b := range all {
		req.Bindings = append(req.Bindings, b.msg)
	}
	tctx, cancel := context.WithTimeout(ctx, h.cfg.Network.GateTimeout)
	defer cancel()
	r, err := bus.InvokeGate[*egressv1.SyncReply](tctx, h.conn, h.id, "sync", req)
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	n.answered(err)
	if err != nil {
		return true, err
	}
	n.closed(r.GetClosed())
	if err := n.files.trustAlso(r.GetRoots()); err != nil {
		h.log.Error("sandboxes do not trust the cell's roots", "error", err)
	}
	for _, b := range all {
		if err := n.admit(ctx, b); err != nil && h.lease.check() == nil && !b.over() {
			h.log.Warn("a session has no way out for now", "sandbox", b.id, "error", err)
		}
	}
	_, now := n.now()
	return now != changes, nil // the list may have undone what a bind or unbind said meanwhile
}

// over reports whether the binding has ended.
func (b *binding) over() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ended
}
