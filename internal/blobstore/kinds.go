package blobstore

import (
	"context"
	"io"

	"github.com/berth-dev/berth/internal/blobstore/layer"
	"github.com/berth-dev/berth/internal/errs"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
)

// kinds gives every error of the driver below its kind.
type kinds struct{ driver.Bucket }

func kinded(b *blob.Bucket) *blob.Bucket { return blob.NewBucket(&kinds{layer.Driver{Below: b}}) }

func kind(op, key string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return errs.E(op, Kind(err), key, err)
}

// As also exposes the folder of file://.
func (k *kinds) As(i any) bool {
	if p, ok := i.(**folder); ok {
		f, is := k.Bucket.(*folder)
		*p = f
		return is
	}
	return k.Bucket.As(i)
}

func (k *kinds) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	a, err := k.Bucket.Attributes(ctx, key)
	return a, kind("look up object", key, err)
}

func (k *kinds) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	p, err := k.Bucket.ListPaged(ctx, o)
	return p, kind("list objects", o.Prefix, err)
}

func (k *kinds) NewRangeReader(ctx context.Context, key string, offset, length int64, o *driver.ReaderOptions) (driver.Reader, error) {
	r, err := k.Bucket.NewRangeReader(ctx, key, offset, length, o)
	if err != nil {
		return nil, kind("get object", key, err)
	}
	return kindReader{r, key}, nil
}

type kindReader struct {
	driver.Reader
	key string
}

func (r kindReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	return n, kind("get object", r.key, err)
}

func (k *kinds) NewTypedWriter(ctx context.Context, key, contentType string, o *driver.WriterOptions) (driver.Writer, error) {
	w, err := k.Bucket.NewTypedWriter(ctx, key, contentType, o)
	if err != nil {
		return nil, kind("put object", key, err)
	}
	return kindWriter{w, key}, nil
}

type kindWriter struct {
	driver.Writer
	key string
}

func (w kindWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	return n, kind("put object", w.key, err)
}

func (w kindWriter) Close() error { return kind("put object", w.key, w.Writer.Close()) }

func (k *kinds) Copy(ctx context.Context, dst, src string, o *driver.CopyOptions) error {
	return kind("copy object", src, k.Bucket.Copy(ctx, dst, src, o))
}

func (k *kinds) Delete(ctx context.Context, key string, o *driver.DeleteOptions) error {
	return kind("delete object", key, k.Bucket.Delete(ctx, key, o))
}
