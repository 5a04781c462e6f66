package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// twoSnapshots is a sleeping session with an old file that holds "old", then "new".
func twoSnapshots(t *testing.T) (w *world, key string, list snapshotsOut) {
	w = start(t)
	put := func(text string) {
		t.Helper()
		if _, say, code := w.berth(text, "cp", "-", "default:/work/f"); code != 0 {
			t.Fatal(say)
		}
		w.ok("session", "close")
	}
	put("old")
	key, err := w.session()
	if err != nil || key == "" {
		t.Fatal(key, err)
	}
	w.srv.Age(key, 3*time.Hour)
	put("new")
	w.json(&list, "disk", "snapshots")
	if len(list.Snapshots) != 2 || !list.Snapshots[0].Head || list.Snapshots[1].Head || list.Session != key {
		t.Fatalf("%+v", list)
	}
	return w, key, list
}

func TestDiskRestore(t *testing.T) {
	w, key, list := twoSnapshots(t)
	head, old := list.Snapshots[0].ID, list.Snapshots[1].ID
	if out := w.ok("disk", "restore", "--at", "1h"); !strings.Contains(out, "brings back snapshot "+old) || !strings.Contains(out, "stays a snapshot: "+head) {
		t.Errorf("%s", out)
	}
	if out := w.ok("session", "show", key); !strings.Contains(out, "the next open brings back snapshot "+old) {
		t.Errorf("%s", out)
	}
	if out := w.ok("disk", "snapshots", key); !strings.Contains(out, "restored by the next open") {
		t.Errorf("%s", out)
	}
	var r restoreOut
	w.json(&r, "disk", "restore", key, "--snapshot", "head")
	if r.Pending || r.TakenBack != old || r.Snapshot != head {
		t.Errorf("%+v", r)
	}
	r = restoreOut{}
	w.json(&r, "disk", "restore", key, "--snapshot", old[:len(old)-3])
	if !r.Pending || r.Snapshot != old || r.Head != head || r.TakenBack != "" {
		t.Errorf("%+v", r)
	}
	var open openOut
	w.json(&open, "session", "open")
	if open.Origin != "restored" || open.RestoredAsOf == nil || !open.RestoredAsOf.Equal(list.Snapshots[1].TakenAt) {
		t.Errorf("%+v", open)
	}
	if out := w.ok("cp", "default:/work/f", "-"); out != "old" {
		t.Errorf("%q", out)
	}
	if _, say, code := w.berth("", "disk", "restore", "--snapshot", head); code != 1 || !strings.Contains(say, "is awake; close it first") {
		t.Errorf("exit %d, %q", code, say)
	}
	w.ok("session", "close")
	w.json(&list, "disk", "snapshots")
	if len(list.Snapshots) != 3 || list.Snapshots[0].RestoredFrom != old || list.Snapshots[1].ID != head || list.Restore != "" {
		t.Errorf("%+v", list)
	}
	out := w.ok("tail", "--since", "1h", "--no-follow", "--event", "rewound")
	if strings.Count(out, "\n") != 3 || !strings.Contains(out, "after all") {
		t.Errorf("%s", out)
	}
}

