package drivertest

import (
	"errors"
	"io"
	"os"
	"strconv"
	"testing"
	"time"
)

func itoa(n int) string { return strconv.Itoa(n) }

// outlivesWriter: an agent that dies, and a guest that is deaf from then on.
func (s *suite) outlivesWriter(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	for range 5 {
		if err := k.Raw(`{"op":"echo","ar`); err != nil { // dies in the middle of a line
			t.Fatal(err)
		}
		k.Close()
		var err error
		if k, err = s.dial(t, sb); err != nil {
			t.Fatal(err)
		}
		if err := k.Raw("\n"); err != nil {
			t.Fatal(err)
		}
		k.must(t, "echo", "heard")
	}
	k.Close()
}

// reopens: a channel that can be opened only so many times.
func (s *suite) reopens(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	k.Close()
	for i := range 50 {
		k, err := s.dial(t, sb)
		if err != nil {
			t.Fatalf("opening it for the %dth time: %v", i+2, err)
		}
		k.must(t, "echo", "heard")
		k.Close()
	}
}

// boundaries: output that is cut, or stalls, at the size of some buffer.
func (s *suite) boundaries(t *testing.T) {
	for _, n := range []int64{1, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537, 1<<20 - 1, 1<<20 + 1} {
		s.bulkOut(t, s.pair.ka, n)
		s.bulkIn(t, s.pair.ka, n)
	}
	s.pair.ka.must(t, "echo", "and goes on")
}

// bulk is how much much is: less in a run on claimed sandboxes, whose pipes are those of any other.
func (s *suite) bulk() int64 {
	if s.claimed() {
		return 4 << 20
	}
	return 64 << 20
}

// bulkOutput: much output that hangs half-way or arrives with holes.
func (s *suite) bulkOutput(t *testing.T) { s.bulkOut(t, s.pair.ka, s.bulk()) }

// bulkInput: much input that hangs half-way or arrives with holes.
func (s *suite) bulkInput(t *testing.T) { s.bulkIn(t, s.pair.ka, s.bulk()) }

func (s *suite) bulkOut(t *testing.T, k *Talk, n int64) {
	t.Helper()
	k.must(t, "bulkout", strconv.FormatInt(n, 10))
	if err := k.expectRaw(n); err != nil {
		t.Fatalf("%d bytes out: %v", n, err)
	}
}

func (s *suite) bulkIn(t *testing.T, k *Talk, n int64) {
	t.Helper()
	id, err := k.Send("bulkin", strconv.FormatInt(n, 10))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.writeRaw(n); err != nil {
		t.Fatalf("%d bytes in: %v", n, err)
	}
	if _, err := k.Await(id, answerTime); err != nil {
		t.Fatalf("%d bytes in: %v", n, err)
	}
}

// bothWays: input and output at the same time that wait for each other for ever.
func (s *suite) bothWays(t *testing.T) {
	const n = 8 << 20
	k := s.pair.ka
	k.must(t, "mirror", itoa(n))
	wrote := make(chan error, 1)
	go func() { wrote <- k.writeRaw(n) }()
	if err := k.expectRaw(n); err != nil {
		t.Error(err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	k.must(t, "echo", "and goes on")
}

// slowReader: output that is lost, or that ends the guest, when nobody reads for a while.
func (s *suite) slowReader(t *testing.T) {
	const n = 1 << 20 // more than a pipe holds
	k := s.pair.ka
	id, err := k.Send("bulkout", itoa(n))
	if err != nil {
		t.Fatal(err)
	}
	s.pair.kb.must(t, "busy", "50") // meanwhile somebody else works
	if _, err := k.Await(id, answerTime); err != nil {
		t.Fatal(err)
	}
	if err := k.expectRaw(n); err != nil {
		t.Error(err)
	}
}

// lastWords: the end of the output, cut because the process ended right behind it.
func (s *suite) lastWords(t *testing.T) {
	d := s.open(t)
	const n = 40_000
	for i := range 3 {
		_, k := s.start(t, d, i+1, 1)
		k.must(t, "last", itoa(n), "0")
		if err := k.expectRaw(n); err != nil {
			t.Errorf("the last words: %v", err)
		}
		k.Close()
	}
}

// endOfOutput: a reader that waits for ever for a sandbox that is gone.
func (s *suite) endOfOutput(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	s.stop(t, d, sb)
	if err := k.ended(5 * time.Second); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the sandbox is gone, and its output does not end")
	} else if err != nil && !errors.Is(err, io.EOF) && !isReset(err) {
		t.Errorf("its output ends with %v", err)
	}
}

// secondOpener: somebody who opens the channel as well, and takes it away from its owner.
func (s *suite) secondOpener(t *testing.T) {
	for range 3 {
		second, err := s.dial(t, s.pair.a)
		if err != nil {
			continue // one at a time
		}
		second.Close()
	}
	s.pair.ka.must(t, "echo", "still mine")
}

// channelsApart: two sandboxes whose channels are one.
func (s *suite) channelsApart(t *testing.T) {
	if s.pair.a.Channel == s.pair.b.Channel {
		t.Error("two sandboxes have one channel")
	}
	one, err := s.pair.ka.Send("echo", "one")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.pair.kb.must(t, "echo", "two"); got != "two" {
		t.Errorf("the second says %q", got)
	}
	if got, err := s.pair.ka.Await(one, answerTime); err != nil || got != "one" {
		t.Errorf("the first says %q, %v", got, err)
	}
}
