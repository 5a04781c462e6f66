package box

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
	"github.com/berth-dev/berth/services/hostagent/internal/layer"
)

// Gate is what a session's owner on this host decides about its data plane.
type Gate interface {
	// Admit begins a piece of work in the same critical section that puts the session to sleep; it
	// refuses when the session is not awake in this epoch. done ends it; call it once.
	Admit(ctx context.Context) (done func(), err error)
	// Checkpoint commits a manifest of the disk as it is. It stops when ctx ends. Several may be under
	// way at once; each holds what was written before it began. Unsaved: it cannot be saved now, and
	// the files are whole here.
	Checkpoint(ctx context.Context) (*corev1.Manifest, error)
	// Export writes the session's own files, as they were at one moment, as a tar archive in the layer
	// format of the OCI image specification; see package layer. It stops when ctx ends, and returns an
	// error of w as it is. It may be called by several streams at once.
	Export(ctx context.Context, w io.Writer) (layer.Stats, error)
	// Place is the text of /run/berth/session.json.
	Place() string
	// OutOfMemory reports whether a process was ended for memory of which no exit told yet; asking
	// is telling.
	OutOfMemory() bool
}

// Environer is a Gate that gives each exec variables, which what the exec's own start names replaces. They
// are the same for as long as the sandbox is there.
type Environer interface {
	Env() []string
}

var guestKinds = map[wire.Kind]errkind.Kind{
	wire.KindInvalid: errkind.Invalid, wire.KindUnsupported: errkind.Unimplemented,
	wire.KindVersion: errkind.Unimplemented, wire.KindTooMany: errkind.Exhausted,
	wire.KindTooLarge: errkind.TooLarge, wire.KindCancelled: errkind.Canceled,
	wire.KindQuiesced: errkind.Unavailable, wire.KindNoSuchExec: errkind.NotFound,
	wire.KindConflict: errkind.ReplayMismatch, wire.KindStartFailed: errkind.Refused,
	wire.KindExited: errkind.Expired, wire.KindReplaced: errkind.Superseded,
	wire.KindBadOffset: errkind.Invalid, wire.KindStdinClosed: errkind.Refused,
	wire.KindNotFound: errkind.NotFound, wire.KindExists: errkind.Exists,
	wire.KindPermission: errkind.Denied, wire.KindIsDir: errkind.Refused,
	wire.KindNotDir: errkind.Refused, wire.KindNotEmpty: errkind.Refused,
	wire.KindNotRegular: errkind.Refused, wire.KindCrossDevice: errkind.Refused,
	wire.KindNoSpace: errkind.Quota, wire.KindReadOnly: errkind.Refused,
	wire.KindLoop: errkind.Invalid, wire.KindNameTooLong: errkind.Invalid,
}

// kindOf gives every error of this package's surroundings its kind.
func kindOf(err error) errkind.Kind {
	if f := (*hostend.Error)(nil); errors.As(err, &f) {
		switch {
		case f.Kind == wire.KindStartFailed && f.Errno == int(syscall.ENOENT):
			return errkind.NotFound
		case f.Kind == wire.KindStartFailed && f.Errno == int(syscall.EACCES):
			return errkind.Denied
		}
		if k, ok := guestKinds[f.Kind]; ok {
			return k
		}
		return errkind.Internal
	}
	if g := (*grant.Error)(nil); errors.As(err, &g) {
		return g.Kind
	}
	if errors.Is(err, hostend.ErrChannelLost) {
		return errkind.Unavailable
	}
	return errs.Kind(err)
}
