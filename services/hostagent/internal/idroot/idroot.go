// Package idroot gives a sandbox a user namespace of its own and mounts its root in it: an image
// below, the session's disk on top, both through id-mapped mounts, so that owners on disk are the
// ones that the container sees.
//
// It guarantees that the overlay belongs to the sandbox's user namespace (from the initial one it
// would be read-only), that its attributes are in the user. namespace, and that no helper process
// outlives its use.
package idroot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/services/hostagent/internal/idroot/child"
)

// Size is how many ids each sandbox has.
const Size = 65536

// helperTime bounds every answer of a helper.
const helperTime = 10 * time.Second

// Space is a user namespace whose root is First on the host. Close lets go of it: it lives on in
// the sandbox that joined it.
type Space struct {
	First uint32
	user  *os.File
	cmd   *exec.Cmd
	sock  *os.File
	once  sync.Once
}

// NewSpace makes a user namespace for the ids from first on, with a helper process in it that waits
// to mount one root.
func NewSpace(first uint32) (*Space, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make helper socket: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "helper")
	s := &Space{First: first, sock: os.NewFile(uintptr(pair[0]), "helper")}
	limit := unix.NsecToTimeval(helperTime.Nanoseconds())
	_ = unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(first), Size: Size}}
	// The helper takes a table of mounts of its own once it runs: see leaveHost.
	s.cmd = &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{child.Name}, Env: []string{"GOMAXPROCS=1", "GOGC=off"}, Dir: "/",
		ExtraFiles: []*os.File{theirs},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
			GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
		},
	}
	err = s.cmd.Start()
	_ = theirs.Close()
	if err != nil {
		_ = s.sock.Close()
		return nil, fmt.Errorf("start helper in a new user namespace: %w", err)
	}
	if err := s.ready(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Space) ready() error {
	user, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.cmd.Process.Pid))
	if err != nil {
		return fmt.Errorf("open user namespace: %w", err)
	}
	s.user = user
	_, err = s.answer(child.Ready)
	return err
}

// Path names the user namespace for a process of this host, as long as the Space is open. It is of
// the form from which runc reads the mapping without starting a process.
func (s *Space) Path() string { return fmt.Sprintf("/proc/%d/ns/user", s.cmd.Process.Pid) }

// Mount mounts the root of one sandbox at point, as Make makes it. It can be called once.
func (s *Space) Mount(ctx context.Context, lower, disk, point string) error {
	mnt, err := s.Make(ctx, lower, disk)
	if err != nil {
		return err
	}
	defer func() { _ = mnt.Close() }()
	if err := unix.MoveMount(int(mnt.Fd()), "", unix.AT_FDCWD, point, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach root: %w", err)
	}
	return nil
}

// Make makes the root of one sandbox: lower read-only, the folders upper and work of disk on top. It is
// mounted nowhere yet, and goes with the file unless it is attached before. It can be called once.
func (s *Space) Make(_ context.Context, lower, disk string) (*os.File, error) {
	up, err := s.mapped(disk, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, err
	}
	defer func() { _ = up.Close() }()
	low, err := s.mapped(lower, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = low.Close() }()
	rights := unix.UnixRights(int(up.Fd()), int(low.Fd()))
	if err := unix.Sendmsg(int(s.sock.Fd()), []byte("m"), rights, nil, 0); err != nil {
		return nil, fmt.Errorf("ask helper to mount: %w", err)
	}
	return s.answer(child.Done)
}

// mapped returns a detached, id-mapped copy of the mount at dir.
func (s *Space) mapped(dir string, attr uint64) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, fmt.Errorf("copy mount %s: %w", filepath.Base(dir), err)
	}
	f := os.NewFile(uintptr(fd), dir)
	set := unix.MountAttr{Attr_set: attr | unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(s.user.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &set); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("map ids of %s: %w", filepath.Base(dir), err)
	}
	return f, nil
}

// answer reads one message; Done carries a mount.
func (s *Space) answer(want string) (*os.File, error) {
	buf, oob := make([]byte, 1024), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := unix.Recvmsg(int(s.sock.Fd()), buf, oob, unix.MSG_CMSG_CLOEXEC)
	for errors.Is(err, unix.EINTR) { // a wait with a limit is not taken up again by itself
		n, m, _, _, err = unix.Recvmsg(int(s.sock.Fd()), buf, oob, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for helper: %w", err)
	}
	if got := string(buf[:n]); got != want {
		if got == "" {
			got = "it ended"
		}
		return nil, errors.New("mount helper: " + strings.ToValidUTF8(got, "?"))
	}
	if want != child.Done {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:m])
	if err != nil || len(msgs) != 1 {
		return nil, errors.New("mount helper: the answer carries no mount")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return nil, errors.New("mount helper: the answer carries no mount")
	}
	return os.NewFile(uintptr(fds[0]), "root"), nil
}

// Done tells the helper to end, without waiting for it: Path means nothing from here on. Close still has
// to be called. Idempotent.
func (s *Space) Done() { _ = s.sock.Close() }

// Close ends the helper and lets go of the namespace. Idempotent.
func (s *Space) Close() {
	s.once.Do(func() {
		s.Done()
		if s.cmd.Process != nil {
			_ = s.cmd.Process.Kill()
			_ = s.cmd.Wait()
		}
		if s.user != nil {
			_ = s.user.Close()
		}
	})
}

// MountPlain mounts the same root from the initial user namespace, for runtimes that bring a kernel
// of their own: owners on disk are the same, so that a disk moves between tiers.
func MountPlain(lower, disk, point string) error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open overlay: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	files := map[string]int{}
	for _, f := range [][3]string{{"lowerdir", lower, "."}, {"upperdir", disk, "upper"}, {"workdir", disk, "work"}} {
		fd, err := openBelow(f[1], f[2])
		if err != nil {
			return fmt.Errorf("open %s: %w", f[0], err)
		}
		defer func() { _ = unix.Close(fd) }()
		files[f[0]] = fd
	}
	if err := unix.FsconfigSetFlag(fs, "userxattr"); err != nil {
		return fmt.Errorf("overlay option userxattr: %w", err)
	}
	for _, o := range [][2]string{
		{"source", "berth"}, {"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"},
		// Through the descriptors, a path may hold any character.
		{"lowerdir", fmt.Sprintf("/proc/self/fd/%d", files["lowerdir"])},
		{"upperdir", fmt.Sprintf("/proc/self/fd/%d", files["upperdir"])},
		{"workdir", fmt.Sprintf("/proc/self/fd/%d", files["workdir"])},
	} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return fmt.Errorf("overlay option %s: %w", o[0], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create overlay: %w", err)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID)
	if err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	defer func() { _ = unix.Close(mnt) }()
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, point, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach root: %w", err)
	}
	return nil
}

// openBelow opens a folder below one that is ours, whatever a session put there.
func openBelow(dir, name string) (int, error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(root) }()
	return unix.Openat2(root, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
}
