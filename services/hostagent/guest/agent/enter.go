package agent

import (
	"errors"

	"github.com/berth-dev/berth/services/hostagent/guest/enter"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// answers refuses what must not be asked of a sandbox that is nobody's yet: nothing is read, written or
// started before its owner's root is there.
func (a *Agent) answers(method string) error {
	if !a.opts.Enter || a.entered.Load() || method == wire.MethodEnter || method == wire.MethodPing {
		return nil
	}
	return wire.Failf(wire.KindConflict, "%s: the sandbox has not entered a root yet", method)
}

// enterRoot makes a folder the root, once. After a failure that changed something the agent answers nothing
// any more but a ping.
func (c *call) enterRoot() (any, error) {
	var req wire.Enter
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if !c.agent.opts.Enter {
		return nil, wire.Failf(wire.KindUnsupported, "%s: the sandbox was started on its own root", c.method)
	}
	already, err := enter.Root(req.Folder)
	switch {
	case errors.Is(err, enter.ErrUnfit):
		return nil, wire.Failf(wire.KindInvalid, "%s: %v", c.method, err)
	case errors.Is(err, enter.ErrEntered):
		return nil, wire.Failf(wire.KindConflict, "%s: %v", c.method, err)
	case err != nil:
		return nil, wire.Failf(wire.KindInternal, "%s: %v", c.method, err)
	}
	c.agent.entered.Store(true)
	return wire.Entered{Already: already}, nil
}
