// Package idrange hands out ranges of user ids of the host to sandboxes. It guarantees that no two
// drivers of one machine, in one process or in several, have the same range at the same time, and that
// a range that a crash left claimed is free again once its driver is back.
package idrange

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Claims are the ranges that one driver takes from those of the machine. They are claimed by files,
// because several host agents of one machine share its ids: a file holds the name of the driver that
// has the range.
type Claims struct {
	Dir   string // shared by all drivers of the machine
	Owner string // the driver, another one than any other on the machine
	Count uint32 // how many ranges there are
}

// Take claims a free range.
func (c Claims) Take() (uint32, error) {
	for n := range c.Count {
		switch err := c.claim(n); {
		case err == nil:
			return n, nil
		case !errors.Is(err, fs.ErrExist):
			return 0, fmt.Errorf("claim a range of user ids: %w", err)
		}
	}
	return 0, fmt.Errorf("all %d ranges of user ids are taken", c.Count)
}

func (c Claims) file(n uint32) string { return filepath.Join(c.Dir, strconv.FormatUint(uint64(n), 10)) }

// claim makes the file with its content in one step: it is never there without an owner.
func (c Claims) claim(n uint32) error {
	if _, err := os.Lstat(c.file(n)); err == nil {
		return fs.ErrExist
	}
	tmp, err := os.CreateTemp(c.Dir, "."+c.Owner+"-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.WriteString(c.Owner)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Link(tmp.Name(), c.file(n))
}

// Give returns a range. Idempotent; another driver's range stays its own.
func (c Claims) Give(n uint32) {
	if b, err := os.ReadFile(c.file(n)); err == nil && string(b) == c.Owner {
		_ = os.Remove(c.file(n))
	}
}

// Recall claims the ranges in use after a restart and returns those that a crash left claimed.
func (c Claims) Recall(used map[uint32]bool) error {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		n, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			if strings.HasPrefix(e.Name(), "."+c.Owner+"-") {
				_ = os.Remove(filepath.Join(c.Dir, e.Name()))
			}
			continue
		}
		if !used[uint32(n)] {
			c.Give(uint32(n))
		}
	}
	for n := range used {
		if err := c.claim(n); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
