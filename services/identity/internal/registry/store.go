package registry

import "sync"

// Store is the registry as this replica knows it. It is safe for concurrent use.
type Store struct {
	mu      sync.Mutex
	now     *Snapshot
	changed chan struct{}
}

// Fixed is a store that holds what is configured and never changes: for tests of what judges by a
// snapshot.
func Fixed(s *Snapshot) *Store { return &Store{now: s, changed: make(chan struct{})} }

// Current is the registry now.
func (s *Store) Current() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// Changed is closed at the next change. To miss none, take it before Current.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}
