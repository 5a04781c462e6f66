package sim

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	host "github.com/berth-dev/berth/services/hostagent/simcore"
)

// manifest is a committed or proposed description of a disk.
type manifest struct {
	id, parent string
	key        host.Key
	epoch      ids.Epoch
	data       *content
	at         time.Time
	host       ids.Host
}

// store keeps manifests with what they need; it may be away, slow or full.
type store struct {
	w    *World
	all  map[string]*manifest
	away bool
	slow bool
	full bool
	n    int
}

// reach takes the time that a request takes, and fails when the store does not answer.
func (s *store) reach(t *task, c *ctx) error {
	d := s.w.between(time.Millisecond, 20*time.Millisecond)
	if s.slow {
		s.w.cov.hit("store slow")
		d = s.w.between(time.Second, 20*time.Second)
	}
	if err := t.sleep(c, d); err != nil {
		return err
	}
	if s.away {
		s.w.cov.hit("store away")
		if err := t.sleep(c, s.w.between(0, 3*time.Second)); err != nil {
			return err
		}
		return fail(errkind.Unavailable, "the store does not answer")
	}
	return nil
}

func (s *store) put(t *task, c *ctx, m manifest) (*manifest, error) {
	if err := s.reach(t, c); err != nil {
		return nil, err
	}
	if s.full {
		s.w.cov.hit("store full")
		return nil, fail(errkind.NoCapacity, "the store is full")
	}
	s.n++
	m.id = fmt.Sprintf("m%d", s.n)
	s.all[m.id] = &m
	return &m, nil
}

func (s *store) get(t *task, c *ctx, id string) (*manifest, error) {
	if err := s.reach(t, c); err != nil {
		return nil, err
	}
	m := s.all[id]
	if m == nil {
		return nil, fail(errkind.DataLoss, "the store has no manifest "+id)
	}
	return m, nil
}

// erase removes a generation.
func (s *store) erase(t *task, c *ctx, k host.Key) error {
	if err := s.reach(t, c); err != nil {
		return err
	}
	for _, id := range sortedKeys(s.all) {
		if s.all[id].key == k {
			delete(s.all, id)
		}
	}
	return nil
}
