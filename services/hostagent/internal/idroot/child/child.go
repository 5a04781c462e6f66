// Package child is the part of idroot that runs in a process of its own, inside the user namespace
// of one sandbox. It guarantees that it looks at nothing but the two mounts that it was handed: it
// leaves the host's file tree before it says that it is ready; that it holds nothing of the host's
// mounts, however long it waits; and that it ends with its parent.
//
// It runs from init, before anything else of the program and on its first thread: the process is a copy
// of the host agent, told apart by its name alone.
package child

import (
	"os"
	"syscall"
	"unsafe"
)

// Name is what the process calls itself in argv[0].
const Name = "berth-idroot"

// Socket is the file descriptor of the socket to the parent.
const Socket = 3

// Messages on the socket. An answer that is neither is an error's text.
const (
	Ready = "ready"
	Done  = "done"
)

// Names of the system calls that package syscall does not know; they are the same everywhere.
const (
	sysMoveMount = 429
	sysFsopen    = 430
	sysFsconfig  = 431
	sysFsmount   = 432

	moveFromEmptyPath = 0x4
	cloexec           = 0x1
	setFlag           = 0
	setString         = 1
	create            = 6
	attrNodev         = 0x4
	detach            = 0x2
)

func init() {
	if len(os.Args) == 0 || os.Args[0] != Name {
		return
	}
	if err := run(); err != nil {
		_ = send([]byte(err.Error()), nil)
		os.Exit(1)
	}
	os.Exit(0)
}

type failure struct {
	what string
	err  error
}

func (f failure) Error() string { return f.what + ": " + f.err.Error() }

func run() error {
	if err := leaveHost(); err != nil {
		return err
	}
	if err := send([]byte(Ready), nil); err != nil {
		return err
	}
	upper, lower, err := receive()
	if err != nil {
		return err
	}
	for fd, dir := range map[int]string{upper: "/u", lower: "/l"} {
		if err := moveMount(fd, dir); err != nil {
			return failure{"attach " + dir, err}
		}
	}
	fd, err := overlay()
	if err != nil {
		return err
	}
	if err := send([]byte(Done), syscall.UnixRights(fd)); err != nil {
		return err
	}
	if err := syscall.Close(fd); err != nil {
		return failure{"let go of the root", err}
	}
	// Until the parent is done, the namespace has a process that it can be named by.
	_, _, _, _, err = syscall.Recvmsg(Socket, make([]byte, 1), nil, 0)
	return err
}

// leaveHost moves into an empty file system of its own and drops the copy of the host's mounts,
// which would keep other sessions' disks busy. The copy is made only here: had the program been started
// in it, the libraries of one that is linked with any would be files of the copy and keep all of it.
func leaveHost() error {
	if err := syscall.Unshare(syscall.CLONE_FS | syscall.CLONE_NEWNS); err != nil {
		return failure{"take a table of mounts of its own", err}
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SLAVE, ""); err != nil {
		return failure{"make mounts slaves", err}
	}
	if err := syscall.Mount("tmpfs", "/tmp", "tmpfs", 0, "size=64k,mode=700"); err != nil {
		return failure{"mount a file system of its own", err}
	}
	if err := os.Chdir("/tmp"); err != nil {
		return err
	}
	for _, d := range []string{"old", "u", "l"} {
		if err := syscall.Mkdir(d, 0o700); err != nil {
			return failure{"make " + d, err}
		}
	}
	if err := syscall.PivotRoot(".", "old"); err != nil {
		return failure{"leave the host's files", err}
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := syscall.Unmount("/old", detach); err != nil {
		return failure{"drop the host's files", err}
	}
	return nil
}

// overlay mounts the two as one, owned by this user namespace, and returns it detached.
func overlay() (int, error) {
	fs, err := call(sysFsopen, cstring("overlay"), cloexec)
	if err != nil {
		return -1, failure{"open overlay", err}
	}
	for _, o := range [][2]string{
		{"source", "berth"}, {"lowerdir", "/l"}, {"upperdir", "/u/upper"}, {"workdir", "/u/work"},
		{"userxattr", ""}, {"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"},
	} {
		kind, value := uintptr(setString), cstring(o[1])
		if o[1] == "" {
			kind, value = setFlag, 0
		}
		if _, err := call(sysFsconfig, uintptr(fs), kind, cstring(o[0]), value); err != nil {
			return -1, failure{"overlay option " + o[0], err}
		}
	}
	if _, err := call(sysFsconfig, uintptr(fs), create); err != nil {
		return -1, failure{"create overlay", err}
	}
	mnt, err := call(sysFsmount, uintptr(fs), cloexec, attrNodev)
	_ = syscall.Close(fs)
	if err != nil {
		return -1, failure{"mount overlay", err}
	}
	return mnt, nil
}

func moveMount(fd int, dir string) error {
	at := -100 // the current folder
	_, err := call(sysMoveMount, uintptr(fd), cstring(""), uintptr(at), cstring(dir), moveFromEmptyPath)
	return err
}

func call(nr uintptr, args ...uintptr) (int, error) {
	var a [6]uintptr
	copy(a[:], args)
	r, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// kept holds every string that the kernel was handed, so that none moves or is freed.
var kept [][]byte

func cstring(s string) uintptr {
	b := append([]byte(s), 0)
	kept = append(kept, b)
	return uintptr(unsafe.Pointer(&b[0]))
}

func send(text, rights []byte) error {
	return syscall.Sendmsg(Socket, text, rights, nil, 0)
}

// receive waits for the order: one byte with the two mounts. The end of the parent ends the wait.
func receive() (upper, lower int, err error) {
	buf, oob := make([]byte, 16), make([]byte, syscall.CmsgSpace(8))
	n, m, _, _, err := syscall.Recvmsg(Socket, buf, oob, syscall.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, -1, failure{"wait for the order", err}
	}
	if n == 0 {
		os.Exit(0)
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:m])
	if err != nil || len(msgs) != 1 {
		return -1, -1, failure{"read the order", syscall.EBADMSG}
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 2 {
		return -1, -1, failure{"read the order", syscall.EBADMSG}
	}
	return fds[0], fds[1], nil
}
