package auditlog

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"testing"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/subjects"
)

// TestRepeatedRecordsTakeNoRoom: whoever repeats a request while the stream is
// away does not let the journal grow.
func TestRepeatedRecordsTakeNoRoom(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, dir)
	for range 1000 {
		j.put(t, 1)
	}
	if info, err := os.Stat(j.path); err != nil || info.Size() > 1000 {
		t.Errorf("%d bytes for one record: %v", info.Size(), err)
	}
	j.die()
	j, left := open(t, dir)
	want(t, left, "r1")
	j.die()
}

// TestJournalAfterAFullDisk: a part of a line spoils no later line, and a line
// that is too long keeps no process from starting.
func TestJournalAfterAFullDisk(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, dir)
	j.put(t, 1)
	if _, err := j.file.Write([]byte(`{"id":"cut o`)); err != nil { // all that fitted; not even a line end did
		t.Fatal(err)
	}
	j.torn = true
	j.put(t, 2)
	if err := j.write(append(bytes.Repeat([]byte("x"), 3*journalLine), '\n')); err != nil {
		t.Fatal(err)
	}
	j.put(t, 3)
	j.die()
	j, left := open(t, dir)
	want(t, left, "r1", "r2", "r3")
	j.die()
}

// TestOffersLeaveTheJournalToRecords: what may be lost does not fill it.
func TestOffersLeaveTheJournalToRecords(t *testing.T) {
	e := bustest.Start(t)
	j, _ := open(t, t.TempDir())
	l := &Log{conn: bustest.Connect(t, e, subjects.Service("identity")), log: slog.New(slog.DiscardHandler), in: make(chan record), journal: j}
	for range 10 {
		if l.Offer(context.Background(), "s", wrapperspb.String("x")) {
			t.Fatal("nobody takes it")
		}
	}
	if len(j.wait) != 0 {
		t.Errorf("%d records wait in the journal that nobody will publish", len(j.wait))
	}
	j.die()
}
