package disk

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/schemas/ids"
)

// Files of a session's folder besides image and record. They only save work: without them the next
// snapshot reads more, and nothing is lost.
//
//	base.index   the plain index of the manifest Record.Base, behind a line that names it
//	base.img     a clone of the image as it was at that manifest
//	shot.img     a clone that is being uploaded, or whose manifest is pending
//	shot.index   the index of the pending manifest
//
// While a file is being made its name ends in .making; disk.img.restoring becomes the image.
const (
	baseImageName = "base.img"
	baseIndexName = "base.index"
	shotImageName = "shot.img"
	shotIndexName = "shot.index"
	making        = ".making"
	restoringName = imageName + ".restoring"
)

const (
	indexMagic    = "berth-base 1"
	maxIndexBytes = 1 << 30
)

// index is the content of base.index or shot.index: which manifest it describes, how large the clone
// beside it is, and the plain index, which this package does not read.
type index struct {
	id    string
	size  uint64
	plain []byte
}

func (x index) encode() []byte {
	return append(fmt.Appendf(nil, "%s %s %d %d\n", indexMagic, x.id, x.size, len(x.plain)), x.plain...)
}

func decodeIndex(b []byte) (index, error) {
	head, plain, ok := bytes.Cut(b, []byte("\n"))
	var x index
	var n int
	if !ok {
		return x, errors.New("the index has no first line")
	}
	if _, err := fmt.Sscanf(string(head), indexMagic+" %s %d %d", &x.id, &x.size, &n); err != nil {
		return x, fmt.Errorf("first line of the index: %w", err)
	}
	if !ids.IsToken(x.id) || n != len(plain) {
		return x, fmt.Errorf("the index of %q has %d bytes, not %d", x.id, len(plain), n)
	}
	x.plain = plain
	return x, nil
}

func (s *Store) file(k Key, name string) string { return filepath.Join(s.folder(k), name) }

// writeIndex brings an index to stable storage under a name of its own.
func (s *Store) writeIndex(k Key, name string, x index) error {
	path := s.file(k, name)
	if err := writeWhole(path+making, x.encode()); err != nil {
		return fmt.Errorf("write index: %w", err)
	}
	return os.Rename(path+making, path)
}

// readIndex returns the index of a manifest; ok is false if the file is missing, damaged, or that of
// another manifest.
func (s *Store) readIndex(k Key, name, id string) (x index, ok bool) {
	if id == "" {
		return x, false
	}
	path := s.file(k, name)
	if st, err := os.Lstat(path); err != nil || st.Size() > maxIndexBytes {
		return x, false
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return x, false
	}
	x, err = decodeIndex(b)
	return x, err == nil && x.id == id
}

// openBase opens what is known of the manifest rec.Base: nil for what is not there or is not certain.
func (s *Store) openBase(rec Record) (clone *os.File, plain []byte) {
	k := rec.Key()
	x, ok := s.readIndex(k, baseIndexName, rec.Base)
	if !ok {
		return nil, nil
	}
	clone, err := os.Open(s.file(k, baseImageName))
	if err != nil {
		return nil, x.plain
	}
	if st, err := clone.Stat(); err != nil || uint64(st.Size()) != x.size || !s.reflink {
		_ = clone.Close()
		return nil, x.plain
	}
	return clone, x.plain
}

// promote saves next, whose Base was pending in old, and makes the files of the shot those of the
// base. At every point the index names the manifest that the clone beside it belongs to, or there is
// no clone.
func (s *Store) promote(next Record) error {
	k := next.Key()
	if err := s.dropClone(k, baseImageName); err != nil {
		return err
	}
	if err := s.at("commit.dropped"); err != nil {
		return err
	}
	err := os.Rename(s.file(k, shotIndexName), s.file(k, baseIndexName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("keep index: %w", err)
	}
	if err := s.at("commit.index"); err != nil {
		return err
	}
	if err := s.save(next); err != nil { // syncs the folder as well
		return err
	}
	if err := s.at("commit.record"); err != nil {
		return err
	}
	if !s.reflink { // a full copy is not worth its space
		return s.dropClone(k, shotImageName)
	}
	err = os.Rename(s.file(k, shotImageName), s.file(k, baseImageName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("keep clone: %w", err)
	}
	return syncDir(s.folder(k))
}

// dropClone removes a clone and returns its space at once, also while it is open: what reads it is
// told elsewhere. It is renamed first, so that a half-emptied clone is never taken for a whole one.
func (s *Store) dropClone(k Key, name string) error {
	path := s.file(k, name)
	err := os.Rename(path, path+making)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drop clone: %w", err)
	}
	return discard(path + making)
}

// discard empties a file before it removes it: the file system frees a removed file some time later.
func discard(path string) error {
	if err := os.Truncate(path, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("empty %s: %w", filepath.Base(path), err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", filepath.Base(path), err)
	}
	return nil
}

// leftovers names the files of a session's folder that a crash left and nobody will use. A shot of
// this process is none, and neither is a restore that is under way.
func (s *Store) leftovers(rec Record) []string {
	k := rec.Key()
	s.mu.Lock()
	shot, busy := s.shots[k] != nil, s.restoring[k] || s.cloning[k]
	s.mu.Unlock()
	entries, err := os.ReadDir(s.folder(k))
	if err != nil || busy {
		return nil
	}
	var out []string
	for _, e := range entries {
		keep := false
		switch e.Name() {
		case imageName, recordName:
			keep = true
		case shotImageName:
			_, ok := s.readIndex(k, shotIndexName, rec.Pending.ID)
			keep = shot || ok && s.reflink
		case shotIndexName:
			_, keep = s.readIndex(k, shotIndexName, rec.Pending.ID)
		case baseImageName:
			_, ok := s.readIndex(k, baseIndexName, rec.Base)
			keep = ok && s.reflink
		case baseIndexName:
			_, keep = s.readIndex(k, baseIndexName, rec.Base)
		}
		if !keep {
			out = append(out, s.file(k, e.Name()))
		}
	}
	return out
}
