package containerd

import (
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/steps"
)

// warmContainer is tier container on runc.
type warmContainer struct{}

var _ warmTier = warmContainer{}

func (warmContainer) fits(driver.WarmSpec, driver.Spec) string { return "" }
func (warmContainer) root(*making) error                       { return nil }
func (warmContainer) shape(*making, *specs.Spec)               {}
func (warmContainer) ready(*claiming) error                    { return nil }
func (warmContainer) bind(*claiming) []steps.Step              { return nil }
func (warmContainer) enter() string                            { return "" }
