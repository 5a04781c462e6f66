package core

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

var (
	record       = flag.String("record", "", "write logs and the snapshots of their states to this directory")
	recordFrom   = flag.String("record-from", "", "take the logs from this directory")
	recordFormat = flag.Int("record-format", EntryVersion, "write the logs in this format")
)

// TestRecord writes logs as this version stores them, each with the snapshot
// of the state that it leads to: one of every script and some random ones.
// See testdata/README.md.
func TestRecord(t *testing.T) {
	if *record == "" {
		t.Skip("records only when asked: go test -run TestRecord -record DIR")
	}
	if *recordFrom != "" {
		recordStates(t)
		return
	}
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		recordLog(t, strings.TrimSuffix(filepath.Base(f), ".txt"), scriptLog(t, string(raw)))
	}
	for seed := range 4 {
		recordLog(t, fmt.Sprint("random-", seed+1), randomLog(seed+1, 150))
	}
}

// recordStates writes the snapshots of logs that another version wrote.
func recordStates(t *testing.T) {
	logs, err := filepath.Glob(filepath.Join(*recordFrom, "*.log"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no logs: %v", err)
	}
	for _, path := range logs {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		recordLog(t, strings.TrimSuffix(filepath.Base(path), ".log"), bytes.Split(bytes.TrimSpace(raw), []byte("\n")))
	}
}

// recordLog writes a log and the snapshot of its state.
func recordLog(t *testing.T, name string, log [][]byte) {
	s := NewState()
	for i, raw := range log {
		e, err := DecodeEntry(raw)
		if err != nil {
			t.Fatal(err)
		}
		if e.V != *recordFormat {
			return // a script about entries of several formats
		}
		s.Apply(uint64(i+1), e)
	}
	for ext, raw := range map[string][]byte{".log": append(bytes.Join(log, []byte("\n")), '\n'), ".snapshot": dump(t, s)} {
		if err := os.WriteFile(filepath.Join(*record, name+ext), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// scriptLog returns the entries of a script.
func scriptLog(t *testing.T, script string) [][]byte {
	m := newStage()
	for _, block := range strings.Split(strings.TrimSpace(script), "\n\n") {
		in, _, _ := strings.Cut(block, "\n----")
		for _, l := range strings.Split(in, "\n") {
			if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, "#") {
				m.do(t, l)
			}
		}
	}
	return m.log
}

// randomLog returns a random history; the seed decides all of it.
func randomLog(seed, steps int) [][]byte {
	return rapid.Custom(func(t *rapid.T) [][]byte {
		m := &model{s: NewState(), now: 1, epochs: map[ids.SessionKey]ids.Epoch{}, gens: map[ids.SessionKey]ids.Generation{},
			revs: map[ids.SessionKey]uint64{}, ids: map[string]bool{}, disks: map[disk]*diskModel{},
			owners: map[ids.SessionKey]map[ids.Epoch]ids.Host{}, drains: map[ids.Host]bool{}}
		var log [][]byte
		for range steps {
			m.now += Time(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "pass"))
			e := m.draw(t)
			e.Now, e.V = m.now, *recordFormat
			if e.Open != nil {
				e.Open.Actor.Acting = "agent"
			}
			raw, err := e.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if e, err = DecodeEntry(raw); err != nil {
				t.Fatal(err)
			}
			m.index++
			m.s.Apply(m.index, e)
			log = append(log, raw)
			for _, s := range m.s.Sessions() {
				m.refs = append(m.refs, Ref{s.Key, s.Generation, s.Epoch})
			}
		}
		return log
	}).Example(seed)
}
