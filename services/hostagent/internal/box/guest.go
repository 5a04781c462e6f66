package box

import (
	"context"
	"errors"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// Guest is the agent of one sandbox. Errors are *wire.Failure where the guest said no; any other
// means that the channel is lost. It is safe for concurrent use. Nothing that it says is believed
// beyond its type: it is passed on to the one client that owns the sandbox.
type Guest interface {
	// Do makes a short call; result may be nil.
	Do(ctx context.Context, method string, params, result any) error
	// Start starts an exec, or finds the one that its key started, and becomes its reader.
	Start(ctx context.Context, p wire.ExecStart) (Exec, error)
	// Attach becomes the reader of an exec.
	Attach(ctx context.Context, p wire.ExecAttach) (Exec, error)
	Files
}

// Files are the guest's long file calls.
type Files interface {
	Read(ctx context.Context, p wire.FileRead) (Reader, error)
	Write(ctx context.Context, p wire.FileWrite) (Writer, error)
	Watch(ctx context.Context, p wire.FileWatch) (Watcher, error)
}

// Output is one piece of what an exec gives. Exactly one of Data, Gap and Exit is set. An exit
// comes after all output that the process itself wrote.
type Output struct {
	Sub    wire.Sub
	Offset uint64
	Data   []byte // valid until the following Next
	Gap    uint64 // bytes from Offset to here are gone
	Exit   *wire.Exit
}

// Exec is the one reader of an exec. The guest is told that data was taken when the following Next
// is called, so what is not passed on is kept by the guest.
type Exec interface {
	Info() wire.ExecInfo
	// Next waits for the next output.
	Next(ctx context.Context) (Output, error)
	// Stdin returns the writer of its input.
	Stdin(ctx context.Context) (Input, error)
	// Close detaches: the process goes on.
	Close()
}

// Input takes bytes for the guest.
type Input interface {
	// Put writes the bytes at offset; it waits while the guest's window is full. Bytes that the
	// guest has already are passed over.
	Put(ctx context.Context, offset uint64, p []byte) error
	// End says that there are no bytes at or after total.
	End(ctx context.Context, total uint64) error
}

// Reader reads a file.
type Reader interface {
	Info() wire.FileInfo
	// Next returns the next piece, valid until the following Next, and io.EOF at the end.
	Next(ctx context.Context) ([]byte, error)
	Close()
}

// Writer writes a file.
type Writer interface {
	Input
	// Done waits until the file is complete and synced.
	Done(ctx context.Context) (wire.FileInfo, error)
	// Close gives an incomplete file up.
	Close()
}

// Watcher reports changes of files.
type Watcher interface {
	Next(ctx context.Context) (wire.WatchEvent, error)
	Close()
}

// Gate is what a session's owner on this host decides about its data plane.
type Gate interface {
	// Admit begins a piece of work in the same critical section that puts the session to sleep; it
	// refuses when the session is not awake in this epoch. done ends it; call it once.
	Admit(ctx context.Context) (done func(), err error)
	// Checkpoint commits a manifest of the disk as it is.
	Checkpoint(ctx context.Context) (*corev1.Manifest, error)
	// Place is the text of /run/berth/session.json.
	Place() string
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
	if f := (*wire.Failure)(nil); errors.As(err, &f) {
		if k, ok := guestKinds[f.Kind]; ok {
			return k
		}
		return errkind.Internal
	}
	if g := (*grant.Error)(nil); errors.As(err, &g) {
		return g.Kind
	}
	return errs.Kind(err)
}
