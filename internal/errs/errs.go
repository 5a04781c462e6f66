// Package errs is Berth's one error type: what was attempted, of which kind
// the failure is, which thing it concerns, and the cause. It guarantees that
// the kind survives wrapping and the wire, and that errors.Is matches by kind
// (errors.Is(err, errkind value wrapped by Of)).
package errs

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Error is a failure. Op says what was attempted ("scheduler.wake", "open
// disk image"), ID names the session, host or file concerned, Cause is the
// error below. Op, ID and Cause may be empty, Kind may not.
type Error struct {
	Op    string
	Kind  errkind.Kind
	ID    string
	Cause error
}

// E makes an error. cause may be nil, an error, or a string.
func E(op string, kind errkind.Kind, id string, cause any) *Error {
	return &Error{Op: op, Kind: kind, ID: id, Cause: asError(cause)}
}

// Errorf makes an error of a kind with a formatted cause (%w works).
func Errorf(op string, kind errkind.Kind, format string, args ...any) *Error {
	return &Error{Op: op, Kind: kind, Cause: fmt.Errorf(format, args...)}
}

// Wrap adds what was attempted and keeps the kind of err; nil stays nil.
func Wrap(op, id string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Op: op, Kind: Kind(err), ID: id, Cause: err}
}

// Error writes "op id: cause", or the kind's name where there is no cause.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.ID != "" {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(e.ID)
	}
	if b.Len() > 0 {
		b.WriteString(": ")
	}
	if e.Cause != nil {
		b.WriteString(e.Cause.Error())
	} else {
		b.WriteString(e.Kind.String())
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches an *Error by kind if the target names nothing but a kind, and
// otherwise by identity.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	if !ok {
		return false
	}
	if t.Op == "" && t.ID == "" && t.Cause == nil {
		return e.Kind == t.Kind
	}
	return e == t
}

// Of returns an error that errors.Is matches against every error of kind.
func Of(kind errkind.Kind) error { return &Error{Kind: kind} }

// Is reports whether the kind of err is kind.
func Is(err error, kind errkind.Kind) bool { return err != nil && Kind(err) == kind }

// Kind returns the kind of err: that of the outermost *Error in its chain;
// Deadline, Canceled and Invalid for the errors of context and ids; OK for
// nil; else Internal.
func Kind(err error) errkind.Kind {
	if err == nil {
		return errkind.OK
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Kind
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return errkind.Deadline
	case errors.Is(err, context.Canceled):
		return errkind.Canceled
	case errors.Is(err, ids.ErrInvalid):
		return errkind.Invalid
	}
	return errkind.Internal
}

func asError(cause any) error {
	switch c := cause.(type) {
	case nil:
		return nil
	case error:
		return c
	case string:
		return errors.New(c)
	default:
		return fmt.Errorf("%v", c)
	}
}
