// Package keyfile keeps versioned 32-byte secrets in a file that only its
// owner can read. It guarantees that a file which others can read or write is
// refused rather than used, that a new file appears whole or not at all and is
// on disk before its key is used, that of two processes which create the same
// file at once both end up with the same key, and that of two which change it
// at once neither undoes what the other did.
package keyfile

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Size is the length of every secret in bytes.
const Size = 32

const (
	maxKeys  = 16
	maxBytes = 16 << 10
)

// Key is one version of a secret. From is when new things begin to be made
// with it, zero for always; until then it only reads what others made with it.
type Key struct {
	Version uint32    `json:"version"`
	Secret  []byte    `json:"secret"`
	From    time.Time `json:"from,omitzero"`
}

// Keys are the live versions of a secret, newest first, never empty.
type Keys []Key

// Newest is the version that new things are made with.
func (k Keys) Newest() Key { return k[0] }

// Version returns the key of one version.
func (k Keys) Version(v uint32) (Key, bool) {
	i := slices.IndexFunc(k, func(x Key) bool { return x.Version == v })
	if i < 0 {
		return Key{}, false
	}
	return k[i], true
}

type file struct {
	Keys Keys `json:"keys"`
}

// Open reads the file at path, and creates it with one random key if it does
// not exist; missing folders are made with mode 0700.
func Open(path string) (Keys, error) {
	keys, err := Read(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return keys, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, errs.E("make the folder of a key file", errkind.Unavailable, path, err)
	}
	tmp, err := write(path, Keys{fresh(1)})
	if err != nil {
		return nil, errs.E("create key file", errkind.Unavailable, path, err)
	}
	// A link, unlike a rename, never replaces a file that another process made.
	err = os.Link(tmp, path)
	_ = os.Remove(tmp)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errs.E("create key file", errkind.Unavailable, path, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, errs.E("create key file", errkind.Unavailable, path, err)
	}
	return Read(path)
}

// Read reads the file at path; the error of a missing one is fs.ErrNotExist.
func Read(path string) (Keys, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, errs.E("read key file", errkind.Unavailable, path, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, errs.E("read key file", errkind.Unavailable, path, err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, errs.Errorf("read key file", errkind.Denied,
			"%s can be read or written by others (mode %04o); it must be a plain file of mode 0600", path, info.Mode().Perm())
	}
	if info.Size() > maxBytes {
		return nil, errs.E("read key file", errkind.TooLarge, path, "it is too large to be one")
	}
	return parse(path, f)
}

// parse reads what a file holds: one JSON value and nothing after it.
func parse(path string, r io.Reader) (Keys, error) {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	var got file
	if err := dec.Decode(&got); err != nil {
		return nil, errs.Errorf("read key file", errkind.DataLoss, "%s is no key file", path)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errs.Errorf("read key file", errkind.DataLoss, "something follows the keys in %s", path)
	}
	if err := check(path, got.Keys); err != nil {
		return nil, err
	}
	return got.Keys, nil
}

// Rotate adds a new version, which becomes the newest at once, and keeps at
// most keep versions in all. What was made with a dropped version cannot be
// read any more.
func Rotate(path string, keep int) (Keys, error) {
	return Change(path, func(keys Keys) (Keys, error) {
		keys = append(Keys{fresh(keys.Newest().Version + 1)}, keys...)
		return keys[:min(len(keys), max(keep, 1), maxKeys)], nil
	})
}

func check(path string, keys Keys) error {
	if len(keys) == 0 || len(keys) > maxKeys {
		return errs.Errorf("read key file", errkind.DataLoss, "%s holds %d keys, it must hold 1 to %d", path, len(keys), maxKeys)
	}
	for i, k := range keys {
		if len(k.Secret) != Size || k.Version == 0 {
			return errs.Errorf("read key file", errkind.DataLoss, "key %d of %s is malformed", i+1, path)
		}
		if i > 0 && k.Version >= keys[i-1].Version {
			return errs.Errorf("read key file", errkind.DataLoss, "the versions in %s do not fall from newest to oldest", path)
		}
	}
	return nil
}

func fresh(version uint32) Key {
	k := Key{Version: version, Secret: make([]byte, Size)}
	_, _ = rand.Read(k.Secret) // never fails: crypto/rand ends the process instead
	return k
}

// write makes a temporary file beside path, synced, with mode 0600.
func write(path string, keys Keys) (string, error) {
	raw, err := json.MarshalIndent(file{keys}, "", "  ")
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return "", err
	}
	_, err = f.Write(append(raw, '\n'))
	err = errors.Join(err, f.Chmod(0o600), f.Sync(), f.Close())
	if err != nil {
		_ = os.Remove(f.Name())
		return "", fmt.Errorf("write %s: %w", f.Name(), err)
	}
	return f.Name(), nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
