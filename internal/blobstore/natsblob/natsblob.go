// Package natsblob is the nats:// driver of gocloud.dev/blob: a bucket over a
// JetStream object store, in the format of nats.go's jetstream.ObjectStore,
// which reads what is written here and the other way round.
//
// It guarantees: an object is visible only when every chunk of it was
// acknowledged by the server, in order, and never in part; a write that was
// cancelled or failed takes its chunks away, at once or as soon as the
// connection is back, and what a killed writer left is found by Tidy; a lost
// connection fails a write at once instead of blocking it, and one whose
// stream lost its leader once there is another one, at the latest after 30 s,
// to be repeated by its caller; a read goes on at other replicas, and where none
// answers, or a leader is needed, a read and a look-up wait for the next leader,
// for as long as their context allows, or 30 s; a full store refuses
// (NoCapacity) and can still delete. Objects are looked up and listed at the
// stream's leader; chunks may come from any replica and are asked of the leader
// if one lags.
//
// A read of a whole object is verified against its SHA-256 (DataLoss); a read
// of a range is not. An MD5 is known only of objects whose writer gave one. No more than a few MiB of an object are in memory.
//
// Names are base64 in one subject token, so the server cannot filter by
// prefix: the first page of a listing fetches the names of all objects (about
// 80 bytes each), later pages come from that list; sizes are fetched for the
// objects of the page only. There are no consumers, so a store costs the
// server nothing per reader.
//
// nats.go's own Put is not used: it publishes the object's record before its
// chunks are acknowledged (a full store then shows an object without its
// end), resends a chunk out of order, and leaves chunks on cancel.
package natsblob

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/gcerrors"
	"golang.org/x/sync/semaphore"
)

// ChunkSize is the size of a chunk in bytes, which is one message: each is synced
// on its own, so the largest that a message of 1 MiB can carry is the fastest.
const ChunkSize = 1000 << 10

const (
	writeWindow = 4 << 20  // unacknowledged bytes of one writer
	writeTotal  = 16 << 20 // of all writers of a bucket; the server queues 128 MiB per stream
	batchBytes  = 4 << 20  // asked for at once by one reader, which has two batches on the way
	readTotal   = 32 << 20 // of all readers of a bucket; the server cuts a client off at 64 MiB
	// stall is without any answer. A stream whose node died has another leader
	// after 4 to 9 s and never answers what the first had in hand, which is
	// looked for every lookAfter; yet a disk under load takes longer than that
	// for what is synced.
	stall     = 30 * time.Second
	lookAfter = 2 * time.Second
	// replicaStall is when the leader is asked for what a replica does not send.
	replicaStall = 3 * time.Second
	// askAgain is how long to wait before all replicas are asked again of which
	// none answered; it doubles up to askAgainMost.
	askAgain     = 20 * time.Millisecond
	askAgainMost = 250 * time.Millisecond
	cleanupTime  = 5 * time.Second
)

// Options of Open.
type Options struct {
	ChunkSize int // 0: ChunkSize
	Log       *slog.Logger
}

type bucket struct {
	conn   *bus.Conn
	nc     *nats.Conn
	name   string // of the object store
	stream string
	chunk  int
	log    *slog.Logger
	writes *semaphore.Weighted
	reads  *semaphore.Weighted
	lists  listings

	mu       sync.Mutex
	closed   chan struct{}
	leftover map[string]struct{} // chunks to take away once the server answers
	sweeping bool
	last     answered
}

// answered is the newest answer of the stream to any writer.
type answered struct {
	at, sent time.Time // when the answer came, and when what it answers was sent
}

// Open opens the object store of a name. It does not create it: the bus
// declares its stores. The kind of an error is NotFound, Denied or one of an
// unreachable bus (Unavailable, Deadline).
func Open(ctx context.Context, conn *bus.Conn, name string, opts *Options) (*blob.Bucket, error) {
	b, err := open(ctx, conn, name, opts)
	if err != nil {
		return nil, err
	}
	return blob.NewBucket(b), nil
}

func open(ctx context.Context, conn *bus.Conn, name string, opts *Options) (*bucket, error) {
	b := newBucket(conn, name, opts)
	if err := conn.Read(ctx, "STREAM.INFO."+b.stream, nil, nil); err != nil {
		if errs.Is(err, errkind.NotFound) {
			err = fmt.Errorf("the bus has no object store %s", name)
			return nil, errs.E("open object store", errkind.NotFound, name, err)
		}
		return nil, errs.Wrap("open object store", name, err)
	}
	return b, nil
}

func newBucket(conn *bus.Conn, name string, opts *Options) *bucket {
	if opts == nil {
		opts = &Options{}
	}
	b := &bucket{
		conn: conn, nc: conn.NATS(), name: name, stream: "OBJ_" + name, chunk: opts.ChunkSize, log: opts.Log,
		writes: semaphore.NewWeighted(writeTotal), reads: semaphore.NewWeighted(readTotal),
		closed: make(chan struct{}), leftover: map[string]struct{}{},
	}
	if b.chunk <= 0 {
		b.chunk = ChunkSize
	}
	if b.log == nil {
		b.log = slog.Default()
	}
	return b
}

func (b *bucket) metaSubject(key string) string {
	return "$O." + b.name + ".M." + base64.URLEncoding.EncodeToString([]byte(key))
}

func (b *bucket) chunkSubject(nuid string) string { return "$O." + b.name + ".C." + nuid }

