package hostagent

import (
	"context"
	"log/slog"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/driver"
)

type noDriver struct{}

func (noDriver) Capabilities() driver.Capabilities {
	return driver.Capabilities{Tiers: []driver.Tier{driver.Null}}
}
func (noDriver) Create(context.Context, driver.Spec) (driver.Sandbox, error) {
	return driver.Sandbox{}, nil
}
func (noDriver) Stop(context.Context, ids.SandboxID) error    { return nil }
func (noDriver) List(context.Context) ([]driver.Found, error) { return nil, nil }
func (noDriver) Close() error                                 { return nil }

func openNull(context.Context, Config, *slog.Logger) (driver.Driver, error) { return noDriver{}, nil }
