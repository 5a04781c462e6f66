//go:build linux

package microvm

import (
	"context"
	"crypto/sha256"
	"fmt"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/guest/vm/vmwire"
)

// The network of one machine is a wire between it and its own namespace: the same addresses in all.
const (
	hostAddress  = "169.254.77.1/30"
	guestAddress = "169.254.77.2/30"
	gateway      = "169.254.77.1"
	templateMAC  = "02:00:00:00:00:01"
)

// address is what a machine gets.
func address(id ids.SandboxID) *vmwire.Network {
	sum := sha256.Sum256([]byte(id))
	return &vmwire.Network{Address: guestAddress, Gateway: gateway,
		MAC: fmt.Sprintf("02:%02x:%02x:%02x:%02x:%02x", sum[0], sum[1], sum[2], sum[3], sum[4])}
}

// Netns implements driver.Networker: lo and, with Config.Network, tap0 are all that is in there.
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
