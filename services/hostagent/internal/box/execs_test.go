package box

import (
	"slices"
	"testing"
	"time"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// TestABrokenExecIsHeldUntilItsClientIsLate: an attach that fails does not end the hold, one that works does; the exec
// is overdue once.
func TestABrokenExecIsHeldUntilItsClientIsLate(t *testing.T) {
	var execs tracker
	execs.init(&Box{gate: exporting{}})
	if err := execs.adopt(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	late := time.Now().Add(AttachAgainWithin + time.Minute)
	overdue := func(want ...string) {
		t.Helper()
		if got := execs.overdue(late); !slices.Equal(got, want) {
			t.Errorf("overdue %q, want %q", got, want)
		}
	}
	if got := execs.overdue(time.Now()); len(got) > 0 {
		t.Errorf("overdue at once: %q", got)
	}
	if err := execs.watch(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	overdue() // a client is about to attach
	execs.unwatch("x")
	overdue("x")
	overdue()
	execs.hold("x", time.Now())
	execs.attached("x")
	overdue()
}

// TestCreditAcknowledgesOutputInOrder: spans of both channels are acknowledged when all of them is paid for; credit
// ahead of output acknowledges none; alternating single bytes take few spans.
func TestCreditAcknowledgesOutputInOrder(t *testing.T) {
	s := newStream(t.Context(), "s", "d", 0, 0)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(s.addCredit(100)) // ahead
	s.out.credit = 0
	s.sent(boxv1.Channel_CHANNEL_STDOUT, spanBytes, spanBytes)
	s.sent(boxv1.Channel_CHANNEL_STDERR, 10, 10)
	must(s.addCredit(spanBytes - 1))
	if got := s.clientHas(); got != (wire.Offsets{}) {
		t.Errorf("a part of a span acknowledges %+v", got)
	}
	must(s.addCredit(1))
	if got := s.clientHas(); got != (wire.Offsets{Stdout: spanBytes}) {
		t.Errorf("the first span acknowledges %+v", got)
	}
	must(s.addCredit(10))
	if got := s.clientHas(); got != (wire.Offsets{Stdout: spanBytes, Stderr: 10}) {
		t.Errorf("both spans acknowledge %+v", got)
	}
	for i := range uint64(100_000) {
		s.sent(boxv1.Channel_CHANNEL_STDOUT+boxv1.Channel(i%2), i, 1)
	}
	if n := len(s.out.spans); n > 100_000/spanBytes+1 {
		t.Errorf("%d spans", n)
	}
}