func TestDiskBadInput(t *testing.T) {
	w, key, _ := twoSnapshots(t)
	for _, c := range []struct {
		args []string
		say  string
		code int
	}{
		{[]string{"snapshots", "A.B"}, "session name", 2},
		{[]string{"snapshots", "nobody"}, "no session nobody", 1},
		{[]string{"snapshots", "s" + strings.Repeat("a", len(key)-1)}, "no session", 1},
		{[]string{"restore"}, "--at TIME or --snapshot ID", 2},
		{[]string{"restore", "--at", "1h", "--snapshot", "head"}, "one of them", 2},
		{[]string{"restore", "--at", "yesterday"}, "is no time", 2},
		{[]string{"restore", "--at=-5m"}, "is no time", 2},
		{[]string{"restore", "--at", "2226-01-01"}, "in the future", 2},
		{[]string{"restore", "--at", "5h"}, "no snapshot is as old", 1},
		{[]string{"restore", "--snapshot", "x123"}, "not the id of a snapshot", 2},
		{[]string{"restore", "--snapshot", "m\x1b[31m"}, "not the id of a snapshot", 2},
		{[]string{"restore", "--snapshot", "mfff"}, "", 1},
		{[]string{"grow", "default"}, "<size>", 2},
		{[]string{"grow", "default", "8GB"}, "8GiB", 2},
		{[]string{"grow", "default", "-8GiB"}, "unknown flag", 2},
		{[]string{"grow", "default", "8.5GiB"}, "no size", 2},
		{[]string{"grow", "default", "0GiB"}, "no size that a disk can have", 2},
		{[]string{"grow", "default", "99999999999TiB"}, "no size that a disk can have", 2},
		{[]string{"grow", "default", "8GiB"}, "while its session is awake", 1},
		{[]string{"import", "default", "/no/such"}, "no such file", 1},
		{[]string{"import", "default", t.TempDir()}, "is a directory", 2},
		{[]string{"import", "default", "-", "--to", "work"}, "absolute", 2},
		{[]string{"import", "default", "-", "--to", "/no/such"}, "no such file", 1},
		{[]string{"import", "default", "-"}, "the archive cannot be taken", 1},
		{[]string{"import", "A.B", "-"}, "session name", 2},
		{[]string{"export", "default", t.TempDir()}, "is no file", 2},
		{[]string{"export", "default", "/no/such/folder/x.tar"}, "no such file", 1},
		{[]string{"export", "A.B"}, "session name", 2},
		{[]string{"export"}, "<session>", 2},
	} {
		if _, say, code := w.berth("no archive", append([]string{"disk"}, c.args...)...); code != c.code || !strings.Contains(say, c.say) || strings.Count(say, "\n") != 1 {
			t.Errorf("disk %q: exit %d, %q", c.args, code, say)
		}
	}
}

func TestDiskVerifyAndGrow(t *testing.T) {
	w, key, list := twoSnapshots(t)
	if out := w.ok("disk", "verify"); out != "2 objects of 2 snapshots, 6 B: all good\n" {
		t.Errorf("%s", out)
	}
	w.srv.Damage(key, list.Snapshots[1].ID, "its hash differs")
	out, say, code := w.berth("", "--json", "disk", "verify", key)
	var v verifyOut
	if err := json.Unmarshal([]byte(out), &v); err != nil || code != 1 || len(v.Damaged) != 1 || v.Damaged[0].Reason != "its hash differs" || strings.Count(say, "\n") != 1 {
		t.Errorf("exit %d, %s, %s, %v", code, out, say, err)
	}
	if out, say, code := w.berth("", "disk", "verify"); code != 1 || !strings.Contains(out, "WHAT IS WRONG") || !strings.Contains(say, "1 object of session") {
		t.Errorf("exit %d, %s, %s", code, out, say)
	}
	w.ok("session", "open")
	if out := w.ok("disk", "grow", "default", "8GiB"); !strings.Contains(out, "has 8 GiB now") {
		t.Errorf("%s", out)
	}
	if out := w.ok("disk", "grow", key, "512MiB"); !strings.Contains(out, "does not shrink") {
		t.Errorf("%s", out)
	}
	w.ok("session", "open", "fresh")
	if out := w.ok("disk", "snapshots", "fresh"); !strings.Contains(out, "has no snapshots") {
		t.Errorf("%s", out)
	}
	if out := w.ok("disk", "verify", "fresh"); !strings.Contains(out, "never saved") {
		t.Errorf("%s", out)
	}
	w.json(&list, "disk", "snapshots", "fresh")
	if list.Snapshots == nil {
		t.Error("a list is null")
	}
}

