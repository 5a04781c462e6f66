package jail

import "golang.org/x/sys/unix"

const (
	auditArch = 0xc00000b7
	x32       = 0
)

// old are calls that other machines know in another form only.
var old = []uintptr{unix.SYS_FSTATAT, unix.SYS_TRUNCATE}

var supervisingOld []uintptr
