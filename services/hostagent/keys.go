package hostagent

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/seal"
)

// hostKey reads this host's curve key, and makes it at the first start. A file that others can
// read is refused.
func hostKey(path string) (seal.XKey, error) {
	const op = "read host key"
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return newHostKey(path)
	}
	if err != nil {
		return seal.XKey{}, errs.E(op, errkind.Internal, path, err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return seal.XKey{}, errs.E(op, errkind.Refused, path, "the file must be readable by its owner alone (chmod 600)")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return seal.XKey{}, errs.E(op, errkind.Internal, path, err)
	}
	key, err := seal.ParseSeed(strings.TrimSpace(string(b)))
	if err != nil {
		return seal.XKey{}, errs.E(op, errkind.DataLoss, path, err)
	}
	return key, nil
}

func newHostKey(path string) (seal.XKey, error) {
	const op = "make host key"
	key, err := seal.NewKey(rand.Reader)
	if err != nil {
		return key, errs.E(op, errkind.Internal, path, err)
	}
	seed, err := key.Seed()
	if err != nil {
		return key, errs.E(op, errkind.Internal, path, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return key, errs.E(op, errkind.Internal, path, err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".host.key-*") // mode 0600
	if err != nil {
		return key, errs.E(op, errkind.Internal, path, err)
	}
	_, err = f.WriteString(seed + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return key, errs.E(op, errkind.Internal, path, errors.Join(err, os.Remove(f.Name())))
	}
	return key, nil
}
