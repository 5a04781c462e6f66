//go:build linux

// Package child is the part of a jail that runs in the new process, before QEMU: with root's rights,
// inside namespaces of its own and inside the sandbox's cgroup. It guarantees that QEMU begins without
// any right, as a user of its own, sees nothing of the host but the folders it was given, read-only,
// and can write to nothing but its open files; or that it does not begin.
//
// It runs from init, before anything else of the program: the process is a copy of the host agent,
// told apart by its name alone.
package child

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Name is what the process calls itself in argv[0].
const Name = "berth-vmjail"

// Socket is the file descriptor of the socket to the parent, FirstFile that of the first file that
// QEMU inherits.
const (
	Socket    = 3
	FirstFile = 4
)

// Order is what the parent wants, one JSON value after which the parent sends nothing.
type Order struct {
	UID     int      `json:"uid"`
	Program string   `json:"program"`
	Args    []string `json:"args"`
	// Binds are files or folders of the host, by where they appear.
	Binds map[string]string `json:"binds"`
	// Devices of the host's /dev of which QEMU gets a node of its own.
	Devices []string `json:"devices"`
	// Tap: the machine has a network card whose other end is a tap in its own namespace; TapFD is the
	// descriptor that the tap shall have.
	Tap   bool `json:"tap"`
	TapFD int  `json:"tap_fd"`
}

func init() {
	if len(os.Args) == 0 || os.Args[0] != Name {
		return
	}
	err := run() // returns only if QEMU was not started
	_, _ = unix.Write(Socket, []byte(err.Error()))
	os.Exit(1)
}

func run() error {
	unix.CloseOnExec(Socket)
	sock := os.NewFile(Socket, "parent")
	b, err := io.ReadAll(io.LimitReader(sock, 1<<20))
	if err != nil {
		return fmt.Errorf("read the order: %w", err)
	}
	var o Order
	if err := json.Unmarshal(b, &o); err != nil {
		return fmt.Errorf("read the order: %w", err) // the parent has died
	}
	if o.UID < 1000 {
		return errors.New("QEMU needs a user of its own")
	}
	unix.Umask(0o022)
	if err := network(o); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	if err := leave(o); err != nil {
		return err
	}
	if err := drop(o); err != nil {
		return fmt.Errorf("give up rights: %w", err)
	}
	err = unix.Exec(o.Program, o.Args, []string{"PATH=/usr/bin", "HOME=/", "LANG=C"})
	return fmt.Errorf("start %s: %w", o.Program, err)
}

const (
	sealed = unix.MS_NOSUID | unix.MS_NODEV
	locked = sealed | unix.MS_RDONLY
	// devices of its own work; programs in there do not.
	devices = unix.MS_NOSUID | unix.MS_NOEXEC
)

// leave moves into a file system of its own that holds the binds and nothing else, and drops the
// copy of the host's mounts, which would keep other sessions' disks busy.
func leave(o Order) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts slaves: %w", err)
	}
	// What is shown is taken first: the new root hides what lies below it.
	shown, err := take(o)
	if err != nil {
		return err
	}
	const root = "/tmp"
	if err := unix.Mount("jail", root, "tmpfs", sealed, "size=256k,nr_inodes=256,mode=755"); err != nil {
		return fmt.Errorf("mount a file system of its own: %w", err)
	}
	for _, d := range []string{"old", "proc", "dev"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("dev", root+"/dev", "tmpfs", devices, "size=64k,nr_inodes=16,mode=755"); err != nil {
		return fmt.Errorf("mount a /dev of its own: %w", err)
	}
	for _, name := range o.Devices {
		if err := node(name, filepath.Join(root, "dev"), o.UID); err != nil {
			return fmt.Errorf("device %s: %w", name, err)
		}
	}
	for _, one := range shown {
		if err := one.show(root); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", root+"/proc", "proc", sealed|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "old"); err != nil {
		return fmt.Errorf("leave the host's files: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("drop the host's files: %w", err)
	}
	for dir, flags := range map[string]uintptr{"/": locked, "/dev": devices | unix.MS_RDONLY} {
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|flags, ""); err != nil {
			return fmt.Errorf("close its file system: %w", err)
		}
	}
	return nil
}

// node makes a device that this user alone may open, whatever the mode of the host's is.
func node(name, dir string, uid int) error {
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join("/dev", name), &st); err != nil {
		return err
	}
	path := filepath.Join(dir, name)
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(st.Rdev)); err != nil {
		return err
	}
	return os.Chown(path, uid, uid)
}

// bind is a file, a folder or a symbolic link of the host on its way into the jail.
type bind struct {
	to     string
	flags  uintptr
	mode   os.FileMode
	target string // of a link
	fd     int    // a detached copy of the mount
}

// take holds what the order wants shown.
func take(o Order) ([]bind, error) {
	var out []bind
	for to, from := range o.Binds {
		one, err := takeOne(from, to, locked)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	for _, name := range []string{"null", "urandom"} {
		one, err := takeOne("/dev/"+name, "/dev/"+name, devices)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

func takeOne(from, to string, flags uintptr) (bind, error) {
	b := bind{to: to, flags: flags}
	st, err := os.Lstat(from)
	if err != nil {
		return b, err
	}
	if b.mode = st.Mode().Type(); b.mode&os.ModeSymlink != 0 {
		b.target, err = os.Readlink(from)
		return b, err
	}
	b.fd, err = unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return b, fmt.Errorf("take %s: %w", from, err)
	}
	return b, nil
}

// show attaches it below root.
func (b bind) show(root string) error {
	to := filepath.Join(root, b.to)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	var err error
	switch {
	case b.target != "":
		return os.Symlink(b.target, to)
	case b.mode.IsDir():
		err = os.Mkdir(to, 0o755)
	default:
		err = os.WriteFile(to, nil, 0o600)
	}
	if err != nil {
		return err
	}
	if err := unix.MoveMount(b.fd, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("show %s: %w", b.to, err)
	}
	if err := unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|b.flags, ""); err != nil {
		return fmt.Errorf("restrict %s: %w", b.to, err)
	}
	return unix.Close(b.fd)
}

// drop takes every right from this thread, which is the one that becomes QEMU.
func drop(o Order) error {
	for c := 0; ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		if err == unix.EINVAL {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 512, Max: 512}); err != nil {
		return err
	}
	if err := unix.Setgroups(nil); err != nil {
		return err
	}
	if err := unix.Setresgid(o.UID, o.UID, o.UID); err != nil {
		return err
	}
	if err := unix.Setresuid(o.UID, o.UID, o.UID); err != nil {
		return err
	}
	unix.Umask(0o077)
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}
