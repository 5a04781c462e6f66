// Package blobtest lays a bucket over another one that fails as stores do:
// unreachable, slow, read-only, full, with objects that lost bytes. The faults
// are switched at run time and stand until they are switched back; nothing in
// it sleeps. The errors are of the kinds that package blobstore's stores give.
package blobtest

import (
	"context"
	"io"
	"sync"

	"github.com/berth-dev/berth/internal/blobstore/layer"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/gcerrors"
)

// Op is one operation on a bucket.
type Op string

// Operations. Put stands for opening a writer, Write for bytes handed to it,
// Commit for its Close, Read for bytes read.
const (
	Get    Op = "get"
	Read   Op = "read"
	Put    Op = "put"
	Write  Op = "write"
	Commit Op = "commit"
	Stat   Op = "stat"
	List   Op = "list"
	Copy   Op = "copy"
	Delete Op = "delete"
)

func (o Op) writes() bool { return o == Put || o == Write || o == Commit || o == Copy || o == Delete }

// Faults switches the faults of one bucket. Its methods are safe for
// concurrent use.
type Faults struct {
	mu                          sync.Mutex
	unreachable, readOnly, full bool
	gate                        chan struct{} // closed when operations may go on; nil: they may
	arrived                     chan Call
	hook                        func(Call) error
	damage                      map[string]func([]byte) []byte
	missing                     map[string]bool
	ops                         map[Op]int
	written, read               int64
}

// Call is an operation and its key (a prefix for List).
type Call struct {
	Op  Op
	Key string
}

// Faulty lays a bucket without faults over b. Closing it closes b.
func Faulty(b *blob.Bucket) (*blob.Bucket, *Faults) {
	f := &Faults{arrived: make(chan Call, 4096), damage: map[string]func([]byte) []byte{}, missing: map[string]bool{}, ops: map[Op]int{}}
	return blob.NewBucket(&bucket{layer.Driver{Below: b}, f}), f
}

// Unreachable has every operation fail as Unavailable, also in open readers
// and writers.
func (f *Faults) Unreachable(on bool) { f.set(func() { f.unreachable = on }) }

// ReadOnly has every write and delete fail as Denied.
func (f *Faults) ReadOnly(on bool) { f.set(func() { f.readOnly = on }) }

// Full has every write, and no delete, fail as NoCapacity.
func (f *Faults) Full(on bool) { f.set(func() { f.full = on }) }

// Hook is called before each operation; its error fails it. nil takes it away.
func (f *Faults) Hook(hook func(Call) error) { f.set(func() { f.hook = hook }) }

// Slow has every operation wait until the function that it returns is called,
// or until its context ends. Arrived tells which wait.
func (f *Faults) Slow() (release func()) {
	gate := make(chan struct{})
	f.set(func() { f.gate = gate })
	var once sync.Once
	return func() {
		once.Do(func() {
			f.set(func() {
				if f.gate == gate {
					f.gate = nil
				}
			})
			close(gate)
		})
	}
}

// Arrived hands out the operations that had to wait, as they come.
func (f *Faults) Arrived() <-chan Call { return f.arrived }

// Miss has an object be gone from readers, attributes and lists.
func (f *Faults) Miss(key string) { f.set(func() { f.missing[key] = true }) }

// Flip inverts one byte of an object as it is read.
func (f *Faults) Flip(key string, offset int) {
	f.spoil(key, func(p []byte) []byte {
		if offset < len(p) {
			p[offset] ^= 0xff
		}
		return p
	})
}

// Truncate has an object end early as it is read.
func (f *Faults) Truncate(key string, size int) {
	f.spoil(key, func(p []byte) []byte { return p[:min(size, len(p))] })
}

// Mend takes every fault of objects and of the bucket away; what waits goes on.
func (f *Faults) Mend() {
	f.set(func() {
		f.unreachable, f.readOnly, f.full, f.hook = false, false, false, nil
		clear(f.damage)
		clear(f.missing)
		if f.gate != nil {
			close(f.gate)
			f.gate = nil
		}
	})
}

// Count returns how often an operation was tried.
func (f *Faults) Count(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ops[op]
}

// Bytes returns how many bytes were written and read.
func (f *Faults) Bytes() (written, read int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.written, f.read
}

func (f *Faults) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *Faults) spoil(key string, how func([]byte) []byte) { f.set(func() { f.damage[key] = how }) }

func (f *Faults) moved(written, read int) {
	f.set(func() { f.written, f.read = f.written+int64(written), f.read+int64(read) })
}

