package identity

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/internal/svcmain"
)

// Program is the service as a process of its own: in a fleet, and as a member of a cluster on one
// machine.
func Program() svcmain.Program {
	cfg := NewConfig()
	return svcmain.Program{Name: "identity", Config: &cfg,
		Run: func(ctx context.Context, conn *bus.Conn, log *slog.Logger, ready func()) error {
			return Run(ctx, cfg, conn, log, ready)
		}}
}

// MakeKeys makes the keys in keyDir that are not there yet. Several replicas that start at once on one
// folder would make different ones.
func MakeKeys(keyDir string) error {
	for _, file := range []string{sessionKeyFile, curveFile} {
		if _, err := keyfile.Open(filepath.Join(keyDir, file)); err != nil {
			return err
		}
	}
	return nil
}
