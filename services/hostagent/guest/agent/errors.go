package agent

import (
	"errors"
	"syscall"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

var kindOf = map[syscall.Errno]wire.Kind{
	syscall.ENOENT: wire.KindNotFound, syscall.EEXIST: wire.KindExists,
	syscall.EACCES: wire.KindPermission, syscall.EPERM: wire.KindPermission,
	syscall.EISDIR: wire.KindIsDir, syscall.ENOTDIR: wire.KindNotDir,
	syscall.ENOTEMPTY: wire.KindNotEmpty, syscall.EXDEV: wire.KindCrossDevice,
	syscall.ENOSPC: wire.KindNoSpace, syscall.EDQUOT: wire.KindNoSpace,
	syscall.EROFS: wire.KindReadOnly, syscall.ELOOP: wire.KindLoop,
	syscall.ENAMETOOLONG: wire.KindNameTooLong, syscall.EINVAL: wire.KindInvalid,
	syscall.ENXIO: wire.KindNotRegular,
}

// systemFailure classifies an error of the system.
func systemFailure(err error) *wire.Failure {
	f := wire.Failf(wire.KindInternal, "%v", err)
	var errno syscall.Errno
	if errors.As(err, &errno) {
		f.Errno = int(errno)
		f.Kind = wire.KindIO
		if kind, ok := kindOf[errno]; ok {
			f.Kind = kind
		}
	}
	return f
}
