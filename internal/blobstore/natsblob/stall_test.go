package natsblob

import (
	"testing"
	"testing/synctest"
	"time"
)

// A writer waits while the stream answers what other writers sent before, and
// no longer once it answers what was sent later.
func TestAnswersToEarlierWritersAreNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bucket{}
		earlier := time.Now()
		time.Sleep(time.Second)
		sent := time.Now()
		want := func(what string, want time.Duration) {
			t.Helper()
			if left := b.patience(sent, sent); left != want {
				t.Errorf("%s: %s left, want %s", what, left, want)
			}
		}
		time.Sleep(stall - time.Second)
		want("without any answer", time.Second)
		b.answered(earlier)
		want("after an answer to an earlier writer", stall)
		time.Sleep(stall)
		want("after silence since", 0)
		time.Sleep(time.Second)
		b.answered(sent.Add(2 * lookAfter))
		if left := b.patience(sent, sent); left > 0 {
			t.Errorf("%s left after an answer to a later writer", left)
		}
	})
}
