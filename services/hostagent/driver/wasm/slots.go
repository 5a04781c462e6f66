package wasm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// slots hands out ranges of host ids. They are claimed by files, because several host agents of one
// machine share its ids: a file holds the name of the driver that has the range.
type slots struct {
	dir, owner string
	count      uint32
}

// take claims a free range.
func (s slots) take() (uint32, error) {
	for n := range s.count {
		switch err := s.claim(n); {
		case err == nil:
			return n, nil
		case !errors.Is(err, fs.ErrExist):
			return 0, fmt.Errorf("claim a range of user ids: %w", err)
		}
	}
	return 0, fmt.Errorf("all %d ranges of user ids are taken", s.count)
}

func (s slots) file(n uint32) string { return filepath.Join(s.dir, strconv.FormatUint(uint64(n), 10)) }

// claim makes the file with its content in one step: it is never there without an owner.
func (s slots) claim(n uint32) error {
	if _, err := os.Lstat(s.file(n)); err == nil {
		return fs.ErrExist
	}
	tmp, err := os.CreateTemp(s.dir, "."+s.owner+"-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.WriteString(s.owner)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Link(tmp.Name(), s.file(n))
}

// give returns a range. Idempotent; another driver's range stays its own.
func (s slots) give(n uint32) {
	if b, err := os.ReadFile(s.file(n)); err == nil && string(b) == s.owner {
		_ = os.Remove(s.file(n))
	}
}

// recall claims the ranges in use after a restart and returns those that a crash left claimed.
func (s slots) recall(used map[uint32]bool) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		n, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			if strings.HasPrefix(e.Name(), "."+s.owner+"-") {
				_ = os.Remove(filepath.Join(s.dir, e.Name()))
			}
			continue
		}
		if !used[uint32(n)] {
			s.give(uint32(n))
		}
	}
	for n := range used {
		if err := s.claim(n); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