// ErrorCode implements driver.Bucket.
func (b *bucket) ErrorCode(err error) gcerrors.ErrorCode {
	switch errs.Kind(err) {
	case errkind.OK:
		return gcerrors.OK
	case errkind.NotFound:
		return gcerrors.NotFound
	case errkind.Exists, errkind.Conflict:
		return gcerrors.FailedPrecondition
	case errkind.NoCapacity, errkind.Exhausted:
		return gcerrors.ResourceExhausted
	case errkind.Denied, errkind.Unauthenticated:
		return gcerrors.PermissionDenied
	case errkind.Invalid, errkind.TooLarge:
		return gcerrors.InvalidArgument
	case errkind.Unimplemented:
		return gcerrors.Unimplemented
	case errkind.Canceled:
		return gcerrors.Canceled
	case errkind.Deadline:
		return gcerrors.DeadlineExceeded
	}
	return gcerrors.Unknown // gocloud has no code for Unavailable and DataLoss; errs.Kind tells them
}

// As exposes the *nats.Conn, the *bus.Conn and the *Store.
func (b *bucket) As(i any) bool {
	switch p := i.(type) {
	case **nats.Conn:
		*p = b.nc
	case **bus.Conn:
		*p = b.conn
	case **Store:
		*p = &Store{b}
	default:
		return false
	}
	return true
}

// ErrorAs exposes *errs.Error and *jetstream.APIError.
func (b *bucket) ErrorAs(err error, i any) bool {
	switch p := i.(type) {
	case **errs.Error:
		return errors.As(err, p)
	case **jetstream.APIError:
		return errors.As(err, p)
	}
	return false
}

// Attributes implements driver.Bucket.
func (b *bucket) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	o, err := b.lookup(ctx, key)
	if err != nil {
		return nil, err
	}
	h := http.Header(o.Headers)
	return &driver.Attributes{
		CacheControl: h.Get("Cache-Control"), ContentDisposition: h.Get("Content-Disposition"),
		ContentEncoding: h.Get("Content-Encoding"), ContentLanguage: h.Get("Content-Language"),
		ContentType: o.contentType(), Metadata: o.Metadata,
		CreateTime: o.ModTime, ModTime: o.ModTime, Size: int64(o.Size), MD5: o.md5(),
		ETag: fmt.Sprintf("%q", o.NUID), AsFunc: o.as,
	}, nil
}

// Copy reads the source through this process: the store has no copy of its own.
func (b *bucket) Copy(ctx context.Context, dstKey, srcKey string, opts *driver.CopyOptions) error {
	src, err := b.lookup(ctx, srcKey)
	if err != nil {
		return err
	}
	r := b.reader(ctx, srcKey, src, 0, -1)
	defer r.Close()
	w := b.writer(ctx, dstKey)
	w.info.Headers, w.info.Metadata = src.Headers, src.Metadata
	if opts.BeforeCopy != nil {
		if err := opts.BeforeCopy(asMeta(&w.info.ObjectMeta)); err != nil {
			return err
		}
	}
	if err := r.Download(w); err != nil {
		w.abort()
		return err
	}
	return w.Close()
}

// Delete takes the object away first and its chunks afterwards, so that one
// that is half deleted is not found.
func (b *bucket) Delete(ctx context.Context, key string, opts *driver.DeleteOptions) error {
	const op = "delete object"
	o, err := b.lookup(ctx, key)
	if err == nil && opts.BeforeDelete != nil {
		err = opts.BeforeDelete(o.as)
	}
	for ; err == nil; o, err = b.lookup(ctx, key) {
		n, err := b.purge(ctx, b.metaSubject(key), o.seq+1)
		if err != nil {
			return errs.Wrap(op, key, err)
		}
		if n == 0 {
			continue // replaced or deleted in the meantime
		}
		if _, err := b.purge(ctx, b.chunkSubject(o.NUID), 0); err != nil {
			b.leave(o.NUID)
			return errs.Wrap(op, key, fmt.Errorf("it is gone, but its chunks are still there: %w", err))
		}
		return nil
	}
	return err
}

// purge removes the messages of a subject, up to but not including a sequence
// if that is not 0.
func (b *bucket) purge(ctx context.Context, subject string, before uint64) (uint64, error) {
	req := map[string]any{"filter": subject}
	if before > 0 {
		req["seq"] = before
	}
	var resp struct {
		Purged uint64 `json:"purged"`
	}
	ctx, cancel := context.WithTimeout(ctx, stall)
	defer cancel()
	err := b.conn.API(ctx, "STREAM.PURGE."+b.stream, req, &resp)
	return resp.Purged, err
}

// SignedURL is not supported.
func (b *bucket) SignedURL(context.Context, string, *driver.SignedURLOptions) (string, error) {
	return "", errs.E("sign URL", errkind.Unimplemented, "", "an object store on the bus has no URLs")
}

// Close ends the clearing away of leftovers; the connection stays open.
func (b *bucket) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.closed:
	default:
		close(b.closed)
	}
	return nil
}

// failed gives an error its kind.
func failed(op, key string, err error) error {
	if e := (*errs.Error)(nil); errors.As(err, &e) {
		return errs.Wrap(op, key, err)
	}
	kind := errs.Kind(err) // of the context
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		kind = apiKind(api)
	case kind == errkind.Internal:
		kind = errkind.Unavailable
	}
	return errs.E(op, kind, key, err)
}

func apiKind(api *jetstream.APIError) errkind.Kind {
	text := strings.ToLower(api.Description)
	switch {
	case strings.Contains(text, "maximum bytes"), strings.Contains(text, "insufficient"), strings.Contains(text, "no space"):
		return errkind.NoCapacity
	case api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence:
		return errkind.Conflict
	case api.Code == 404:
		return errkind.NotFound
	}
	return errkind.Unavailable
}
