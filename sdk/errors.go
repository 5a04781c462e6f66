package sdk

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Error is a failure of the platform or on the way to it. Reason is one
// sentence that a person can read; Kind is for programs.
type Error struct {
	Op     string       // what was attempted, for example "open session"
	Kind   errkind.Kind // one of schemas/errkind
	Reason string
	Cause  error // nil when the platform itself answered with the failure
}

// Error writes "op: reason".
func (e *Error) Error() string {
	reason := e.Reason
	if reason == "" && e.Cause != nil {
		reason = e.Cause.Error()
	}
	if reason == "" {
		reason = e.Kind.String()
	}
	if e.Op == "" {
		return reason
	}
	return e.Op + ": " + reason
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches the Err values of this package by kind.
func (e *Error) Is(target error) bool {
	k, ok := target.(kindError)
	return ok && errkind.Kind(k) == e.Kind
}

// Retry reports whether the same call may go well later.
func (e *Error) Retry() bool { return e.Kind.Retry() }

type kindError errkind.Kind

func (k kindError) Error() string { return errkind.Kind(k).String() }

// OfKind returns a target for errors.Is that matches every [*Error] of kind k.
func OfKind(k errkind.Kind) error { return kindError(k) }

// Targets for errors.Is, one for each kind that a frontend meets often;
// [OfKind] makes the others.
var (
	ErrInvalid         = OfKind(errkind.Invalid)         // malformed input; nothing was changed
	ErrUnauthenticated = OfKind(errkind.Unauthenticated) // token, grant or proof missing, expired or foreign
	ErrDenied          = OfKind(errkind.Denied)          // the caller may not do this
	ErrRefused         = OfKind(errkind.Refused)         // plan or policy says no; the reason is for the user
	ErrNotFound        = OfKind(errkind.NotFound)        // no such session, file or process
	ErrExists          = OfKind(errkind.Exists)          // it exists already
	ErrConflict        = OfKind(errkind.Conflict)        // somebody else changed it first
	ErrBusy            = OfKind(errkind.Busy)            // in use; may be free later
	ErrDeadline        = OfKind(errkind.Deadline)        // time ran out; whether it took effect is unknown
	ErrUnavailable     = OfKind(errkind.Unavailable)     // a needed part cannot be reached
	ErrStaleEpoch      = OfKind(errkind.StaleEpoch)      // the session slept or moved since; Reopen the handle
	ErrReplayMismatch  = OfKind(errkind.ReplayMismatch)  // the request id was used with another body
	ErrSuperseded      = OfKind(errkind.Superseded)      // a later delete, sleep or wake made the request moot
	ErrTooLarge        = OfKind(errkind.TooLarge)        // above the stated bound
	ErrQuota           = OfKind(errkind.Quota)           // the session's or tenant's limit is reached
	ErrCanceled        = OfKind(errkind.Canceled)        // the caller gave up
	ErrUnplaceable     = OfKind(errkind.Unplaceable)     // no host could take it before the deadline
	ErrUnsaved         = OfKind(errkind.Unsaved)         // what was written last is on its host only: it sleeps so, or could not be saved now
)

// KindOf returns the kind of err: that of its [*Error], Deadline and Canceled
// for the errors of context, OK for nil, else Internal.
func KindOf(err error) errkind.Kind {
	if err == nil {
		return errkind.OK
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Kind
	}
	return kindOfCause(err)
}

func kindOfCause(err error) errkind.Kind {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return errkind.Deadline
	case errors.Is(err, context.Canceled):
		return errkind.Canceled
	case errors.Is(err, ids.ErrInvalid):
		return errkind.Invalid
	case errors.Is(err, nats.ErrPermissionViolation):
		return errkind.Denied
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrNoServers), isLost(err),
		errors.Is(err, nats.ErrReconnectBufExceeded), // the connection is down and will come back
		errors.Is(err, jetstream.ErrNoStreamResponse), unsteady(err):
		return errkind.Unavailable
	}
	return errkind.Internal
}

