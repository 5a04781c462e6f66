package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"syscall"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// errCut says that the store gave fewer bytes than it has to.
var errCut = errors.New("it ends too early")

// errLong says that an object is longer than any that was written.
var errLong = errors.New("it is longer than any that was written")

// put writes an object whole. An earlier attempt may have arrived although its answer did not: what
// is there already under the name of its content is not written again.
func (d *Depot) put(ctx context.Context, key string, b []byte) error {
	tried := false
	return d.request(ctx, "write to the store", key, func(ctx context.Context) error {
		if tried {
			if a, err := d.bucket.Attributes(ctx, key); err == nil && a.Size == int64(len(b)) {
				return nil
			}
		}
		tried = true
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		w, err := d.bucket.NewWriter(ctx, key, &blob.WriterOptions{ContentType: "application/octet-stream"})
		if err != nil {
			return notThere(err)
		}
		if _, err := w.Write(b); err != nil {
			cancel() // without it Close would keep the part that was written
			_ = w.Close()
			return notThere(err)
		}
		return notThere(w.Close())
	})
}

// notThere takes the meaning of damage from a "not found" where no object was asked for: it is the
// store itself that is not there.
func notThere(err error) error {
	if gcerrors.Code(err) != gcerrors.NotFound {
		return err
	}
	return fmt.Errorf("the store is not there: %v", err)
}

// get reads len(b) bytes of an object.
func (d *Depot) get(ctx context.Context, key string, off int64, b []byte) error {
	return d.request(ctx, "read from the store", key, func(ctx context.Context) error {
		r, err := d.bucket.NewRangeReader(ctx, key, off, int64(len(b)), nil)
		if err != nil {
			return d.pastEnd(ctx, key, off, err)
		}
		defer r.Close()
		return readFull(r, b)
	})
}

// pastEnd tells a request beyond an object's end from a store that fails: stores answer it in
// many ways.
func (d *Depot) pastEnd(ctx context.Context, key string, off int64, err error) error {
	if off == 0 || gcerrors.Code(err) == gcerrors.NotFound {
		return err
	}
	if a, aerr := d.bucket.Attributes(ctx, key); aerr == nil && a.Size <= off {
		return errCut
	}
	return err
}

func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errCut
	}
	return err
}

// getAll reads a whole object of at most limit bytes.
func (d *Depot) getAll(ctx context.Context, key string, limit int64) (b []byte, err error) {
	err = d.request(ctx, "read from the store", key, func(ctx context.Context) error {
		r, err := d.bucket.NewReader(ctx, key, nil)
		if err != nil {
			return err
		}
		defer r.Close()
		if r.Size() > limit {
			return fmt.Errorf("%w: %d bytes", errLong, r.Size())
		}
		b = make([]byte, r.Size())
		return readFull(r, b)
	})
	return b, err
}

func (d *Depot) remove(ctx context.Context, key string) error {
	return d.request(ctx, "delete from the store", key, func(ctx context.Context) error {
		err := d.bucket.Delete(ctx, key)
		if gcerrors.Code(err) == gcerrors.NotFound {
			return nil
		}
		return err
	})
}

type object struct {
	key  string
	size int64
}

// list calls each with every page of the objects below a prefix.
func (d *Depot) list(ctx context.Context, prefix string, each func([]object) error) error {
	for token := blob.FirstPageToken; token != nil; {
		var page []*blob.ListObject
		err := d.request(ctx, "list the store", prefix, func(ctx context.Context) error {
			objects, next, err := d.bucket.ListPage(ctx, token, 1000, &blob.ListOptions{Prefix: prefix})
			if err != nil {
				return notThere(err)
			}
			page, token = objects, next
			return nil
		})
		if err != nil {
			return err
		}
		out := make([]object, 0, len(page))
		for _, o := range page {
			if !o.IsDir {
				out = append(out, object{o.Key, o.Size})
			}
		}
		if err := each(out); err != nil {
			return err
		}
		if len(token) == 0 {
			return nil
		}
	}
	return nil
}

// request runs one request to the store, again with back-off while that may help.
func (d *Depot) request(ctx context.Context, op, key string, do func(context.Context) error) error {
	wait := d.opt.Backoff
	for attempt := 1; ; attempt++ {
		one, cancel := context.WithTimeout(ctx, d.opt.Timeout)
		err := do(one)
		cancel()
		if err == nil {
			return nil
		}
		if cause := ended(ctx); cause != nil {
			return errs.Wrap(op, key, cause)
		}
		if attempt >= d.opt.Attempts || !d.passing(err, attempt) {
			return errs.E(op, d.kind(err), key, err)
		}
		d.opt.Log.Debug("the store failed, trying again", "op", op, "key", key, "attempt", attempt, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait *= 3
	}
}

// ended is why a context ended, nil while it has not. A store that was too slow for the caller's
// deadline counts as one that could not be reached.
func ended(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, context.DeadlineExceeded) && errs.Kind(cause) == errkind.Deadline {
		return errs.E("", errkind.Unavailable, "", fmt.Errorf("the store was too slow: %w", cause))
	}
	return cause
}

// passing reports whether the same request may go well later. What is missing, short or damaged is
// asked for once more, and so is a store that did not answer in time: it may be behind for a moment.
// The kinds that stores give their errors (package blobstore) say less than the codes below them.
func (d *Depot) passing(err error, attempt int) bool {
	switch {
	case errors.Is(err, errLong):
		return false
	case errors.Is(err, errCut), errs.Is(err, errkind.DataLoss), errors.Is(err, context.DeadlineExceeded):
		return attempt < 2
	case d.isFull(err), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return false
	}
	switch gcerrors.Code(err) {
	case gcerrors.NotFound:
		return attempt < 2
	case gcerrors.InvalidArgument, gcerrors.PermissionDenied, gcerrors.Unimplemented, gcerrors.FailedPrecondition:
		return false
	}
	return true
}

// full reports whether there is no room: in the store, or on this host.
func full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

func (d *Depot) isFull(err error) bool {
	return full(err) || gcerrors.Code(err) == gcerrors.ResourceExhausted || d.opt.Kind != nil && d.opt.Kind(err) == errkind.NoCapacity
}

// kind is the kind of a request's failure. What the store calls "not found" is damage here: nothing is
// asked for that was not written.
func (d *Depot) kind(err error) errkind.Kind {
	switch {
	case errors.Is(err, errCut), errors.Is(err, errLong), errs.Is(err, errkind.DataLoss), gcerrors.Code(err) == gcerrors.NotFound:
		return errkind.DataLoss
	case d.isFull(err):
		return errkind.NoCapacity
	case errors.Is(err, context.Canceled):
		return errkind.Canceled
	}
	return errkind.Unavailable
}

// kindOf is the kind of a failure on the way of a restore.
func kindOf(err error) errkind.Kind {
	var e *errs.Error
	switch {
	case errors.As(err, &e):
		return e.Kind
	case full(err):
		return errkind.NoCapacity
	case errors.Is(err, context.Canceled):
		return errkind.Canceled
	}
	return errkind.Unavailable
}
