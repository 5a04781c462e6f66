// Package layer makes a driver of a bucket, so that a bucket can be laid over
// another one and change some of its methods. It guarantees that every call,
// option, attribute and error code is the lower bucket's; a write that is
// cancelled is cancelled below.
package layer

import (
	"context"
	"io"

	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/gcerrors"
)

// Driver is a driver.Bucket that does what its bucket does.
type Driver struct{ Below *blob.Bucket }

var _ driver.Bucket = Driver{}

// ErrorCode implements driver.Bucket.
func (d Driver) ErrorCode(err error) gcerrors.ErrorCode { return gcerrors.Code(err) }

// As implements driver.Bucket.
func (d Driver) As(i any) bool { return d.Below.As(i) }

// ErrorAs implements driver.Bucket.
func (d Driver) ErrorAs(err error, i any) bool { return d.Below.ErrorAs(err, i) }

// Attributes implements driver.Bucket.
func (d Driver) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	a, err := d.Below.Attributes(ctx, key)
	if err != nil {
		return nil, err
	}
	return &driver.Attributes{
		CacheControl: a.CacheControl, ContentDisposition: a.ContentDisposition, ContentEncoding: a.ContentEncoding,
		ContentLanguage: a.ContentLanguage, ContentType: a.ContentType, Metadata: a.Metadata,
		CreateTime: a.CreateTime, ModTime: a.ModTime, Size: a.Size, MD5: a.MD5, ETag: a.ETag, AsFunc: a.As,
	}, nil
}

// ListPaged implements driver.Bucket.
func (d Driver) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	size, token := o.PageSize, o.PageToken
	if size <= 0 {
		size = 1000
	}
	if len(token) == 0 {
		token = blob.FirstPageToken
	}
	objects, next, err := d.Below.ListPage(ctx, token, size, &blob.ListOptions{Prefix: o.Prefix, Delimiter: o.Delimiter, BeforeList: o.BeforeList})
	if err != nil {
		return nil, err
	}
	page := &driver.ListPage{NextPageToken: next}
	for _, x := range objects {
		page.Objects = append(page.Objects, &driver.ListObject{
			Key: x.Key, ModTime: x.ModTime, Size: x.Size, MD5: x.MD5, IsDir: x.IsDir, AsFunc: x.As,
		})
	}
	return page, nil
}

// Reader is a reader of the lower bucket.
type Reader struct{ *blob.Reader }

// Attributes implements driver.Reader.
func (r Reader) Attributes() *driver.ReaderAttributes {
	return &driver.ReaderAttributes{ContentType: r.ContentType(), ModTime: r.ModTime(), Size: r.Size()}
}

// NewRangeReader implements driver.Bucket.
func (d Driver) NewRangeReader(ctx context.Context, key string, offset, length int64, o *driver.ReaderOptions) (driver.Reader, error) {
	r, err := d.Below.NewRangeReader(ctx, key, offset, length, &blob.ReaderOptions{
		BeforeRead: o.BeforeRead, BufferSize: o.BufferSize, MaxConcurrency: o.MaxConcurrency,
	})
	if err != nil {
		return nil, err
	}
	return Reader{r}, nil
}

// NewTypedWriter implements driver.Bucket.
func (d Driver) NewTypedWriter(ctx context.Context, key, contentType string, o *driver.WriterOptions) (driver.Writer, error) {
	// The bucket above has looked at the content already.
	return d.Below.NewWriter(ctx, key, &blob.WriterOptions{
		BufferSize: o.BufferSize, MaxConcurrency: o.MaxConcurrency, CacheControl: o.CacheControl,
		ContentDisposition: o.ContentDisposition, ContentEncoding: o.ContentEncoding, ContentLanguage: o.ContentLanguage,
		ContentType: contentType, DisableContentTypeDetection: true, ContentMD5: o.ContentMD5, Metadata: o.Metadata,
		BeforeWrite: o.BeforeWrite, IfNotExist: o.IfNotExist,
	})
}

// Copy implements driver.Bucket.
func (d Driver) Copy(ctx context.Context, dst, src string, o *driver.CopyOptions) error {
	return d.Below.Copy(ctx, dst, src, &blob.CopyOptions{BeforeCopy: o.BeforeCopy})
}

// Delete implements driver.Bucket.
func (d Driver) Delete(ctx context.Context, key string, o *driver.DeleteOptions) error {
	return d.Below.DeleteWithOptions(ctx, key, &blob.DeleteOptions{BeforeDelete: o.BeforeDelete})
}

// SignedURL implements driver.Bucket.
func (d Driver) SignedURL(ctx context.Context, key string, o *driver.SignedURLOptions) (string, error) {
	return d.Below.SignedURL(ctx, key, &blob.SignedURLOptions{
		Expiry: o.Expiry, Method: o.Method, ContentType: o.ContentType,
		EnforceAbsentContentType: o.EnforceAbsentContentType, BeforeSign: o.BeforeSign,
	})
}

// Close implements driver.Bucket and closes the bucket below.
func (d Driver) Close() error { return d.Below.Close() }

var _ io.ReadCloser = Reader{}
