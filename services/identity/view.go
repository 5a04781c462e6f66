package identity

import (
	"context"
	"time"

	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/registry"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// view is what requests are judged by: the registry at one time, and the
// verifier of its issuers. A request keeps the one that it began with.
type view struct {
	snapshot *registry.Snapshot
	tokens   *tokens.Verifier
}

// openRegistry reads the registry whole before anything is judged by it.
func (s *service) openRegistry(ctx context.Context, cfg Config) error {
	st, err := cfg.static()
	if err != nil {
		return err
	}
	starting, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	if s.registry, err = registry.Open(starting, s.follow, s.conn, st, s.log); err != nil {
		return err
	}
	now := s.registry.Current()
	verifier, err := tokens.New(now.Issuers, nil)
	s.viewed = &view{now, verifier}
	s.heal()
	return err
}

// closeRegistry returns when nothing of it runs any more.
func (s *service) closeRegistry() {
	if s.registry != nil {
		s.registry.Wait()
	}
	s.ending.Wait()
}

// view is what is judged by now. Keys that were fetched of issuers which did
// not change go along from one to the next.
func (s *service) view() *view {
	s.viewing.Lock()
	defer s.viewing.Unlock()
	now := s.registry.Current()
	if now == s.viewed.snapshot {
		return s.viewed
	}
	verifier, err := s.viewed.tokens.With(now.Issuers)
	if err != nil {
		// A file of keys that the configuration names is gone. What changed of
		// other issuers holds all the same.
		s.log.Error("the keys of an issuer cannot be read again; those from before stay", "error", err)
	}
	s.viewed = &view{now, verifier}
	return s.viewed
}

// policy is the core's view of the registry, with the session keys of now.
func (s *service) policy(v *view) core.Policy {
	p := v.snapshot.Policy
	p.SessionKeys = s.derive.secrets(time.Now())
	return p
}

// currentPolicy is what a request that began now would be judged by.
func (s *service) currentPolicy() core.Policy { return s.policy(s.view()) }
