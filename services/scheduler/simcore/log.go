package simcore

import (
	"fmt"
	"io"

	"github.com/berth-dev/berth/services/scheduler/internal/replica"
	"github.com/hashicorp/raft"
)

// The replicated log with its state machine, as scheduler runs it.
type (
	Log       = replica.Replica
	LogConfig = replica.Config
)

// OpenLog opens a replica.
var OpenLog = replica.Open

// SeedLog writes a state as the snapshot that a group of one, of this id, begins with.
func SeedLog(dir, id string, s *State) error {
	snaps, err := raft.NewFileSnapshotStore(dir, 2, io.Discard)
	if err != nil {
		return fmt.Errorf("seed a log: %w", err)
	}
	addr, trans := raft.NewInmemTransport(raft.ServerAddress(id))
	self := raft.Configuration{Servers: []raft.Server{{ID: raft.ServerID(id), Address: addr}}}
	sink, err := snaps.Create(raft.SnapshotVersionMax, s.Index, 1, self, 1, trans)
	if err != nil {
		return fmt.Errorf("seed a log: %w", err)
	}
	if _, err := s.WriteTo(sink); err != nil {
		_ = sink.Cancel()
		return fmt.Errorf("seed a log: %w", err)
	}
	return sink.Close()
}
