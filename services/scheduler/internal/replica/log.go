package replica

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	wal "github.com/hashicorp/raft-wal"
	"go.etcd.io/bbolt"
)

// segmentSize of the log's files, which are allocated in full.
const segmentSize = 16 << 20

// logStore is a replica's log: entries in a write-ahead log, one sync a batch;
// term and vote in a small database, whose lock also keeps a second process out.
type logStore struct {
	entries *wal.WAL
	stable  *raftboltdb.BoltStore
}

func openLog(dir string, logger hclog.Logger) (l *logStore, err error) {
	l = &logStore{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	l.stable, err = raftboltdb.New(raftboltdb.Options{
		Path:                    filepath.Join(dir, "stable.db"),
		MsgpackUseNewTimeFormat: true,
		BoltOptions:             &bbolt.Options{Timeout: 2 * time.Second, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType},
	})
	if errors.Is(err, bbolt.ErrTimeout) {
		return l, fmt.Errorf("another process uses %s", dir)
	}
	if err != nil {
		return l, fmt.Errorf("open term and vote: %w", err)
	}
	entries := filepath.Join(dir, "wal")
	if err := os.MkdirAll(entries, 0o700); err != nil {
		return l, fmt.Errorf("open log: %w", err)
	}
	l.entries, err = wal.Open(entries, wal.WithSegmentSize(segmentSize), wal.WithLogger(logger))
	if err != nil {
		return l, fmt.Errorf("open log: %w", err)
	}
	return l, nil
}

func (l *logStore) close() error {
	var errs []error
	if l.entries != nil {
		errs = append(errs, l.entries.Close())
	}
	if l.stable != nil {
		errs = append(errs, l.stable.Close())
	}
	return errors.Join(errs...)
}
