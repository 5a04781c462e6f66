package disk

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// A clone follows its disk in so many rounds before the freeze, unless one found no more than so many
// ranges: the rest is cloned while the session waits.
const (
	followRounds = 3
	followEnough = 128
)

// follow clones the image while the session goes on, and again what was written meanwhile, until
// little is left for the freeze. Its time grows with the number of extents, which a session that
// writes small pieces makes large. nil if the pool cannot: all is copied in the freeze then.
func (s *Store) follow(ctx context.Context, k Key, to, from *os.File) (*extents.Mirror, error) {
	if !s.reflink {
		return nil, nil
	}
	if err := s.bearable(k); err != nil {
		return nil, err
	}
	m, err := extents.Follow(to, from)
	if errors.Is(err, extents.ErrUnknown) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if _, err := m.Update(ctx); err != nil {
		return nil, err
	}
	if err := s.at("shot.followed"); err != nil {
		return nil, err
	}
	for range followRounds {
		if err := s.writeOut(k); err != nil {
			return nil, err
		}
		if err := s.bearable(k); err != nil {
			return nil, err
		}
		n, err := m.Update(ctx)
		if err != nil {
			return nil, err
		}
		if err := s.at("shot.caughtup"); err != nil {
			return nil, err
		}
		if n <= followEnough {
			break
		}
	}
	// The freeze waits for a flush of the image, and that for the pool's journal: with all of the clone.
	if err := to.Sync(); err != nil {
		return nil, fmt.Errorf("sync clone: %w", err)
	}
	return m, m.Note()
}

// bearable refuses when the pool filled up since a clone was allowed: what the session wrote since
// then will be shared as well.
func (s *Store) bearable(k Key) error {
	if ok, _, err := s.bears(); err != nil || !ok {
		return errs.E("clone disk", errkind.NoCapacity, k.String(), errors.Join(err, errors.New("the pool filled up while the disk was synced")))
	}
	return nil
}