func TestDiskExportAndImport(t *testing.T) {
	w := start(t)
	if _, say, code := w.berth("hello", "cp", "-", "default:/work/f"); code != 0 {
		t.Fatal(say)
	}
	file := filepath.Join(t.TempDir(), "files.tar")
	var out archiveOut
	w.json(&out, "disk", "export", "default", file)
	info, err := os.Stat(file)
	if err != nil || info.Size() != out.Bytes || out.Entries != 1 || info.Mode().Perm() != 0o600 {
		t.Fatalf("%+v, %v, %v", out, info, err)
	}
	raw := w.ok("disk", "export", "default")
	if r := tar.NewReader(strings.NewReader(raw)); true {
		if h, err := r.Next(); err != nil || h.Name != "work/f" {
			t.Errorf("%+v, %v", h, err)
		}
	}
	w.ok("disk", "import", "second", file)
	if got := w.ok("cp", "second:/work/f", "-"); got != "hello" {
		t.Errorf("%q", got)
	}
	if _, say, code := w.berth(raw, "disk", "import", "second", "-", "--to", "/root"); code != 0 {
		t.Error(say)
	}
	if got := w.ok("cp", "second:/root/work/f", "-"); got != "hello" {
		t.Errorf("%q", got)
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	if err := errors.Join(tw.WriteHeader(&tar.Header{Name: "../up", Mode: 0o600}), tw.Close()); err != nil {
		t.Fatal(err)
	}
	if out, say, code := w.berth(b.String(), "disk", "import", "second", "-"); code != 0 || !strings.Contains(say, "skipped ../up: ") || out != "0 entries, 1.5 KiB\n" {
		t.Errorf("exit %d, %q, %q", code, out, say)
	}
}

// TestAnExportThatFailsLeavesTheOldFile: and nothing beside it.
func TestAnExportThatFailsLeavesTheOldFile(t *testing.T) {
	w := start(t)
	w.ok("session", "open")
	dir := t.TempDir()
	file := filepath.Join(dir, "files.tar")
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if code := run(&app{ctx: ctx, stdin: strings.NewReader(""), stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}}, []string{"disk", "export", "default", file}); code != 1 {
		t.Errorf("exit %d", code)
	}
	if raw, err := os.ReadFile(file); err != nil || string(raw) != "old" {
		t.Errorf("%q, %v", raw, err)
	}
	if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
}

func TestParseWhen(t *testing.T) {
	zone := time.FixedZone("here", 2*3600)
	now := time.Date(2026, 11, 29, 18, 0, 0, 0, zone)
	for text, want := range map[string]string{
		"2026-11-29T14:05:00Z": "2026-11-29T14:05:00Z", "2026-11-29T14:05:00+02:00": "2026-11-29T12:05:00Z",
		"2026-11-29 14:05": "2026-11-29T12:05:00Z", "2026-11-29 14:05:09": "2026-11-29T12:05:09Z", "2026-11-29T14:05": "2026-11-29T12:05:00Z",
		"2026-11-29": "2026-11-28T22:00:00Z", "10m": "2026-11-29T15:50:00Z", "3d": "2026-11-26T16:00:00Z", "1h30m": "2026-11-29T14:30:00Z", "0s": "2026-11-29T16:00:00Z",
	} {
		if got, err := parseWhen(text, now); err != nil || when(got) != want {
			t.Errorf("%q: %s, %v", text, when(got), err)
		}
	}
	for _, text := range []string{"", "now", "10", "-10m", "-3d", "2026-11-29 18:01", "2026-13-01", "2026-11-29 25:00", "99999d", "1e9h", "9999999h", "10m ago", "3.5d", " 10m"} {
		if got, err := parseWhen(text, now); err == nil {
			t.Errorf("%q was taken for %s", text, when(got))
		}
	}
}

func FuzzParseWhen(f *testing.F) {
	for _, s := range []string{"10m", "2026-11-29 14:05", "2026-11-29T14:05:00Z", "3d", "\xff"} {
		f.Add(s)
	}
	now := time.Date(2026, 11, 29, 18, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s string) {
		if at, err := parseWhen(s, now); err == nil && (at.After(now) || now.Sub(at) > maxAgo) {
			t.Errorf("%q is %s", s, at)
		} else if e := (exitCode{}); err != nil && (!errors.As(err, &e) || e.code != 2) {
			t.Errorf("%q: %v", s, err)
		}
	})
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"8GiB", "1KiB", "8GB", "18446744073709551615TiB", "+8GiB", "08MiB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && (n == 0 || n > maxSize || n%1024 != 0) {
			t.Errorf("%q is %d", s, n)
		}
	})
}
