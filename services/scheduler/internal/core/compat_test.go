package core

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLogOfFormat2 replays logs that an older version wrote: they come to the
// very state that it wrote as a snapshot, events included.
func TestLogOfFormat2(t *testing.T) { replayFormat(t, 2) }

// TestLogOfFormat3 does so with those of the version after it.
func TestLogOfFormat3(t *testing.T) { replayFormat(t, 3) }

// TestLogOfFormat4 does so with those of the version after that one, and with
// logs that its successor wrote while it led a group with one of that version.
func TestLogOfFormat4(t *testing.T) { replayFormat(t, 4) }

// TestLogOfFormat5 does so with those of the version after that one.
func TestLogOfFormat5(t *testing.T) { replayFormat(t, 5) }

// TestLogOfFormat6 does so with those of the version before this one, and with
// logs that this version writes while it leads a group with one of that version.
func TestLogOfFormat6(t *testing.T) { replayFormat(t, 6) }

// TestSnapshotHasTheFormatOfItsEntries: a replica that reads the entries reads
// the snapshot too. The format is not lost with a restart, and never falls.
func TestSnapshotHasTheFormatOfItsEntries(t *testing.T) {
	s := NewState()
	written := func() int {
		t.Helper()
		var h header
		raw := dump(t, s)
		if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&h); err != nil {
			t.Fatal(err)
		}
		again, err := ReadState(bytes.NewReader(raw))
		if err != nil || again.Format != h.Version {
			t.Fatalf("restored with format %d from %d: %v", again.Format, h.Version, err)
		}
		s = again
		return h.Version
	}
	for i, c := range []struct{ entry, snapshot int }{{3, 3}, {4, 4}, {3, 4}, {EntryVersion, EntryVersion}, {4, EntryVersion}} {
		s.Apply(uint64(i+1), Entry{V: c.entry, Now: 1, Raise: &Raise{}})
		if got := written(); got != c.snapshot {
			t.Errorf("after an entry of format %d the snapshot has format %d, want %d", c.entry, got, c.snapshot)
		}
	}
	newer := fmt.Appendf(nil, `{"format":%q,"version":%d}`, format, SnapshotVersion+1)
	if _, err := ReadState(bytes.NewReader(newer)); !errors.As(err, new(NewerFormat)) {
		t.Errorf("a snapshot of a newer format: %v", err)
	}
	entry := fmt.Appendf(nil, `{"v":%d}`, EntryVersion+1)
	if _, err := DecodeEntry(entry); !errors.As(err, new(NewerFormat)) {
		t.Errorf("an entry of a newer format: %v", err)
	}
}

func replayFormat(t *testing.T, version int) {
	logs, err := filepath.Glob(fmt.Sprintf("testdata/v%d/*.log", version))
	if err != nil || len(logs) < 10 {
		t.Fatalf("%d logs: %v", len(logs), err)
	}
	for _, path := range logs {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".log"), func(t *testing.T) {
			raw, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			s, index := NewState(), uint64(0)
			for l := bufio.NewScanner(bytes.NewReader(raw)); l.Scan(); {
				e, err := DecodeEntry(l.Bytes())
				if err != nil || e.V != version {
					t.Fatalf("format %d, %v", e.V, err)
				}
				index++
				s.Apply(index, e)
			}
			old, err := os.Open(strings.TrimSuffix(path, ".log") + ".snapshot")
			if err != nil {
				t.Fatal(err)
			}
			defer old.Close()
			was, err := ReadState(old)
			if err != nil {
				t.Fatal(err)
			}
			differs(t, dump(t, was), dump(t, s))
		})
	}
}

func differs(t *testing.T, want, got []byte) {
	t.Helper()
	a, b := bytes.Split(want, []byte("\n")), bytes.Split(got, []byte("\n"))
	for i := range a {
		if i >= len(b) || !bytes.Equal(a[i], b[i]) {
			t.Fatalf("line %d\n%s\n%s", i, a[i], b[min(i, len(b)-1)])
		}
	}
	if len(a) != len(b) {
		t.Fatalf("%d lines, want %d", len(b), len(a))
	}
}

// FuzzDecodeEntry: whatever a log holds, it is refused or applied; a state
// never becomes one that cannot be written and read again.
func FuzzDecodeEntry(f *testing.F) {
	for _, path := range []string{"moves", "erase", "restore", "sleep", "retention"} {
		raw, err := os.ReadFile("testdata/v2/" + path + ".log")
		if err != nil {
			f.Fatal(err)
		}
		for _, l := range bytes.Split(raw, []byte("\n")) {
			f.Add(l)
		}
	}
	for _, l := range []string{`{"v":3,"move":{"session":"s0","host":"host-0"}}`, `{"v":3,"remove_host":{"host":"host-0","lose_unsaved":true}}`,
		`{"v":3,"host_lost":{"host":"host-0","boot":"boot-0"}}`, `{"v":3,"save":{"session":"a"}}`, `{"v":3,"cleared":{"session":"a"}}`,
		`{"v":4,"wake_failed":{"session":"s0","vm_written":true}}`,
		`{"v":5,"place":{"session":"s0","candidates":[{"h":"host-0","rv":"p1","cold":true}]}}`} {
		f.Add([]byte(l))
	}
	base, index := Fill(2, 4)
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := DecodeEntry(b)
		if err != nil {
			return
		}
		s := base.Clone()
		s.Apply(index+1, e)
		s.Apply(index+2, e)
		first := dump(t, s)
		again, err := ReadState(bytes.NewReader(first))
		if err != nil {
			t.Fatal(err)
		}
		differs(t, first, dump(t, again))
	})
}

// FuzzReadState: a broken snapshot is refused, and one that is read can be
// worked with.
func FuzzReadState(f *testing.F) {
	for _, name := range []string{"moves", "erase", "restore"} {
		raw, err := os.ReadFile("testdata/v2/" + name + ".snapshot")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	s, _ := Fill(2, 2)
	f.Add(dump(f, s))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ReadState(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, h := range s.Hosts() {
			s.Apply(s.Index+1, Entry{Now: 1, HostLost: &HostLost{Host: h.ID, Boot: h.Boot}})
			s.Apply(s.Index+1, Entry{Now: 1, RemoveHost: &RemoveHost{Host: h.ID, LoseUnsaved: true}})
		}
		for _, v := range s.Sessions() {
			Next(v)
			s.Rank(v, *v.Terms, allAlive)
			s.Explain(v, allAlive)
		}
		dump(t, s)
	})
}
