package keyfile

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

func made(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "k.json")
	if _, err := Open(path); err != nil {
		t.Fatal(err)
	}
	return path
}

func versions(k Keys) (out []uint32) {
	for _, x := range k {
		out = append(out, x.Version)
	}
	return out
}

func same(a, b []uint32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestANewVersionReadsBeforeItMakes(t *testing.T) {
	path, now := made(t), time.Now()
	keys, err := Add(path, 8, now.Add(time.Minute), now)
	if err != nil {
		t.Fatal(err)
	}
	if got := versions(keys.Making(now)); !same(got, []uint32{1, 2}) {
		t.Errorf("before it began: %v", got)
	}
	if got := versions(keys.Making(now.Add(time.Minute))); !same(got, []uint32{2, 1}) {
		t.Errorf("after it began: %v", got)
	}
	if _, err := Add(path, 8, now, now.Add(time.Second)); errs.Kind(err) != errkind.Refused {
		t.Errorf("another one before that began: %v", err)
	}
	if got := versions(keys.Making(now.Add(-time.Hour))); !same(got, []uint32{1, 2}) {
		t.Errorf("a clock that is behind: %v", got)
	}
}

func TestNoVersionIsDroppedToMakeRoom(t *testing.T) {
	path, now := made(t), time.Now()
	for i := range 3 {
		if _, err := Add(path, 4, now, now); err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
	if _, err := Add(path, 4, now, now); errs.Kind(err) != errkind.Refused {
		t.Fatalf("a fifth version: %v", err)
	}
	if keys, _ := Read(path); !same(versions(keys), []uint32{4, 3, 2, 1}) {
		t.Errorf("left: %v", versions(keys))
	}
}

func TestTwoThatRotateAtOnceKeepBothVersions(t *testing.T) {
	path, now := made(t), time.Now()
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := Add(path, 8, now, now); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	keys, err := Read(path)
	if err != nil || !same(versions(keys), []uint32{7, 6, 5, 4, 3, 2, 1}) {
		t.Fatalf("%v, %v", versions(keys), err)
	}
	for i := range keys[1:] {
		if bytes.Equal(keys[i].Secret, keys[i+1].Secret) {
			t.Error("two versions have the same secret")
		}
	}
}

func TestAVersionInUseIsNeverRetired(t *testing.T) {
	path, now := made(t), time.Now()
	refused := func(what string, version uint32, want errkind.Kind) {
		t.Helper()
		if _, err := Retire(path, version, time.Hour, now); errs.Kind(err) != want {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused("the only one", 1, errkind.Refused)
	if _, err := Add(path, 8, now.Add(time.Minute), now); err != nil {
		t.Fatal(err)
	}
	refused("before the later one began", 1, errkind.Refused)
	refused("a stranger", 9, errkind.NotFound)
	now = now.Add(59 * time.Minute)
	refused("when some may not make new things with the later one yet", 1, errkind.Refused)
	now = now.Add(3 * time.Minute)
	keys, err := Retire(path, 1, time.Hour, now)
	if err != nil || !same(versions(keys), []uint32{2}) {
		t.Fatalf("%v, %v", versions(keys), err)
	}
	refused("the last one", 2, errkind.Refused)
}

// TestAChangeByRootLeavesTheFileToItsOwner: a service that runs as another user reads the new version.
func TestAChangeByRootLeavesTheFileToItsOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change another user's file")
	}
	path := made(t)
	if err := os.Chown(path, 12345, 23456); err != nil {
		t.Skip(err)
	}
	now := time.Now()
	if _, err := Add(path, 8, now.Add(time.Minute), now); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if is := info.Sys().(*syscall.Stat_t); is.Uid != 12345 || is.Gid != 23456 || info.Mode().Perm() != 0o600 {
		t.Errorf("owner %d:%d, mode %o", is.Uid, is.Gid, info.Mode().Perm())
	}
}

func FuzzRead(f *testing.F) {
	const key = `"secret":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`
	f.Add([]byte(`{"keys":[{"version":1,` + key + `}]}`))
	f.Add([]byte(`{"keys":[{"version":2,` + key + `,"from":"2026-01-02T03:04:05Z"},{"version":1,` + key + `}]}`))
	f.Add([]byte(`{"keys":null}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		keys, err := parse("k.json", bytes.NewReader(raw))
		if err != nil {
			if keys != nil {
				t.Error("keys of a file that was refused")
			}
			return
		}
		if len(keys) == 0 || len(keys.Making(time.Now())) != len(keys) || len(keys.Newest().Secret) != Size {
			t.Errorf("%d keys", len(keys))
		}
	})
}
