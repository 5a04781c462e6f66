package agent

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// TestInboxDoublesNothing puts pieces of one text in any overlap: what comes out
// is the text, and a piece after a hole is refused.
func TestInboxDoublesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOfN(rapid.Byte(), 1, 300).Draw(t, "text")
		q := newInbox()
		var got []byte
		for q.received < uint64(len(text)) {
			from := rapid.IntRange(0, len(text)).Draw(t, "from")
			to := rapid.IntRange(from, len(text)).Draw(t, "to")
			hole := uint64(from) > q.received
			err := q.put(uint64(from), text[from:to])
			var f *wire.Failure
			if hole != (errors.As(err, &f) && f.Kind == wire.KindBadOffset) {
				t.Fatalf("%d..%d after %d: %v", from, to, q.received, err)
			}
			for len(q.parts) > 0 {
				p, err := q.next()
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, p...)
			}
		}
		if err := q.end(uint64(len(text))); err != nil {
			t.Fatal(err)
		}
		if _, err := q.next(); !errors.Is(err, io.EOF) || !bytes.Equal(got, text) {
			t.Fatalf("%v, %q, want %q", err, got, text)
		}
	})
}

func TestInboxHoldsOneWindow(t *testing.T) {
	q := newInbox()
	for at := uint64(0); at < wire.Window; at += wire.MaxPayload {
		if err := q.put(at, make([]byte, wire.MaxPayload)); err != nil {
			t.Fatal(err)
		}
	}
	if err := q.put(wire.Window, []byte("x")); err == nil || q.limit() != wire.Window {
		t.Errorf("a byte beyond the window: %v, limit %d", err, q.limit())
	}
	if _, err := q.next(); err != nil || q.limit() != wire.Window+wire.MaxPayload {
		t.Errorf("limit %d, %v", q.limit(), err)
	}
}

func TestStatLineOfAnOddName(t *testing.T) {
	line := "12 (a) b) (c) S 1 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 99 1000 3 18446744073709551615 1"
	p, ok := parseStat(12, []byte(line))
	if !ok || p.Name != "a) b) (c" || p.State != "S" || p.PPid != 1 || p.RSS == 0 {
		t.Errorf("%+v, %v", p, ok)
	}
	for _, bad := range []string{"", "12", "12 (x", ") (", "12 (x) S"} {
		if _, ok := parseStat(12, []byte(bad)); ok {
			t.Errorf("%q was understood", bad)
		}
	}
}

func TestLogNeverBlocks(t *testing.T) {
	r, w := io.Pipe() // nobody reads
	defer r.Close()
	l := newLogWriter(w)
	for range 10_000 {
		if n, err := l.Write([]byte("line\n")); n != 5 || err != nil {
			t.Fatal(n, err)
		}
	}
}
