package identity

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// TestWhoAsksAThousandTimesWaitsOnce: a user who has a right taken away again and again, while credentials is
// away, leaves one thing behind that waits.
func TestWhoAsksAThousandTimesWaitsOnce(t *testing.T) {
	var u underWay
	begun := 0
	for range 1000 {
		if u.begin("a") {
			begun++
		}
	}
	if begun != 1 || !u.begin("b") {
		t.Fatalf("%d are under way", begun)
	}
	if !u.done("a") || u.done("b") {
		t.Error("what was asked for again is not told, or what was not is")
	}
	if !u.begin("a") || u.done("a") || len(u.of) != 0 {
		t.Error("what is done stays")
	}
}

// TestWhatIsTriedLaterEnds: when it works, when it is too late, and when the service ends.
func TestWhatIsTriedLaterEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		follow, quit := context.WithCancel(t.Context())
		s := &service{log: slog.New(slog.DiscardHandler), follow: follow}
		over, tried := 0, 0
		s.later(endAgain, func(context.Context) error { tried++; return nil }, func() { over++ })
		s.ending.Wait()
		if over != 1 || tried != 1 {
			t.Errorf("it worked: over %d, tried %d", over, tried)
		}
		began := time.Now()
		s.later(endAgain, func(context.Context) error { return errors.New("away") }, func() { over++ })
		s.ending.Wait()
		if took := time.Since(began); over != 2 || took < endWithin || took > endWithin+time.Minute {
			t.Errorf("it never worked: over %d after %s", over, took)
		}
		s.later(endAgain, func(context.Context) error { return errors.New("away") }, func() { over++ })
		quit()
		s.ending.Wait()
		if over != 3 {
			t.Errorf("the service ended: over %d", over)
		}
	})
}
