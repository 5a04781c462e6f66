package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/blob/driver"
	"gocloud.dev/gcerrors"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

var (
	testKey  = Key{1, 2, 3}
	testDisk = Disk{"acme", ids.DeriveSessionKey([]byte("k"), "iss", "acme", "sub", "default"), ids.Generation{Incarnation: 1, Index: 7}}
	day0     = time.Date(2025, 3, 10, 12, 0, 0, 0, time.UTC)
	defaults = Keep{All: time.Hour, Hourly: 24 * time.Hour, Daily: 30 * 24 * time.Hour}
)

func metaAt(epoch uint64, after time.Duration) Meta {
	return Meta{Epoch: ids.Epoch{Incarnation: 1, Index: epoch}, TakenAt: day0.Add(after), Image: "sha256:abc", Keep: defaults}
}

// image is a disk in memory that knows which pages are not zero.
type image []byte

const page = 4096

func (m image) ranges(differs func(off int) bool) []extents.Range {
	out := []extents.Range{}
	for off := 0; off < len(m); off += page {
		if !differs(off) {
			continue
		}
		n := uint64(min(page, len(m)-off))
		if k := len(out) - 1; k >= 0 && out[k].Off+out[k].Len == uint64(off) {
			out[k].Len += n
		} else {
			out = append(out, extents.Range{Off: uint64(off), Len: n})
		}
	}
	return out
}

func (m image) data() []extents.Range {
	return m.ranges(func(off int) bool { return !isZero(m[off:min(off+page, len(m))]) })
}

// changed lists the pages that are not as in base; nil when there is no base.
func (m image) changed(base image) []extents.Range {
	if base == nil {
		return nil
	}
	return m.ranges(func(off int) bool {
		return off >= len(base) || !bytes.Equal(m[off:min(off+page, len(m))], base[off:min(off+page, len(m), len(base))])
	})
}

func (m image) source(base image, ix *Index) Source {
	return Source{Image: bytes.NewReader(m), Size: uint64(len(m)), Data: m.data(), Changed: m.changed(base), Base: ix}
}

// fill writes content that compresses a little, a different one for each seed.
func (m image) fill(off, n int, seed uint64) image {
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := off; i < off+n; i += 64 {
		v := rng.Uint64() | 1
		for j := i; j < min(i+8, off+n); j++ {
			m[j] = byte(v >> (8 * (j - i)))
		}
	}
	return m
}

func depot(b *blob.Bucket) *Depot { return Open(b, Options{Backoff: time.Microsecond, Attempts: 3}) }

func save(t testing.TB, d *Depot, src Source, meta Meta) (*Index, Stats) {
	t.Helper()
	ix, st, err := d.Save(t.Context(), testDisk, testKey, src, meta)
	if err != nil {
		t.Fatal(err)
	}
	return ix, st
}

// content restores a snapshot into a fresh file and reads it back.
func content(t testing.TB, d *Depot, ix *Index) (image, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "restored"))
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := d.Restore(context.Background(), testKey, ix, f, nil); err != nil {
		if st, serr := f.Stat(); serr != nil || st.Size() != 0 {
			t.Errorf("after a failed restore the file has %d bytes", st.Size())
		}
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(f, 0, int64(ix.info.Size)))
	if err != nil {
		t.Fatal(err)
	}
	return b, nil
}

func mustBe(t testing.TB, d *Depot, ix *Index, want image) {
	t.Helper()
	got, err := content(t, d, ix)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the restored disk differs")
	}
}

// shelf is a store in memory whose requests can be made to fail.
type shelf struct {
	mu      sync.Mutex
	objects map[string][]byte
	reads   int
	// fail is asked before each request: "put", "get", "list", "delete", "stat".
	fail func(ctx context.Context, op, key string) error
}

func newShelf() *shelf { return &shelf{objects: map[string][]byte{}} }

