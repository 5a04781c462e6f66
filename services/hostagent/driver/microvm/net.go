//go:build linux

package microvm

import (
	"context"
	"fmt"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
	"github.com/berth-dev/berth/services/hostagent/internal/network"
)

// templateMAC is what every machine's card has until it is somebody's.
const templateMAC = "02:00:00:00:00:01"

// networkOf is what the guest of a machine with this link is told to set.
func networkOf(l *network.Link) *vmwire.Network {
	if l == nil {
		return nil // the card has no address and is down
	}
	return &vmwire.Network{
		Address: l.Address4.String(), Gateway: network.Gateway4.String(),
		Address6: l.Address6.String(), Gateway6: network.Gateway6.String(),
		MAC: l.MAC, GatewayMAC: l.HostMAC, MTU: l.MTU,
	}
}

// Netns implements driver.Networker: QEMU's own, in which there is lo and, for a machine with a card and
// without a link, a tap that is down. The tap of a link is in the router.
func (d *Driver) Netns(_ context.Context, id ids.SandboxID) (string, error) {
	r, err := d.mustRun("find network", id)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/ns/net", r.QEMU.PID), nil
}

// mustRun returns the record of a sandbox that runs; NotFound otherwise.
func (d *Driver) mustRun(op string, id ids.SandboxID) (record, error) {
	d.mu.Lock()
	r, ok := d.known[id]
	v := d.vms[id]
	d.mu.Unlock()
	if !ok || !r.Ready || v == nil || v.ended() != nil {
		return r, errs.E(op, errkind.NotFound, string(id), "there is no such sandbox here")
	}
	return r, nil
}
