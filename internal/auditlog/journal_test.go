package auditlog

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

func open(t *testing.T, dir string) (*journal, []string) {
	t.Helper()
	j, left, err := openJournal(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range left {
		out = append(out, l.ID)
	}
	return j, out
}

// die closes the file as the end of a process does: nothing more is written.
func (j *journal) die() {
	close(j.quit)
	<-j.ended
	_ = j.file.Close()
}

func (j *journal) put(t *testing.T, n int) string {
	t.Helper()
	id := fmt.Sprint("r", n)
	if err := j.add(line{ID: id, Subject: "s", At: time.Unix(int64(n), 0), Body: []byte("body")}); err != nil {
		t.Fatal(err)
	}
	return id
}

func want(t *testing.T, got []string, ids ...string) {
	t.Helper()
	if !slices.Equal(got, ids) {
		t.Fatalf("left are %v, want %v", got, ids)
	}
}

// TestJournalOutlivesItsProcess: what is not done comes back in order, from the
// journals of all processes that died, and from none of one that lives.
func TestJournalOutlivesItsProcess(t *testing.T) {
	dir := t.TempDir()
	a, left := open(t, dir)
	want(t, left)
	b, left := open(t, dir) // at the same time
	want(t, left)
	for n := range 6 {
		if n%2 == 0 {
			a.put(t, n)
		} else {
			b.put(t, n)
		}
	}
	if err := a.done("r2"); err != nil {
		t.Fatal(err)
	}
	a.die()
	c, left := open(t, dir)
	want(t, left, "r0", "r4")
	c.die()
	b.die()
	d, left := open(t, dir)
	want(t, left, "r0", "r1", "r3", "r4", "r5")
	for _, id := range left {
		if err := d.done(id); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.close(); err != nil {
		t.Fatal(err)
	}
	e, left := open(t, dir)
	want(t, left)
	e.die()
	if files, _ := filepath.Glob(filepath.Join(dir, "*")); len(files) != 1 {
		t.Errorf("files are left behind: %v", files)
	}
}

// TestJournalReadsPastATornLine: a crash cuts off the last line; lines of the
// next process are not part of it.
func TestJournalReadsPastATornLine(t *testing.T) {
	dir := t.TempDir()
	a, _ := open(t, dir)
	a.put(t, 1)
	a.put(t, 2)
	a.die()
	raw, err := os.ReadFile(a.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(a.path, raw[:len(raw)-9], 0o600); err != nil {
		t.Fatal(err)
	}
	b, left := open(t, dir)
	want(t, left, "r1")
	b.put(t, 3)
	b.die()
	c, left := open(t, dir)
	want(t, left, "r1", "r3")
	c.die()
}

// TestJournalIsBounded: it shrinks when records are done, and refuses more than
// it may hold.
func TestJournalIsBounded(t *testing.T) {
	j, _ := open(t, t.TempDir())
	defer j.die()
	body := make([]byte, 600<<10)
	for n := range 40 {
		id := fmt.Sprint("b", n)
		if err := j.add(line{ID: id, Body: body}); err != nil {
			t.Fatal(err)
		}
		if err := j.done(id); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(j.path); err != nil || info.Size() > 2*journalLarge {
		t.Errorf("%d bytes for nothing that waits: %v", info.Size(), err)
	}
	var err error
	n := 0
	for ; err == nil && n < 200; n++ {
		err = j.add(line{ID: fmt.Sprint("c", n), Body: body})
	}
	if err == nil || j.bytes > journalFull {
		t.Errorf("%d records, %d bytes: %v", n, j.bytes, err)
	}
}

// TestRecordsOfADeadProcessAreWritten, once each, also one that the stream has
// already.
func TestRecordsOfADeadProcessAreWritten(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("identity"))
	dir := t.TempDir()
	subject := subjects.Audit("identity", "acme", ids.SessionKey(""))
	j, _ := open(t, dir)
	for n := range 3 {
		if err := j.add(line{ID: fmt.Sprint("audit-", n), Subject: subject, At: time.Now(), Body: []byte{10, 1, 'x'}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.PublishRaw(t.Context(), subject, []byte{10, 1, 'x'}, bus.WithID("audit-1")); err != nil {
		t.Fatal(err)
	}
	j.die()
	l, err := Open(conn, bustest.Log(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	l.RecordAs(t.Context(), "audit-2", subject, wrapperspb.String("x"))
	l.Record(t.Context(), subject, wrapperspb.String("x"))
	l.Close(bustest.Context(t))
	s, err := bustest.Connect(t, e, subjects.Operator()).JetStream().Stream(t.Context(), "BERTH_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	if n := s.CachedInfo().State.Msgs; n != 4 {
		t.Errorf("%d records in the stream, want 4", n)
	}
	again, left := open(t, dir)
	want(t, left)
	again.die()
}

// TestRecordsWaitForAStreamThatIsAwayForLong: later ones do not wait for them,
// and all are written when it is back.
func TestRecordsWaitForAStreamThatIsAwayForLong(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("identity"))
	js := bustest.Connect(t, e, subjects.Keeper()).JetStream()
	s, err := js.Stream(t.Context(), "BERTH_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), "BERTH_AUDIT"); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	j, _ := open(t, dir)
	l := start(conn, bustest.Log(t), j, nil, 50*time.Millisecond)
	subject := subjects.Audit("identity", "acme", ids.SessionKey(""))
	for range 20 {
		l.Record(t.Context(), subject, wrapperspb.String("x"))
	}
	time.Sleep(2 * l.patience) // the first of them are parked
	if s, err = js.CreateStream(t.Context(), s.CachedInfo().Config); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if info, err := s.Info(t.Context()); err == nil && info.State.Msgs == 20 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d of 20 records after 30 s: %v", info.State.Msgs, err)
		}
	}
	l.Close(bustest.Context(t))
	again, left := open(t, dir)
	want(t, left)
	again.die()
}
