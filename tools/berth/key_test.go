package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/keyfile"
)

func sampleKeys() keysListOut {
	keys := keyfile.Keys{{Version: 3, From: at.Add(2 * time.Hour)}, {Version: 2, From: at}, {Version: 1}}
	return keysListOutOf(keys, usesOf{of: map[uint32]use{1: {sessions: 12, deleted: 1}, 2: {sessions: 3}}}, at.Add(90*time.Minute))
}

// keyFile has, as version 1, the key that the fake's identity derives with.
func (w *world) keyFile() string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), "k.json")
	secret := make([]byte, keyfile.Size)
	copy(secret, "sdktest") // HMAC fills a short key with zeros
	raw, err := json.Marshal(map[string]any{"keys": keyfile.Keys{{Version: 1, Secret: secret}}})
	if err == nil {
		err = os.WriteFile(path, raw, 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return path
}

// TestAKeyWithSessionsIsNotRetired: the end of a version never makes somebody
// a second session.
func TestAKeyWithSessionsIsNotRetired(t *testing.T) {
	w := start(t)
	path := w.keyFile()
	w.ok("session", "open")
	w.ok("key", "rotate", "session", "--file", path, "--in", "10s")
	refuse := func(want string, args ...string) {
		t.Helper()
		if _, stderr, code := w.berth("", args...); code != 1 || !strings.Contains(stderr, want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("berth %s: exit %d, %q; want %q", strings.Join(args, " "), code, stderr, want)
		}
	}
	refuse("begins at", "key", "rotate", "session", "--file", path)
	refuse("1 session is derived with it", "key", "retire", "session", "1", "--file", path)
	var out keysListOut
	w.json(&out, "key", "list", "session", "--file", path)
	if len(out.Versions) != 2 || out.Versions[0].Makes || !out.Versions[1].Makes || out.Versions[1].Sessions != 1 || out.Versions[0].From == nil {
		t.Fatalf("%+v", out)
	}
	w.ok("session", "delete", "default")
	refuse("deleted less than 2 hours ago", "key", "retire", "session", "1", "--file", path)
	keys, err := keyfile.Read(path)
	if err != nil || len(keys) != 2 {
		t.Fatalf("a refusal changed the file: %d versions, %v", len(keys), err)
	}
	other := filepath.Join(t.TempDir(), "other.json")
	if _, err := keyfile.Open(other); err != nil {
		t.Fatal(err)
	}
	w.ok("session", "open", "second")
	refuse("not the one that identity uses", "key", "retire", "session", "1", "--file", other)
}

// TestAKeyThatNothingHangsOnIsRetired, when the later one has begun for long enough.
func TestAKeyThatNothingHangsOnIsRetired(t *testing.T) {
	w := start(t)
	path := filepath.Join(t.TempDir(), "k.json")
	if _, err := keyfile.Open(path); err != nil {
		t.Fatal(err)
	}
	long := time.Now().Add(-time.Hour)
	if _, err := keyfile.Add(path, mostVersions, long, long); err != nil {
		t.Fatal(err)
	}
	if out := w.ok("key", "retire", "session", "1", "--file", path); !strings.Contains(out, "makes sessions") {
		t.Errorf("%s", out)
	}
	if keys, err := keyfile.Read(path); err != nil || len(keys) != 1 || keys[0].Version != 2 {
		t.Errorf("%d versions, %v", len(keys), err)
	}
	if _, stderr, code := w.berth("", "key", "rotate", "session", "--file", path, "--in", "1s"); code != 2 {
		t.Errorf("a version that begins at once: exit %d, %s", code, stderr)
	}
}
