package obs

import (
	"context"
	"sync"
	"time"
)

// Step is how long one named step took, and when it began after the first.
type Step struct {
	Name  string        `json:"name"`
	After time.Duration `json:"after"`
	Took  time.Duration `json:"took"`
}

// Steps records the timings of the steps of one operation, each also as a
// span. Its zero value is ready; it is safe for concurrent use.
type Steps struct {
	mu    sync.Mutex
	began time.Time
	list  []Step
}

// Do runs and records one step; its error is f's.
func (s *Steps) Do(ctx context.Context, name string, f func(context.Context) error) error {
	ctx, end := s.Begin(ctx, name)
	err := f(ctx)
	end(err)
	return err
}

// Begin begins a step that ends with the call of end.
func (s *Steps) Begin(ctx context.Context, name string) (_ context.Context, end func(error)) {
	start := time.Now()
	s.mu.Lock()
	if s.began.IsZero() {
		s.began = start
	}
	after := start.Sub(s.began)
	s.mu.Unlock()
	ctx, span := Start(ctx, name)
	return ctx, func(err error) {
		End(span, err)
		s.Add(Step{Name: name, After: after, Took: time.Since(start)})
	}
}

// Add records a step that was measured elsewhere.
func (s *Steps) Add(st Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, st)
}

// List returns the steps in order of their end.
func (s *Steps) List() []Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Step(nil), s.list...)
}
