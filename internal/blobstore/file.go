package blobstore

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/blobstore/layer"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/blob/fileblob"
	"gocloud.dev/gcerrors"
)

// folder is a bucket in a folder whose writes and deletes are on the disk when
// they are acknowledged; fileblob's own are not: it never syncs. It writes to
// a temporary file beside the object and renames that. Another folder at the
// same path, such as what is below a mount that went away, is never taken for
// an empty store, and nothing is written there.
type folder struct {
	layer.Driver
	root string
	id   os.FileInfo // of root when it was opened
}

// here fails when the folder is not the one that was opened.
func (f *folder) here() error {
	now, err := os.Stat(f.root)
	if err == nil && os.SameFile(now, f.id) {
		return nil
	}
	return errs.E("look at store", errkind.Unavailable, "", "its folder was moved away, or is not mounted any more")
}

// unless says that the store is not here rather than that it lacks an object.
func (f *folder) unless(err error) error {
	if err != nil && f.ErrorCode(err) == gcerrors.NotFound {
		if away := f.here(); away != nil {
			return away
		}
	}
	return err
}

// Attributes implements driver.Bucket.
func (f *folder) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	a, err := f.Driver.Attributes(ctx, key)
	return a, f.unless(err)
}

// NewRangeReader implements driver.Bucket.
func (f *folder) NewRangeReader(ctx context.Context, key string, offset, length int64, o *driver.ReaderOptions) (driver.Reader, error) {
	r, err := f.Driver.NewRangeReader(ctx, key, offset, length, o)
	return r, f.unless(err)
}

func openFolder(dir string) (driver.Bucket, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	b, err := fileblob.OpenBucket(dir, &fileblob.Options{NoTempDir: true, Metadata: fileblob.MetadataDontWrite, DirFileMode: 0o700})
	if err != nil {
		return nil, err
	}
	id, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	return &folder{layer.Driver{Below: b}, dir, id}, syncUp(dir, filepath.Dir(dir))
}

// temporary is the name of a file that is being written.
var temporary = regexp.MustCompile(`\.[0-9a-f]{12,16}\.tmp$`)

// ListPaged leaves out what is being written.
func (f *folder) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	opts := *o
	for {
		page, err := f.Driver.ListPaged(ctx, &opts)
		if err == nil {
			err = f.here()
		}
		if err != nil {
			return nil, err
		}
		kept := page.Objects[:0]
		for _, x := range page.Objects {
			if x.IsDir || !temporary.MatchString(x.Key) {
				kept = append(kept, x)
			}
		}
		page.Objects = kept
		if len(kept) > 0 || len(page.NextPageToken) == 0 {
			return page, nil
		}
		opts.PageToken, opts.BeforeList = page.NextPageToken, nil
	}
}

type fileWriter struct {
	*blob.Writer
	f      *os.File
	dir    string
	store  *folder
	cancel context.CancelFunc
	err    error
}

// NewTypedWriter implements driver.Bucket.
func (f *folder) NewTypedWriter(ctx context.Context, key, contentType string, o *driver.WriterOptions) (driver.Writer, error) {
	if err := f.here(); err != nil {
		return nil, err
	}
	opts, before := *o, o.BeforeWrite
	w := &fileWriter{store: f}
	opts.BeforeWrite = func(as func(any) bool) error {
		if !as(&w.f) {
			return errors.New("fileblob does not say which file it writes")
		}
		if before != nil {
			return before(as)
		}
		return nil
	}
	for try := 0; ; try++ {
		var inner context.Context
		inner, w.cancel = context.WithCancel(ctx)
		below, err := f.Driver.NewTypedWriter(inner, key, contentType, &opts)
		if err == nil {
			w.Writer = below.(*blob.Writer)
			w.dir = filepath.Dir(w.f.Name())
			return w, nil
		}
		w.cancel()
		// a delete may take the empty folder away between its making and its use
		if !errors.Is(err, fs.ErrNotExist) || try == 3 {
			return nil, err
		}
	}
}

// Write implements io.Writer.
func (w *fileWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	if err != nil {
		w.err = err
	}
	return n, err
}

// Close syncs the file before it takes the object's name, and the folders
// after. A write that failed takes no name.
func (w *fileWriter) Close() error {
	defer w.cancel()
	if w.err == nil {
		w.err = w.f.Sync()
	}
	if w.err != nil {
		w.cancel()
		_ = w.Writer.Close()
		return w.err
	}
	if err := w.Writer.Close(); err != nil {
		return err
	}
	if err := syncUp(w.dir, w.store.root); err != nil {
		return err
	}
	return w.store.here()
}

// Copy goes through a writer, because that syncs.
func (f *folder) Copy(ctx context.Context, dst, src string, o *driver.CopyOptions) error {
	r, err := f.NewRangeReader(ctx, src, 0, -1, &driver.ReaderOptions{})
	if err != nil {
		return err
	}
	defer r.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := f.NewTypedWriter(ctx, dst, r.Attributes().ContentType, &driver.WriterOptions{BeforeWrite: o.BeforeCopy})
	if err != nil {
		return err
	}
	if _, err := r.(layer.Reader).WriteTo(w); err != nil {
		cancel()
		_ = w.Close()
		return err
	}
	return w.Close()
}

// Delete also removes the folders that are empty then: their names are those
// of sessions.
func (f *folder) Delete(ctx context.Context, key string, o *driver.DeleteOptions) error {
	if err := f.Driver.Delete(ctx, key, o); err != nil {
		return err
	}
	dir := f.prune(filepath.Dir(filepath.Join(f.root, filepath.FromSlash(key))))
	return syncUp(dir, dir)
}

// prune removes a folder and those above it that are empty, and returns the first that is not.
func (f *folder) prune(dir string) string {
	for dir != f.root && strings.HasPrefix(dir, f.root) && os.Remove(dir) == nil {
		dir = filepath.Dir(dir)
	}
	return dir
}

// tidy removes temporary files that are older than a time, and the folders
// that nothing else is in: an object of theirs may be deleted already.
func (f *folder) tidy(ctx context.Context, older time.Duration) (n int, err error) {
	err = filepath.WalkDir(f.root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() || !temporary.MatchString(path) {
			return err
		}
		if info, err := d.Info(); err == nil && time.Since(info.ModTime()) >= older && os.Remove(path) == nil {
			n++
			f.prune(filepath.Dir(path))
		}
		return ctx.Err()
	})
	return n, err
}

// syncUp syncs a folder and those above it up to and including root. One that
// is gone was emptied by a delete and holds nothing to sync.
func syncUp(dir, root string) error {
	for {
		d, err := os.Open(dir)
		if err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if dir == root || dir == "/" || !strings.HasPrefix(dir, root) {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}