func (s *shelf) bucket(t testing.TB) *blob.Bucket {
	b := blob.NewBucket(s)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

type coded struct{ code gcerrors.ErrorCode }

func (c coded) Error() string { return "shelf: " + c.code.String() }

func (s *shelf) ask(ctx context.Context, op, key string) error {
	if s.fail == nil {
		return ctx.Err()
	}
	return s.fail(ctx, op, key)
}

func (s *shelf) keys(part string) (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.objects {
		if strings.Contains(k, part) {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

func (s *shelf) size() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.objects {
		n += len(b)
	}
	return n
}

func (s *shelf) ErrorCode(err error) gcerrors.ErrorCode {
	var c coded
	if errors.As(err, &c) {
		return c.code
	}
	return gcerrors.Unknown
}
func (s *shelf) As(any) bool             { return false }
func (s *shelf) ErrorAs(error, any) bool { return false }
func (s *shelf) Close() error            { return nil }
func (s *shelf) Copy(context.Context, string, string, *driver.CopyOptions) error {
	return coded{gcerrors.Unimplemented}
}
func (s *shelf) SignedURL(context.Context, string, *driver.SignedURLOptions) (string, error) {
	return "", coded{gcerrors.Unimplemented}
}

func (s *shelf) Attributes(ctx context.Context, key string) (*driver.Attributes, error) {
	if err := s.ask(ctx, "stat", key); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.objects[key]
	if !ok {
		return nil, coded{gcerrors.NotFound}
	}
	return &driver.Attributes{Size: int64(len(b))}, nil
}

func (s *shelf) ListPaged(ctx context.Context, o *driver.ListOptions) (*driver.ListPage, error) {
	if err := s.ask(ctx, "list", o.Prefix); err != nil {
		return nil, err
	}
	out := &driver.ListPage{}
	for _, k := range s.keys(o.Prefix) {
		if !strings.HasPrefix(k, o.Prefix) || k <= string(o.PageToken) {
			continue
		}
		if len(out.Objects) == 7 { // small pages, so that every list has several
			out.NextPageToken = []byte(out.Objects[6].Key)
			break
		}
		s.mu.Lock()
		out.Objects = append(out.Objects, &driver.ListObject{Key: k, Size: int64(len(s.objects[k]))})
		s.mu.Unlock()
	}
	return out, nil
}

type shelfReader struct {
	io.Reader
	size int64
}

func (r shelfReader) Close() error { return nil }
func (r shelfReader) As(any) bool  { return false }
func (r shelfReader) Attributes() *driver.ReaderAttributes {
	return &driver.ReaderAttributes{Size: r.size}
}

func (s *shelf) NewRangeReader(ctx context.Context, key string, off, n int64, _ *driver.ReaderOptions) (driver.Reader, error) {
	if err := s.ask(ctx, "get", key); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	b, ok := s.objects[key]
	if !ok {
		return nil, coded{gcerrors.NotFound}
	}
	if off > int64(len(b)) {
		return nil, coded{gcerrors.InvalidArgument}
	}
	part := b[off:]
	if n >= 0 && n < int64(len(part)) {
		part = part[:n]
	}
	return shelfReader{bytes.NewReader(part), int64(len(b))}, nil
}

type shelfWriter struct {
	s   *shelf
	ctx context.Context
	key string
	buf bytes.Buffer
}

func (w *shelfWriter) Write(p []byte) (int, error) { return w.buf.Write(p) }

func (w *shelfWriter) Close() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if old, ok := w.s.objects[w.key]; ok && !bytes.Equal(old, w.buf.Bytes()) {
		return fmt.Errorf("object %s was changed", w.key)
	}
	w.s.objects[w.key] = w.buf.Bytes()
	return nil
}

func (s *shelf) NewTypedWriter(ctx context.Context, key, _ string, _ *driver.WriterOptions) (driver.Writer, error) {
	if err := s.ask(ctx, "put", key); err != nil {
		return nil, err
	}
	return &shelfWriter{s: s, ctx: ctx, key: key}, nil
}

func (s *shelf) Delete(ctx context.Context, key string, _ *driver.DeleteOptions) error {
	if err := s.ask(ctx, "delete", key); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.objects[key]; !ok {
		return coded{gcerrors.NotFound}
	}
	delete(s.objects, key)
	return nil
}
