package replica

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/scheduler/internal/core"
	"github.com/hashicorp/raft"
)

func joinEntry() core.Entry {
	return core.Entry{Now: 1, Join: &core.Host{ID: "h1", Boot: "b", Tiers: []corev1.Tier{corev1.Tier_TIER_NULL},
		Capacity: core.Limits{CPUMillis: 1 << 30, MemoryBytes: 1 << 50}}}
}

func apply(t testing.TB, r *Replica, e core.Entry) core.Outcome {
	t.Helper()
	out, err := r.Apply(context.Background(), e)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func text(t testing.TB, r *Replica) string {
	t.Helper()
	var b bytes.Buffer
	r.View(func(s *core.State) {
		c := s.Clone()
		c.Index = 0 // a barrier moves it
		if _, err := c.WriteTo(&b); err != nil {
			t.Error(err)
		}
	})
	return b.String()
}

func TestStateSurvivesRestartAndSnapshot(t *testing.T) {
	dir := t.TempDir()
	r := openLeader(t, Config{Dir: dir})
	apply(t, r, joinEntry())
	for n := range 50 {
		apply(t, r, openEntry(n))
	}
	if err := r.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	for n := range 50 {
		apply(t, r, openEntry(100+n))
	}
	want := text(t, r)
	id, _ := os.ReadFile(filepath.Join(dir, "server-id"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openLeader(t, Config{Dir: dir})
	if got := text(t, r); got != want {
		t.Error("the state after a restart differs")
	}
	again, _ := os.ReadFile(filepath.Join(dir, "server-id"))
	if string(id) != string(again) || len(id) == 0 {
		t.Errorf("server id changed from %q to %q", id, again)
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	openLeader(t, Config{Dir: dir})
	if r, err := Open(Config{Dir: dir, Log: quiet()}); err == nil {
		_ = r.Close()
		t.Error("two replicas use one folder")
	} else if !strings.Contains(err.Error(), "another process uses") {
		t.Errorf("unclear: %v", err)
	}
}

// hungStore is a disk that stops answering.
type hungStore struct {
	raft.LogStore
	hang chan struct{}
}

func (h hungStore) StoreLogs([]*raft.Log) error { <-h.hang; return nil }

func TestHungDiskEndsTheProcess(t *testing.T) {
	fatal := make(chan error, 1)
	h := hungStore{raft.NewInmemStore(), make(chan struct{})}
	w := newWatchdog(h, raft.NewInmemStore(), 50*time.Millisecond, func(err error) { fatal <- err })
	defer w.stop()
	done := make(chan struct{})
	go func() { defer close(done); _ = w.StoreLogs(nil) }()
	select {
	case err := <-fatal:
		if !strings.Contains(err.Error(), "the disk hangs") {
			t.Errorf("unclear: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("nobody noticed")
	}
	close(h.hang)
	<-done
}

func TestDecodeOfNewerEntryIsRefused(t *testing.T) {
	if _, err := core.DecodeEntry([]byte(`{"v":99}`)); err == nil {
		t.Error("an entry of a newer format was read")
	}
}

// TestLogWhoseLastEntriesWereTakenBackOpensAgain: a follower takes back what
// an earlier leader could not commit (hashicorp/raft-wal 31: it could not be
// started again).
func TestLogWhoseLastEntriesWereTakenBackOpensAgain(t *testing.T) {
	dir := t.TempDir()
	logger := newLogger(quiet())
	store := func(l *logStore, from, to, term uint64) {
		t.Helper()
		var all []*raft.Log
		for n := from; n <= to; n++ {
			all = append(all, &raft.Log{Index: n, Term: term, Data: []byte("entry")})
		}
		if err := l.entries.StoreLogs(all); err != nil {
			t.Fatal(err)
		}
	}
	l, err := openLog(dir, logger)
	if err != nil {
		t.Fatal(err)
	}
	store(l, 1, 20, 1)
	for round := range uint64(3) {
		from := 15 + round
		if err := l.entries.DeleteRange(from, 20); err != nil {
			t.Fatal(err)
		}
		store(l, from, 20, 2+round)
		if err := l.close(); err != nil {
			t.Fatal(err)
		}
		if l, err = openLog(dir, logger); err != nil {
			t.Fatal(err)
		}
		for n := uint64(1); n <= 20; n++ {
			var e raft.Log
			if err := l.entries.GetLog(n, &e); err != nil || n < 15 && e.Term != 1 || n >= from && e.Term != 2+round {
				t.Fatalf("round %d: entry %d is of term %d: %v", round, n, e.Term, err)
			}
		}
	}
	if err := l.close(); err != nil {
		t.Fatal(err)
	}
}
