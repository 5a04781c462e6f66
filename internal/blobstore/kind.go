package blobstore

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/gcerrors"
)

// Kind returns what kind of failure an error of a store is: NotFound, Exists
// (IfNotExist), Denied, NoCapacity, DataLoss, Invalid, Deadline, Canceled, or
// Unavailable for everything else.
func Kind(err error) errkind.Kind {
	if err == nil {
		return errkind.OK
	}
	if e := (*errs.Error)(nil); errors.As(err, &e) {
		return e.Kind
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return errkind.NoCapacity
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return errkind.Denied
	}
	if kind := serviceKind(err); kind != errkind.OK {
		return kind
	}
	if kind, ok := codes[gcerrors.Code(err)]; ok {
		return kind
	}
	if kind := errs.Kind(err); kind != errkind.Internal {
		return kind
	}
	return errkind.Unavailable
}

var codes = map[gcerrors.ErrorCode]errkind.Kind{
	gcerrors.NotFound:           errkind.NotFound,
	gcerrors.AlreadyExists:      errkind.Exists,
	gcerrors.FailedPrecondition: errkind.Exists,
	gcerrors.InvalidArgument:    errkind.Invalid,
	gcerrors.Unimplemented:      errkind.Unimplemented,
	gcerrors.PermissionDenied:   errkind.Denied,
	gcerrors.ResourceExhausted:  errkind.NoCapacity,
	gcerrors.Canceled:           errkind.Canceled,
	gcerrors.DeadlineExceeded:   errkind.Deadline,
}

// serviceKind reads what gocloud has no code for in the answers of HTTP stores.
func serviceKind(err error) errkind.Kind {
	var coded interface{ ErrorCode() string }
	if errors.As(err, &coded) {
		switch c := coded.ErrorCode(); {
		case strings.Contains(c, "StorageFull"), strings.Contains(c, "QuotaExceeded"), strings.Contains(c, "InsufficientCapacity"):
			return errkind.NoCapacity
		case c == "AccessDenied", c == "InvalidAccessKeyId", c == "SignatureDoesNotMatch", c == "AllAccessDisabled":
			return errkind.Denied
		}
	}
	var status interface{ HTTPStatusCode() int }
	if errors.As(err, &status) {
		switch status.HTTPStatusCode() {
		case 401, 403:
			return errkind.Denied
		case 507:
			return errkind.NoCapacity
		}
	}
	return errkind.OK
}

// oneLine makes one short sentence of what a cloud's library says.
func oneLine(err error) string {
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op
	} else if errors.Is(err, context.DeadlineExceeded) {
		return "it did not answer in time"
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return text
}
