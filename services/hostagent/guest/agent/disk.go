package agent

import (
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Disk does what the session's file system needs of its kernel, where that is the machine's own. A
// call may take as long as the disk takes.
type Disk interface {
	DiskCall(vmwire.Call) (vmwire.Done, error)
}

// diskCall has no turn: a thaw must not wait for writes that the freeze holds up.
func (c *call) diskCall(req vmwire.Call) (vmwire.Done, error) {
	if c.agent.opts.Disk == nil {
		return vmwire.Done{}, wire.Failf(wire.KindUnsupported, "%s: the disk is not this kernel's", c.method)
	}
	req.ID = c.method
	done, err := c.agent.opts.Disk.DiskCall(req)
	if err != nil {
		return done, err
	}
	if !done.OK {
		kind := wire.KindIO
		switch done.Reason {
		case vmwire.ReasonInvalid:
			kind = wire.KindInvalid
		case vmwire.ReasonFull:
			kind = wire.KindNoSpace
		}
		return done, wire.Failf(kind, "%s: %s", c.method, done.Error)
	}
	return done, nil
}

func (c *call) diskFreeze() (any, error) {
	var req wire.DiskFreeze
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	_, err := c.diskCall(vmwire.Call{Op: vmwire.OpFreeze, Hold: req.Hold})
	return struct{}{}, err
}

func (c *call) diskThaw() (any, error) {
	done, err := c.diskCall(vmwire.Call{Op: vmwire.OpThaw})
	return wire.DiskThawed{Expired: done.Expired}, err
}

func (c *call) diskGrow() (any, error) {
	var req wire.DiskGrow
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	done, err := c.diskCall(vmwire.Call{Op: vmwire.OpGrow, Bytes: req.Bytes})
	return wire.DiskGrown{Bytes: done.Bytes}, err
}
