package disk

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// writeRecord replaces path in one step: after a crash at any point the old or the new content is
// there, whole.
func writeRecord(path string, v any, at func(step string) error) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	tmp := path + ".new"
	if err := writeWhole(tmp, append(b, '\n')); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	if err := at("record.written"); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("replace record: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

// writeWhole writes a file and brings it to stable storage; after an error there is none.
func writeWhole(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(path)
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer func() { _ = d.Close() }()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	return nil
}

// allocated is what a sparse file really takes from the pool.
func allocated(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", filepath.Base(path), err)
	}
	return uint64(st.Blocks) * 512, nil
}

func freeBytes(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("statfs of the disk pool: %w", err)
	}
	return st.Bavail * uint64(st.Bsize), nil
}
