package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestDeletedAndErased: what a deleted session wrote cannot be read back by anybody, also by one who
// kept a copy of every object of the store, of the raft log with its snapshots and of the whole bus.
//
//   - The copies hold the contents only sealed: the marker is in none of them in the clear.
//   - What opens them is the generation's data key. The one record of it, wrapped by the platform key,
//     lies in a bucket of the bus. Its very bytes are found in the copy of the bus, so that the test
//     looks in the right place, and afterwards nowhere below the state folder. (Who copied the bus's
//     own files *and* the platform key before the delete has the key: that is what the platform key
//     and design rule 9 are about, and why backups leave this bucket out.)
//   - The copies, put back in place of the live files, give a session that does not open.
//   - On the host no image, clone, view or folder is left, and the marker is in no block of the pool's
//     file either: the space was given back down to the file system below.
//   - The store has no object of the generation any more.
func TestDeletedAndErased(t *testing.T) {
	store, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url})
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	key, generation := s.Key(), s.Generation()
	marker := make([]byte, 64)
	_, _ = rand.Read(marker)
	write := func(path string) {
		t.Helper()
		// alone in its file, and amid others
		if _, err := s.Files().Write(t.Context(), path, bytes.NewReader(bytes.Repeat(marker, 3)), sdk.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	write("/root/a")
	if _, err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	write("/root/a") // the old blocks are in a snapshot only
	write("/opt/b")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s = open(t, c, sdk.OpenOptions{})
	write("/var/c")
	if _, err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	if hits := holders(t, e.Dir, marker); !slices.Contains(hits, e.PoolFile()) {
		t.Fatalf("before the delete the marker is in %v and not in the pool's file: the test looks in the wrong place", hits)
	}
	kept := t.TempDir()
	for name, dir := range map[string]string{"store": store, "scheduler": filepath.Join(e.Dir, "scheduler"), "bus": filepath.Join(e.Dir, "bus")} {
		run(t, "cp", "-a", dir, filepath.Join(kept, name))
	}
	record := keyRecord(t, filepath.Join(kept, "bus"), "acme."+key+"."+generation)
	if len(holders(t, filepath.Join(e.Dir, "bus"), record)) == 0 {
		t.Fatal("the record of the data key is not in the bus: the test looks in the wrong place")
	}

	heard := listen(t, e.Operator(), key)
	if err := s.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if hits := holders(t, e.Dir, record); len(hits) > 0 {
		t.Errorf("the delete is acknowledged and the data key's record is still in %v", hits)
	}
	heard.await(t, "erased", nil)
	if names := heard.names(); !before(names, "deleted", "erased") {
		t.Errorf("the events are %v", names)
	}
	eventually(t, 15*time.Second, func() error {
		if left := objects(t, store, key); len(left) > 0 {
			return fmt.Errorf("the store still has %v", left)
		}
		return nil
	})
	eventually(t, 15*time.Second, func() error {
		unix.Sync()
		if hits := holders(t, e.Dir, marker); len(hits) > 0 {
			return fmt.Errorf("the marker is still in %v", hits)
		}
		return nil
	})
	if out := run(t, "find", e.HostDir(), "-name", "*"+key+"*"); out != "" {
		t.Errorf("on the host is left:\n%s", out)
	}
	if hits := holders(t, kept, marker); len(hits) > 0 {
		t.Errorf("in the clear in what was kept: %v", hits)
	}

	nothingComesBack(t, e, store, kept, marker)
}

// TestDeleteWhileTheStoreIsAway: a delete does not wait for the store. The host's files of the session go at once. The
// objects in the store cannot be decrypted; they go once the store is back, also after a restart, and only then the
// session is reported as erased.
func TestDeleteWhileTheStoreIsAway(t *testing.T) {
	store, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url})
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	key := s.Key()
	put(t, s, "/root/f", "x")
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	heard := listen(t, e.Operator(), key)
	away := store + ".away"
	if err := errors.Join(os.Rename(store, away), os.WriteFile(store, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteSession(t.Context(), sdk.UserSession{}); err != nil {
		t.Fatal(err)
	}
	heard.await(t, "deleted", nil)
	eventually(t, 15*time.Second, func() error {
		if left := images(t, e, key); len(left) > 0 {
			return fmt.Errorf("on the host is left %v", left)
		}
		return nil
	})
	if names := heard.names(); slices.Contains(names, "erased") {
		t.Errorf("without a store the events are %v", names)
	}
	e.Kill()
	if err := errors.Join(os.Remove(store), os.Rename(away, store)); err != nil {
		t.Fatal(err)
	}
	if len(objects(t, store, key)) == 0 {
		t.Fatal("the objects went while the store was away: the test looks in the wrong place")
	}
	e.Up()
	eventually(t, 30*time.Second, func() error {
		if left := objects(t, store, key); len(left) > 0 {
			return fmt.Errorf("the store still has %v", left)
		}
		_, err := e.Operator().LastEvent(t.Context(), "acme", key, "erased")
		return err
	})
}

// nothingComesBack puts the copies of the store and of the raft log in the place of the live ones: to
// the scheduler the session is as it was before the delete, and every object is there.
func nothingComesBack(t *testing.T, e *testenv.Env, store, kept string, marker []byte) {
	t.Helper()
	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"store": store, "scheduler": filepath.Join(e.Dir, "scheduler")} {
		run(t, "rm", "-rf", dir)
		run(t, "cp", "-a", filepath.Join(kept, name), dir)
	}
	e.Up()
	s, err := e.Client("acme", "ann").Open(t.Context(), sdk.OpenOptions{Risk: sdk.OwnCode(), Wait: 15 * time.Second})
	if err == nil {
		t.Errorf("from the copies the session opens, %s; /root/a has %d bytes", s.Origin(), len(content(t, s, "/root/a")))
	} else if !strings.Contains(err.Error(), "deleted") {
		t.Errorf("from the copies the open says: %v", err)
	}
	if hits := holders(t, e.HostDir(), marker); len(hits) > 0 {
		t.Errorf("from the copies the marker came back to %v", hits)
	}
}

