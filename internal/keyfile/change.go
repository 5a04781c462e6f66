package keyfile

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const rotating = "rotate key file"

// Change replaces what the file holds by what change makes of it. One change
// follows the other: change is given what the last one left. What change
// refuses, and a result that Read would refuse, leaves the file as it was.
func Change(path string, change func(Keys) (Keys, error)) (Keys, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, errs.E(rotating, errkind.Unavailable, path, err)
	}
	defer dir.Close() // which ends the lock
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errs.E(rotating, errkind.Unavailable, path, err)
	}
	keys, err := Read(path)
	if err != nil {
		return nil, err
	}
	if keys, err = change(slices.Clone(keys)); err != nil {
		return nil, err
	}
	if err := check(path, keys); err != nil {
		return nil, err
	}
	tmp, err := write(path, keys)
	if err != nil {
		return nil, errs.E(rotating, errkind.Unavailable, path, err)
	}
	if err = ownedAs(path, tmp); err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
	} else {
		err = dir.Sync()
	}
	if err != nil {
		return nil, errs.E(rotating, errkind.Unavailable, path, err)
	}
	return keys, nil
}

// ownedAs gives a new file to the owner of the one that it replaces: root may
// change a file that a service reads as another user.
func ownedAs(path, tmp string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	was, ok := info.Sys().(*syscall.Stat_t)
	if !ok || int(was.Uid) == os.Geteuid() {
		return nil
	}
	return os.Chown(tmp, int(was.Uid), int(was.Gid))
}

// Add adds a new version that new things are made with from a time on. It
// drops none, and refuses to have more than most, or one more while the last
// one added has not begun: whoever has not read the file since before that
// would then not know the version that others make things with.
func Add(path string, most int, from, now time.Time) (Keys, error) {
	return Change(path, func(keys Keys) (Keys, error) {
		newest := keys.Newest()
		if len(keys) >= min(most, maxKeys) {
			return nil, errs.Errorf(rotating, errkind.Refused, "%d versions are live, which is as many as there may be; retire an old one first", len(keys))
		}
		if newest.From.After(now) {
			return nil, errs.Errorf(rotating, errkind.Refused, "version %d begins at %s only; rotate again after that", newest.Version, newest.From.UTC().Format(time.RFC3339))
		}
		k := fresh(newest.Version + 1)
		k.From = from.UTC().Truncate(time.Second)
		return append(Keys{k}, keys...), nil
	})
}

// Making are the keys in the order of their use: first the one that new things
// are made with, then the others, newest first.
func (k Keys) Making(now time.Time) Keys {
	made := slices.IndexFunc(k, func(x Key) bool { return !x.From.After(now) })
	if made < 0 { // clocks disagree: what is known for longest
		made = len(k) - 1
	}
	out := append(make(Keys, 0, len(k)), k[made])
	for i, x := range k {
		if i != made {
			out = append(out, x)
		}
	}
	return out
}

// Retire drops a version. It refuses to while new things may be made with it
// somewhere: a later one must have begun at least settled ago.
func Retire(path string, version uint32, settled time.Duration, now time.Time) (Keys, error) {
	return Change(path, func(keys Keys) (Keys, error) {
		const op = "retire a key"
		i := slices.IndexFunc(keys, func(k Key) bool { return k.Version == version })
		if i < 0 {
			return nil, errs.Errorf(op, errkind.NotFound, "there is no version %d", version)
		}
		for _, k := range keys[:i] {
			if !k.From.Add(settled).After(now) {
				return slices.Delete(keys, i, i+1), nil
			}
		}
		return nil, errs.Errorf(op, errkind.Refused, "version %d is in use: no later one began %s ago or earlier", version, settled)
	})
}
