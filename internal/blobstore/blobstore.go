// Package blobstore opens the store of disks' snapshots by its URL:
//
//	nats:// or nats://BERTH_DISKS       the object store on the bus (package natsblob)
//	file:///folder                      a folder, made if it is missing
//	s3://bucket?region=R&endpoint=URL   S3, or anything that speaks it (then with path-style addresses)
//	gs://bucket, azblob://container     as gocloud.dev opens them, with the credentials of the environment
//	mem://                              in tests only
//
// s3://, gs:// and azblob:// need a program that imports package cloudstore;
// without it Open returns an error that names the build which has them.
//
// It guarantees of every store: an object is visible only when it is whole,
// and durable when its writer's Close returned nil (file:// syncs the file and
// its folders, nats:// syncs before it acknowledges, the others promise it);
// the kind of each error, as errs.Kind tells it, is one of those that Kind
// names; and no user, password or query of a URL is in an error's sentence.
//
// Verified here: nats:// and file:// against the real thing, s3:// against a
// fake of S3 in process. Not verified against any real service: s3://, gs://
// and azblob://; of the latter two only that their URLs are understood and an
// unreachable endpoint is said clearly.
package blobstore

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/blobstore/natsblob"
	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"gocloud.dev/blob"
	"gocloud.dev/blob/memblob"
)

const opOpen = "open store"

// openTime bounds how long a store may take to answer at Open.
const openTime = 20 * time.Second

// Open opens the store of a URL. conn is needed for nats:// only. An error is
// one sentence, of kind Invalid (the URL, or no such bucket), Denied or
// Unavailable.
func Open(ctx context.Context, raw string, conn *bus.Conn) (*blob.Bucket, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "its URL cannot be read") // the error holds the URL
	}
	if u.User != nil {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), "credentials do not belong in the URL but in the environment")
	}
	ctx, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	switch u.Scheme {
	case "nats":
		return openNATS(ctx, raw, u, conn)
	case "file":
		return openFile(raw, u)
	case "s3", "gs", "azblob":
		return openCloud(ctx, raw, u)
	case "":
		return nil, errs.E(opOpen, errkind.Invalid, "", "it has no URL: a folder is written file:///folder, the bus's own store nats://")
	case "mem":
		if !testing.Testing() {
			return nil, errs.E(opOpen, errkind.Invalid, raw, "a store in memory loses everything; it is for tests only")
		}
		return kinded(memblob.OpenBucket(nil)), nil
	}
	return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), fmt.Sprintf("%q is no kind of store; there are nats, file, s3, gs and azblob", u.Scheme))
}

func openNATS(ctx context.Context, raw string, u *url.URL, conn *bus.Conn) (*blob.Bucket, error) {
	name := u.Host
	if name == "" {
		name = subjects.ObjectStores[0].Name
	}
	if conn == nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), "it is nats:// or nats://NAME, on the bus that this process is connected to")
	}
	b, err := natsblob.Open(ctx, conn, name, nil)
	switch kind := errs.Kind(err); kind {
	case errkind.OK:
		return b, nil
	case errkind.NotFound:
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), err)
	case errkind.Denied:
		return nil, errs.E(opOpen, kind, Describe(raw), err)
	}
	return nil, errs.E(opOpen, errkind.Unavailable, Describe(raw), err)
}

func openFile(raw string, u *url.URL) (*blob.Bucket, error) {
	if u.Host != "" && u.Host != "localhost" || !filepath.IsAbs(u.Path) || filepath.Clean(u.Path) == "/" || u.RawQuery != "" {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), "a folder is written file:///path/to/it, without options")
	}
	d, err := openFolder(filepath.Clean(u.Path))
	if err != nil {
		kind := Kind(err)
		if kind != errkind.Denied && kind != errkind.NoCapacity {
			kind = errkind.Invalid
		}
		return nil, errs.E(opOpen, kind, Describe(raw), err)
	}
	return blob.NewBucket(&kinds{d}), nil
}

func openCloud(ctx context.Context, raw string, u *url.URL) (*blob.Bucket, error) {
	if u.Host == "" {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), "it names no bucket")
	}
	if !blob.DefaultURLMux().ValidBucketScheme(u.Scheme) {
		return nil, errs.Errorf(opOpen, errkind.Invalid, "this program was built without %s://; build it with make build CLOUD=1", u.Scheme)
	}
	if u.Scheme == "s3" {
		if err := s3Defaults(u); err != nil {
			return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), err)
		}
	}
	b, err := blob.OpenBucket(context.WithoutCancel(ctx), u.String()) // a client keeps its context for new tokens
	if err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), strings.ReplaceAll(oneLine(err), u.String(), Describe(raw)))
	}
	there, err := b.IsAccessible(ctx)
	if err == nil && there {
		return kinded(b), nil
	}
	_ = b.Close()
	if err == nil {
		return nil, errs.E(opOpen, errkind.Invalid, Describe(raw), "there is no bucket "+u.Host)
	}
	kind := Kind(err)
	if kind != errkind.Denied {
		kind = errkind.Unavailable
	}
	return nil, errs.E(opOpen, kind, Describe(raw), "it cannot be reached: "+oneLine(err))
}

// s3Defaults sets what stores other than Amazon's need, unless the URL says
// otherwise.
func s3Defaults(u *url.URL) error {
	q := u.Query()
	endpoint := q.Get("endpoint")
	if endpoint == "" {
		return nil
	}
	if e, err := url.Parse(endpoint); err != nil || e.Host == "" || e.Scheme != "http" && e.Scheme != "https" || e.User != nil {
		return fmt.Errorf("its endpoint is no http:// or https:// URL")
	}
	for name, value := range map[string]string{
		"region": "us-east-1", "use_path_style": "true",
		"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
	} {
		if !q.Has(name) {
			q.Set(name, value)
		}
	}
	u.RawQuery = q.Encode()
	return nil
}

// Describe is a URL without user, password and options, for people and logs.
func Describe(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme == "" {
		return "(a URL that cannot be read)"
	}
	return u.Scheme + "://" + u.Host + u.Path
}

// Reachable writes and deletes an object of a few bytes under v1/.probe, named
// after this machine and process, because nothing less tells a store that can
// be read only, or is full, before a session's compute is stopped for it. It
// costs three round trips on nats:// and two on the others.
func Reachable(ctx context.Context, b *blob.Bucket) error {
	const op = "reach store"
	name, err := os.Hostname()
	if err != nil || name == "" {
		name = "host"
	}
	key := fmt.Sprintf("v1/.probe/%s-%d", name, os.Getpid())
	if err := b.WriteAll(ctx, key, []byte("berth"), nil); err != nil {
		return errs.E(op, Kind(err), "", err)
	}
	if err := b.Delete(ctx, key); err != nil && Kind(err) != errkind.NotFound { // another check of this process was faster
		return errs.E(op, Kind(err), "", err)
	}
	return nil
}

// Tidy removes what writers left that were killed more than a time ago, which
// must be longer than any write takes, and returns how many. The stores of
// clouds do that themselves.
func Tidy(ctx context.Context, b *blob.Bucket, older time.Duration) (int, error) {
	var f *folder
	if b.As(&f) {
		return f.tidy(ctx, older)
	}
	var s *natsblob.Store
	if b.As(&s) {
		return s.Tidy(ctx, older)
	}
	return 0, nil
}