func before(names []string, first, second string) bool {
	all := strings.Join(names, " ")
	return strings.Contains(all, first) && strings.Index(all, first) < strings.Index(all, second)
}

// holders are the files below a folder in which the bytes are, whatever kind of file system they are.
// Holes are passed over.
func holders(t *testing.T, dir string, what []byte) (hits []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		found, err := contains(path, what)
		if found {
			hits = append(hits, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return hits
}

// contains reads the parts of a sparse file that hold something.
func contains(path string, what []byte) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ESPIPE) { // no more; or the name of a network namespace, which has no content
			return false, nil
		}
		if err != nil {
			return false, err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return false, err
		}
		hit, err := within(io.NewSectionReader(f, from, to-from), what)
		if hit || err != nil {
			return hit, err
		}
		at = to
	}
}

func within(r io.Reader, what []byte) (bool, error) {
	buf, have := make([]byte, 1<<20), 0
	for {
		n, err := io.ReadFull(r, buf[have:])
		if bytes.Contains(buf[:have+n], what) {
			return true, nil
		}
		if err != nil {
			return false, nil // the end, or the file became shorter
		}
		have = copy(buf, buf[len(buf)-len(what):])
	}
}

// keyRecord finds the value that a bucket of the bus keeps for a name, in the files of its stream.
func keyRecord(t *testing.T, bus, name string) []byte {
	t.Helper()
	subject := []byte("$KV.BERTH_DATAKEYS." + name)
	for _, file := range holders(t, bus, subject) {
		if filepath.Ext(file) != ".blk" {
			continue
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// A record: length 4, sequence 8, time 8, subject length 2, subject, value, hash 8.
		const head, hash = 22, 8
		at := bytes.LastIndex(raw, subject)
		if at < head {
			continue
		}
		length := int(binary.LittleEndian.Uint32(raw[at-head:]) &^ (1 << 31))
		if end := at - head + length - hash; end > at+len(subject)+32 && end <= len(raw) {
			return raw[at+len(subject) : end]
		}
	}
	t.Fatal("the copy of the bus has no record of the data key")
	return nil
}
