//go:build linux

package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

// users hands out user ids for QEMUs. They are claimed by symbolic links, which are there with their
// owner's name in one step, because several host agents of one machine share its ids.
type users struct {
	dir, owner   string
	first, count int
}

func (u users) file(n int) string { return filepath.Join(u.dir, strconv.Itoa(n)) }

// take claims a free user.
func (u users) take() (int, error) {
	for n := u.first; n < u.first+u.count; n++ {
		err := os.Symlink(u.owner, u.file(n))
		if err == nil {
			return n, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return 0, fmt.Errorf("claim a user id: %w", err)
		}
	}
	return 0, fmt.Errorf("all %d user ids for machines are taken", u.count)
}

// give returns a user. Idempotent; another driver's stays its own.
func (u users) give(n int) {
	if owner, err := os.Readlink(u.file(n)); err == nil && owner == u.owner {
		_ = os.Remove(u.file(n))
	}
}

// recall claims the users in use after a restart and returns those that a crash left claimed.
func (u users) recall(used map[int]bool) error {
	if err := os.MkdirAll(u.dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(u.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && !used[n] {
			u.give(n)
		}
	}
	for n := range used {
		if err := os.Symlink(u.owner, u.file(n)); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("claim a user id: %w", err)
		}
	}
	return nil
}
