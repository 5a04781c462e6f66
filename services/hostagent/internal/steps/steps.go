// Package steps runs work that has many parts as a table of steps with their undo. It guarantees
// that after a failure every step that began was undone, last first, and that each step's time is
// known. Do and Undo must be idempotent: a Runner of a test repeats both, and fails at any step.
package steps

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Step is one part. Undo may be nil; it is called for a step whose Do failed half-way as well.
type Step struct {
	Name string
	Do   func(context.Context) error
	Undo func(context.Context) error
}

// Time says when a step began, counted from the start of the whole, and how long it took.
type Time struct {
	Name  string
	Start time.Duration
	Took  time.Duration
}

// Table is stages in order; the steps of one stage run at the same time.
type Table [][]Step

// Runner runs tables. The zero Runner is ready for use.
type Runner struct {
	// Fault is asked after each step, for tests: its error fails the step.
	Fault func(name string) error
	// Crash leaves everything as it is after a failure, for tests: nothing is undone.
	Crash bool
	// Twice runs every Do and Undo two times, for tests.
	Twice bool
}

// undoTime bounds an undo, which runs also when the caller's context has ended.
const undoTime = 30 * time.Second

// Run runs the table and returns the time of each step; on failure everything is undone first.
// An undo that fails as well is joined to the error: a later sweep has to finish it.
func (r Runner) Run(ctx context.Context, t Table) ([]Time, error) {
	began := time.Now()
	var times []Time
	for i, stage := range t {
		got, err := r.stage(ctx, began, stage)
		times = append(times, got...)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil && r.Crash {
			return times, err
		}
		if err != nil {
			return times, errors.Join(err, r.Undo(ctx, t[:i+1]))
		}
	}
	return times, nil
}

// Undo undoes a whole table, last step first.
func (r Runner) Undo(ctx context.Context, t Table) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	var errs []error
	for i := len(t) - 1; i >= 0; i-- {
		for j := len(t[i]) - 1; j >= 0; j-- {
			s := t[i][j]
			if s.Undo == nil {
				continue
			}
			if err := r.repeat(ctx, s.Undo); err != nil {
				errs = append(errs, fmt.Errorf("undo %s: %w", s.Name, err))
			}
		}
	}
	return errors.Join(errs...)
}

func (r Runner) stage(ctx context.Context, began time.Time, stage []Step) ([]Time, error) {
	times, errs := make([]Time, len(stage)), make([]error, len(stage))
	one := func(i int) {
		start := time.Now()
		err := r.repeat(ctx, stage[i].Do)
		if err == nil && r.Fault != nil {
			err = r.Fault(stage[i].Name)
		}
		times[i] = Time{Name: stage[i].Name, Start: start.Sub(began), Took: time.Since(start)}
		if err != nil {
			errs[i] = fmt.Errorf("%s: %w", stage[i].Name, err)
		}
	}
	var wg sync.WaitGroup
	fell := make([]any, len(stage))
	for i := 1; i < len(stage); i++ {
		wg.Go(func() {
			if r.Fault != nil { // a test may have a step fall as a killed process does: that is its caller's
				defer func() { fell[i] = recover() }()
			}
			one(i)
		})
	}
	defer func() {
		wg.Wait()
		for _, f := range fell {
			if f != nil {
				panic(f)
			}
		}
	}()
	if len(stage) > 0 {
		one(0)
	}
	wg.Wait()
	return times, errors.Join(errs...)
}

func (r Runner) repeat(ctx context.Context, f func(context.Context) error) error {
	err := f(ctx)
	if r.Twice && err == nil {
		err = f(ctx)
	}
	return err
}
