package agent

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/user"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// maxUserDB bounds what is read of passwd and group, which users may edit.
const maxUserDB = 1 << 20

// account is a user of the sandbox.
type account struct {
	name, home string
	uid, gid   uint32
	groups     []uint32
}

// maxAccounts bounds the accounts that are remembered.
const maxAccounts = 64

// accounts remembers who a user was found to be, for as long as the databases
// are the same files with the same times.
type accounts struct {
	mu     sync.Mutex
	stamps [2]stamp
	found  map[string]*account
}

// stamp tells one content of a file from another.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

// settled is the age from which on a file's times tell every change: clocks of
// file systems are coarse.
const settled = 2 * time.Second

// stampOf returns the stamp of a file, and false for one that cannot be relied on.
func stampOf(path string) (stamp, bool) {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return stamp{}, false
	}
	age := time.Since(time.Unix(st.Ctim.Unix()))
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}, age > settled
}

// user resolves "name", "uid", "name:group", "uid:gid"; "" is the default user.
// The account is shared: nobody changes it.
func (a *Agent) user(spec string) (*account, error) {
	if spec == "" {
		spec = a.opts.DefaultUser
	}
	if a.opts.Program != nil {
		return soleUser(spec)
	}
	passwd, ok1 := stampOf(a.opts.Passwd)
	group, ok2 := stampOf(a.opts.Group)
	if !ok1 || !ok2 {
		return a.resolve(spec)
	}
	c := &a.accounts
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := [2]stamp{passwd, group}; c.stamps != now || len(c.found) >= maxAccounts {
		c.stamps, c.found = now, map[string]*account{}
	}
	if u := c.found[spec]; u != nil {
		return u, nil
	}
	u, err := a.resolve(spec)
	if err == nil {
		c.found[spec] = u
	}
	return u, err
}

func (a *Agent) resolve(spec string) (*account, error) {
	passwd, err := readUserDB(a.opts.Passwd)
	if err != nil {
		return nil, err
	}
	group, err := readUserDB(a.opts.Group)
	if err != nil {
		return nil, err
	}
	found, err := user.GetExecUser(spec, &user.ExecUser{Home: "/"}, bytes.NewReader(passwd), bytes.NewReader(group))
	if err != nil {
		if spec == "root" && len(passwd) == 0 {
			return &account{name: "root", home: "/"}, nil
		}
		return nil, wire.Failf(wire.KindInvalid, "user %q: %v", spec, err)
	}
	out := &account{home: found.Home, uid: uint32(found.Uid), gid: uint32(found.Gid)}
	for _, g := range found.Sgids {
		out.groups = append(out.groups, uint32(g))
	}
	out.name = fmt.Sprint(found.Uid)
	entries, _ := user.ParsePasswdFilter(bytes.NewReader(passwd), func(u user.User) bool { return u.Uid == found.Uid })
	if len(entries) > 0 {
		out.name = entries[0].Name
	}
	if out.home == "" {
		out.home = "/"
	}
	return out, nil
}

// readUserDB reads a regular file without ever waiting; a missing one is empty.
func readUserDB(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, systemFailure(&os.PathError{Op: "open", Path: path, Err: err})
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, wire.Failf(wire.KindNotRegular, "%s is not a regular file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxUserDB))
	if err != nil {
		return nil, systemFailure(err)
	}
	return b, nil
}

// credential is nil when the agent has no right to switch, for tests.
func (u *account) credential() *syscall.Credential {
	if os.Geteuid() != 0 && int(u.uid) == os.Geteuid() {
		return nil
	}
	return &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
}

// as runs f with the effective user and groups of u on this thread alone, so
// that the kernel checks the permissions. f must not start goroutines that rely
// on it. setfsuid would do, but gVisor does not have it. If the thread cannot
// be switched back, it is given up.
func (u *account) as(f func() error) error {
	if os.Geteuid() != 0 || u.uid == 0 {
		return f()
	}
	runtime.LockOSThread()
	old, err := unix.Getgroups()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("groups of the agent: %w", err)
	}
	err = switchThread(u.groups, u.gid, u.uid)
	if err == nil {
		err = f()
	}
	back := make([]uint32, len(old))
	for i, g := range old {
		back[i] = uint32(g)
	}
	if restoreErr := restoreThread(back); restoreErr != nil {
		// The goroutine ends with its thread still locked: the runtime ends both.
		return fmt.Errorf("switch back to root: %w", restoreErr)
	}
	runtime.UnlockOSThread()
	return err
}
