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
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/blob/fileblob"
)

// folder is a bucket in a folder whose writes and deletes are on the disk when
// they are acknowledged; fileblob's own are not: it never syncs. It writes to
// a temporary file beside the object and renames that.
type folder struct {
	layer.Driver
	root string
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
	return &folder{layer.Driver{Below: b}, dir}, syncUp(dir, filepath.Dir(dir))
}

// temporary is the name of a file that is being written.
var temporary = regexp.MustCompile(`\.[0-9a-f]{12,16}\.tmp$`)

// ListPaged leaves out what is being written.
func (f *folder) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	opts := *o
	for {
		page, err := f.Driver.ListPaged(ctx, &opts)
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
	root   string
	cancel context.CancelFunc
	err    error
}

// NewTypedWriter implements driver.Bucket.
func (f *folder) NewTypedWriter(ctx context.Context, key, contentType string, o *driver.WriterOptions) (driver.Writer, error) {
	opts, before := *o, o.BeforeWrite
	w := &fileWriter{root: f.root}
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
	return syncUp(w.dir, w.root)
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
	dir := filepath.Dir(filepath.Join(f.root, filepath.FromSlash(key)))
	for dir != f.root && strings.HasPrefix(dir, f.root) && os.Remove(dir) == nil {
		dir = filepath.Dir(dir)
	}
	return syncUp(dir, dir)
}

// tidy removes temporary files that are older than a time.
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