// pass is called before each operation.
func (f *Faults) pass(ctx context.Context, op Op, key string) error {
	f.mu.Lock()
	f.ops[op]++
	gate, hook := f.gate, f.hook
	f.mu.Unlock()
	if gate != nil {
		select {
		case f.arrived <- Call{op, key}:
		default:
		}
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if hook != nil {
		if err := hook(Call{op, key}); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.unreachable:
		return errs.E(string(op), errkind.Unavailable, key, "the store cannot be reached")
	case f.readOnly && op.writes():
		return errs.E(string(op), errkind.Denied, key, "the store is read-only")
	case f.full && op.writes() && op != Delete:
		return errs.E(string(op), errkind.NoCapacity, key, "the store is full")
	case f.missing[key] && (op == Get || op == Stat || op == Copy):
		return errs.E(string(op), errkind.NotFound, key, "there is no such object")
	}
	return nil
}

type bucket struct {
	layer.Driver
	f *Faults
}

// ErrorCode implements driver.Bucket.
func (b *bucket) ErrorCode(err error) gcerrors.ErrorCode {
	switch errs.Kind(err) {
	case errkind.NotFound:
		return gcerrors.NotFound
	case errkind.Denied:
		return gcerrors.PermissionDenied
	case errkind.NoCapacity:
		return gcerrors.ResourceExhausted
	}
	return b.Driver.ErrorCode(err)
}

func (b *bucket) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	if err := b.f.pass(ctx, Stat, key); err != nil {
		return nil, err
	}
	return b.Driver.Attributes(ctx, key)
}

func (b *bucket) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	if err := b.f.pass(ctx, List, o.Prefix); err != nil {
		return nil, err
	}
	page, err := b.Driver.ListPaged(ctx, o)
	if err != nil {
		return nil, err
	}
	b.f.mu.Lock()
	defer b.f.mu.Unlock()
	kept := page.Objects[:0]
	for _, x := range page.Objects {
		if !b.f.missing[x.Key] {
			kept = append(kept, x)
		}
	}
	page.Objects = kept
	return page, nil
}

func (b *bucket) Copy(ctx context.Context, dst, src string, o *driver.CopyOptions) error {
	if err := b.f.pass(ctx, Copy, src); err != nil {
		return err
	}
	return b.Driver.Copy(ctx, dst, src, o)
}

func (b *bucket) Delete(ctx context.Context, key string, o *driver.DeleteOptions) error {
	if err := b.f.pass(ctx, Delete, key); err != nil {
		return err
	}
	return b.Driver.Delete(ctx, key, o)
}

func (b *bucket) NewRangeReader(ctx context.Context, key string, offset, length int64, o *driver.ReaderOptions) (driver.Reader, error) {
	if err := b.f.pass(ctx, Get, key); err != nil {
		return nil, err
	}
	b.f.mu.Lock()
	damage := b.f.damage[key]
	b.f.mu.Unlock()
	if damage == nil {
		r, err := b.Driver.NewRangeReader(ctx, key, offset, length, o)
		if err != nil {
			return nil, err
		}
		return &reader{Reader: r, b: b, ctx: ctx, key: key}, nil
	}
	whole, err := b.Driver.NewRangeReader(ctx, key, 0, -1, o)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(whole)
	if err != nil {
		_ = whole.Close()
		return nil, err
	}
	data = damage(data)
	data = data[min(offset, int64(len(data))):]
	if length >= 0 {
		data = data[:min(length, int64(len(data)))]
	}
	return &reader{Reader: whole, b: b, ctx: ctx, key: key, spoilt: data, isSpoilt: true}, nil
}

type reader struct {
	driver.Reader
	b        *bucket
	ctx      context.Context
	key      string
	spoilt   []byte
	isSpoilt bool
}

func (r *reader) Read(p []byte) (n int, err error) {
	if err := r.b.f.pass(r.ctx, Read, r.key); err != nil {
		return 0, err
	}
	switch {
	case !r.isSpoilt:
		n, err = r.Reader.Read(p)
	case len(r.spoilt) == 0:
		return 0, io.EOF
	default:
		n = copy(p, r.spoilt)
		r.spoilt = r.spoilt[n:]
	}
	r.b.f.moved(0, n)
	return n, err
}

func (b *bucket) NewTypedWriter(ctx context.Context, key, contentType string, o *driver.WriterOptions) (driver.Writer, error) {
	if err := b.f.pass(ctx, Put, key); err != nil {
		return nil, err
	}
	inner, cancel := context.WithCancel(ctx)
	w, err := b.Driver.NewTypedWriter(inner, key, contentType, o)
	if err != nil {
		cancel()
		return nil, err
	}
	return &writer{Writer: w, b: b, ctx: ctx, cancel: cancel, key: key}, nil
}

type writer struct {
	driver.Writer
	b      *bucket
	ctx    context.Context
	cancel context.CancelFunc
	key    string
	err    error
}

func (w *writer) Write(p []byte) (int, error) {
	if w.err == nil {
		w.err = w.b.f.pass(w.ctx, Write, w.key)
	}
	if w.err != nil {
		return 0, w.err
	}
	n, err := w.Writer.Write(p)
	w.b.f.moved(n, 0)
	w.err = err
	return n, err
}

// Close stores nothing where a write failed.
func (w *writer) Close() error {
	defer w.cancel()
	if w.err == nil {
		w.err = w.b.f.pass(w.ctx, Commit, w.key)
	}
	if w.err != nil {
		w.cancel()
		_ = w.Writer.Close()
		return w.err
	}
	return w.Writer.Close()
}
