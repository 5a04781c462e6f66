package auditlog

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

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
	j.mu.Lock()
	_, err := j.file.Write([]byte(`{"id":"cut o`)) // all that fitted; not even a line end did
	j.torn = true
	j.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	j.put(t, 2)
	j.mu.Lock()
	err = j.write(append(bytes.Repeat([]byte("x"), 3*journalLine), '\n'))
	j.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	j.put(t, 3)
	j.die()
	j, left := open(t, dir)
	want(t, left, "r1", "r2", "r3")
	j.die()
}

// TestFullDiskIsNamedAtTheStart: records that wait cannot be taken over on a full
// disk, and the error says what to do.
func TestFullDiskIsNamedAtTheStart(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, dir)
	j.put(t, 1)
	j.die()
	if err := os.Symlink("/dev/full", j.path+".new"); err != nil {
		t.Fatal(err)
	}
	_, err := Open(nil, slog.New(slog.DiscardHandler), dir)
	if err == nil || !strings.Contains(err.Error(), "the disk of the audit journal is full; free space in "+dir) {
		t.Fatalf("the log opened on a full disk: %v", err)
	}
	j, left := open(t, dir) // there is room again
	want(t, left, "r1")
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

// TestARecordThatIsNeverTakenHoldsUpNoOthers: one that the stream refuses for
// good is dropped, and the record behind it is written.
func TestARecordThatIsNeverTakenHoldsUpNoOthers(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("identity"))
	j, _ := open(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	subject := subjects.Audit("identity", "acme", "")
	l := &Log{conn: conn, log: bustest.Log(t), ctx: ctx, journal: j, isIn: map[string]bool{}}
	for id, size := range map[string]int{"a": 100 << 10, "b": 1} {
		r := record{ctx: ctx, id: id, subject: subject, body: make([]byte, size), kept: true}
		if err := j.add(line{ID: id, Subject: subject, Body: r.body}); err != nil {
			t.Fatal(err)
		}
		l.parked = append(l.parked, r)
	}
	for end := time.Now().Add(time.Minute); len(l.parked) > 0 && time.Now().Before(end); {
		l.settleParked(2) // as the log does, again and again: a stream that is busy answers late
	}
	if len(l.parked) != 0 || len(j.wait) != 0 {
		t.Errorf("%d parked, %d in the journal", len(l.parked), len(j.wait))
	}
	j.die()
}
