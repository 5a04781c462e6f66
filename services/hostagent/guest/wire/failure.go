package wire

import "fmt"

// Kind classifies a failure that the guest reports. Kinds are append-only.
type Kind string

// The kinds.
const (
	KindInvalid     Kind = "invalid"       // the request makes no sense
	KindUnsupported Kind = "unsupported"   // unknown method, or not possible here
	KindVersion     Kind = "version"       // no protocol version in common
	KindInternal    Kind = "internal"      // a fault of the guest agent
	KindTooMany     Kind = "too_many"      // a bound of the guest agent is reached
	KindTooLarge    Kind = "too_large"     // a message is above its bound
	KindCancelled   Kind = "cancelled"     // the host cancelled the call
	KindQuiesced    Kind = "quiesced"      // no starts between quiesce and resume
	KindNoSuchExec  Kind = "no_such_exec"  // never started, or its record has expired
	KindConflict    Kind = "conflict"      // the key was used with another request
	KindStartFailed Kind = "start_failed"  // the process could not be started
	KindExited      Kind = "exited"        // the process has ended
	KindReplaced    Kind = "replaced"      // another reader attached to this exec
	KindBadOffset   Kind = "bad_offset"    // an offset beyond what exists
	KindStdinClosed Kind = "stdin_closed"  // closed by host or process
	KindNotFound    Kind = "not_found"     // ENOENT
	KindExists      Kind = "exists"        // EEXIST
	KindPermission  Kind = "permission"    // EACCES, EPERM
	KindIsDir       Kind = "is_dir"        // EISDIR
	KindNotDir      Kind = "not_dir"       // ENOTDIR
	KindNotEmpty    Kind = "not_empty"     // ENOTEMPTY
	KindNotRegular  Kind = "not_regular"   // a device, FIFO or socket
	KindCrossDevice Kind = "cross_device"  // EXDEV
	KindNoSpace     Kind = "no_space"      // ENOSPC, EDQUOT
	KindReadOnly    Kind = "read_only"     // EROFS
	KindLoop        Kind = "symlink_loop"  // ELOOP
	KindNameTooLong Kind = "name_too_long" // ENAMETOOLONG
	KindIO          Kind = "io"            // any other error of the system
)

// Failure is an error as the guest reports it.
type Failure struct {
	Kind    Kind   `json:"kind"`
	Message string `json:"message"`
	Errno   int    `json:"errno,omitempty"` // Linux error number, 0 if there is none
}

// Error implements error.
func (f *Failure) Error() string { return f.Message }

// Failf makes a Failure.
func Failf(kind Kind, format string, args ...any) *Failure {
	return &Failure{Kind: kind, Message: fmt.Sprintf(format, args...)}
}
