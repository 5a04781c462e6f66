package jail

import "golang.org/x/sys/unix"

const (
	auditArch = 0xc000003e
	x32       = 0x40000000
)

// old are calls that other machines know in another form only.
var old = []uintptr{
	unix.SYS_NEWFSTATAT, unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_OPEN, unix.SYS_POLL, unix.SYS_SELECT, unix.SYS_RENAME, unix.SYS_UNLINK,
	unix.SYS_RMDIR, unix.SYS_MKDIR, unix.SYS_LINK, unix.SYS_SYMLINK, unix.SYS_READLINK, unix.SYS_DUP2, unix.SYS_UTIMES, unix.SYS_TRUNCATE,
	unix.SYS_ARCH_PRCTL, unix.SYS_EPOLL_WAIT, unix.SYS_GETDENTS, unix.SYS_TIME,
}

var supervisingOld = []uintptr{unix.SYS_VFORK, unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_UTIME, unix.SYS_ACCESS}
