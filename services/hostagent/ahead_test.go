package hostagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// cloner is a driver that notes which snapshots it was asked for.
type cloner struct {
	driver.Driver
	asked []string
	fail  error
}

func (c *cloner) Snapshot(_ context.Context, t driver.Tier, img driver.Image, l driver.Limits) error {
	c.asked = append(c.asked, fmt.Sprintf("%s %s%s %d", t, img.Digest, img.Block, l.MemoryBytes))
	return c.fail
}

// loft is an image store in which everything is there.
type loft struct{ images }

func (loft) Ensure(_ context.Context, ref string) (driver.Image, error) {
	return driver.Image{Digest: "of-" + ref}, nil
}

func (loft) Block(_ context.Context, digest string) (driver.Image, error) {
	return driver.Image{Digest: digest, Block: "+file"}, nil
}

// TestTheFirstUserDoesNotWaitForASnapshot: what sandboxes start from is made when the tier is offered,
// from the image that the name stands for, as a file for a machine; a failure keeps nothing else back.
func TestTheFirstUserDoesNotWaitForASnapshot(t *testing.T) {
	drv := &cloner{fail: errors.New("no memory")}
	h := &host{log: testLog(), drv: drv, images: loft{}, caps: map[driver.Tier]driver.Capabilities{driver.MicroVM: {RawDisk: true}, driver.WASM: {}}}
	h.cfg.Images = map[string]string{"default": "/layout"}
	h.cfg.Ahead = []Ahead{{Tier: "microvm", Image: "default", MemoryBytes: 1}, {Tier: "wasm", Image: "tools", MemoryBytes: 2}, {Tier: "microvm", Image: "other", MemoryBytes: 3}}
	h.makeAhead(t.Context(), driver.MicroVM)
	h.makeAhead(t.Context(), driver.WASM)
	h.makeAhead(t.Context(), driver.Container)
	want := []string{"microvm of-/layout+file 1", "microvm of-other+file 3", "wasm of-tools 2"}
	if !slices.Equal(drv.asked, want) {
		t.Errorf("asked for %q, want %q", drv.asked, want)
	}
}
