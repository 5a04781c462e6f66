package hostend

import (
	"errors"
	"fmt"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// ErrChannelLost matches every error of a call whose Conn has ended. The cause
// is wrapped. What the call did is unknown; attach again and ask.
var ErrChannelLost = errors.New("guest channel lost")

// ErrProtocol is the cause of a lost channel when the guest broke the protocol.
var ErrProtocol = errors.New("guest broke the protocol")

// ErrTaken is the cause of a lost channel when another host attached to it.
var ErrTaken = errors.New("another host attached to the channel")

// ErrClosed is the cause of a lost channel after Close.
var ErrClosed = errors.New("channel closed by its owner")

// Error is what the guest answered to a call. Compare with errors.Is and the
// Err values below, which match by kind.
type Error struct {
	Op      string    // what was attempted, such as "read file"
	Kind    wire.Kind // the class; it comes from the guest and may be any string
	Message string    // the guest's words, not to be trusted
	Errno   int       // Linux error number inside the guest, 0 if none
}

// Error implements error.
func (e *Error) Error() string {
	if e.Op == "" {
		return "guest: " + string(e.Kind)
	}
	return fmt.Sprintf("%s: guest: %s: %s", e.Op, e.Kind, e.Message)
}

// Is matches errors of the same kind that name no operation.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Op == "" && t.Kind == e.Kind
}

// What the guest may answer, for errors.Is.
var (
	ErrInvalid     = &Error{Kind: wire.KindInvalid}
	ErrUnsupported = &Error{Kind: wire.KindUnsupported}
	ErrVersion     = &Error{Kind: wire.KindVersion}
	ErrTooMany     = &Error{Kind: wire.KindTooMany}
	ErrQuiesced    = &Error{Kind: wire.KindQuiesced}
	ErrNoSuchExec  = &Error{Kind: wire.KindNoSuchExec}
	ErrConflict    = &Error{Kind: wire.KindConflict}
	ErrStartFailed = &Error{Kind: wire.KindStartFailed}
	ErrExited      = &Error{Kind: wire.KindExited}
	ErrReplaced    = &Error{Kind: wire.KindReplaced}
	ErrCancelled   = &Error{Kind: wire.KindCancelled}
	ErrBadOffset   = &Error{Kind: wire.KindBadOffset}
	ErrStdinClosed = &Error{Kind: wire.KindStdinClosed}
	ErrNotFound    = &Error{Kind: wire.KindNotFound}
	ErrExists      = &Error{Kind: wire.KindExists}
	ErrPermission  = &Error{Kind: wire.KindPermission}
	ErrIsDir       = &Error{Kind: wire.KindIsDir}
	ErrNotDir      = &Error{Kind: wire.KindNotDir}
	ErrNotEmpty    = &Error{Kind: wire.KindNotEmpty}
	ErrNotRegular  = &Error{Kind: wire.KindNotRegular}
	ErrCrossDevice = &Error{Kind: wire.KindCrossDevice}
	ErrNoSpace     = &Error{Kind: wire.KindNoSpace}
	ErrReadOnly    = &Error{Kind: wire.KindReadOnly}
)

// guestError decodes the payload of an error frame.
func guestError(op string, payload []byte) error {
	var f wire.Failure
	if err := decode(payload, &f); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return &Error{Op: op, Kind: f.Kind, Message: f.Message, Errno: f.Errno}
}