// unsteady reports whether the bus said that a stream cannot be written to now: it has no leader for
// the moment, or no room.
func unsteady(err error) bool {
	a := (*jetstream.APIError)(nil)
	return errors.As(err, &a) && a.Code == 503
}

// wrap gives an error of this side its operation and kind; an Error keeps
// both its kind and its reason.
func wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	if e := (*Error)(nil); errors.As(err, &e) {
		if e.Op == "" {
			return &Error{Op: op, Kind: e.Kind, Reason: e.Reason, Cause: e.Cause}
		}
		return err
	}
	if errors.Is(err, nats.ErrNoResponders) {
		return &Error{Op: op, Kind: errkind.Unavailable, Reason: "nobody answers on the bus: what serves this is not running", Cause: err}
	}
	return &Error{Op: op, Kind: kindOfCause(err), Cause: err}
}

func invalid(op, format string, args ...any) error {
	return &Error{Op: op, Kind: errkind.Invalid, Reason: fmt.Sprintf(format, args...)}
}

// failed turns a failure of the wire into an error; nil stays nil.
func failed(op string, f *corev1.Failure) error {
	if f == nil {
		return nil
	}
	return &Error{Op: op, Kind: kindByName(f.GetKind()), Reason: f.GetReason()}
}

// kindByName reads a kind's stable name, or its number where a newer peer has
// a name that this version does not know.
func kindByName(name string) errkind.Kind {
	for _, i := range errkind.All() {
		if i.Name == name {
			return i.Kind
		}
	}
	return errkind.Internal
}

// Headers of a failed answer of a NATS micro endpoint.
const (
	headerErrorCode = "Nats-Service-Error-Code"
	headerErrorText = "Nats-Service-Error"
)

// headerError returns the failure that an answer's headers carry, or nil.
func headerError(op string, h nats.Header) error {
	code, text := h.Get(headerErrorCode), h.Get(headerErrorText)
	if code == "" && text == "" {
		return nil
	}
	return &Error{Op: op, Kind: errkind.Parse(code), Reason: text}
}

// ExitError: the process ended with a code other than 0, or by a signal.
type ExitError struct {
	Code     int    // 1-255; meaningless when Signal is set
	Signal   string // for example "SIGKILL"; empty when the process returned Code
	TimedOut bool   // ended because Cmd.Timeout had passed
	OOM      bool   // ended because the session ran out of memory
}

func (e *ExitError) Error() string {
	how := "exit code " + strconv.Itoa(e.Code)
	if e.Signal != "" {
		how = "ended by " + e.Signal
	}
	switch {
	case e.OOM:
		how += " (out of memory)"
	case e.TimedOut:
		how += " (time-out)"
	}
	return "process: " + how
}

// UnknownExitError: how the process ended cannot be known, for example
// because its host was lost. It may have done all, some or none of its work.
type UnknownExitError struct {
	Reason string
	Cause  error // why the stream could not be attached again; may be nil
}

func (e *UnknownExitError) Error() string {
	return "process: exit unknown: " + e.Reason
}

// Unwrap returns the cause.
func (e *UnknownExitError) Unwrap() error { return e.Cause }

// Gap is a piece of a process's output that is gone for good: the ring of the
// sandbox was full while nobody was attached.
type Gap struct {
	Channel  string // "stdout" or "stderr"
	From, To uint64 // byte offsets, To excluded
}

// LostOutputError: the process ended as Exit says (nil: code 0) and part of
// its output is missing.
type LostOutputError struct {
	Gaps []Gap
	Exit error
}

func (e *LostOutputError) Error() string {
	var n uint64
	for _, g := range e.Gaps {
		n += g.To - g.From
	}
	msg := fmt.Sprintf("process: %d bytes of output were lost while nobody was attached", n)
	if e.Exit != nil {
		msg += "; " + e.Exit.Error()
	}
	return msg
}

// Unwrap returns how the process ended.
func (e *LostOutputError) Unwrap() error { return e.Exit }
