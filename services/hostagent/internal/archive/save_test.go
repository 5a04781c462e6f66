package archive

import (
	"bytes"
	"context"
	"io"
	"testing"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	"gocloud.dev/blob/memblob"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

func TestDiskComesBackFromEveryStore(t *testing.T) {
	stores := map[string]func() (*blob.Bucket, error){
		"memory": func() (*blob.Bucket, error) { return memblob.OpenBucket(nil), nil },
		"files": func() (*blob.Bucket, error) {
			return fileblob.OpenBucket(t.TempDir(), &fileblob.Options{NoTempDir: true})
		},
	}
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			b, err := open()
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			d := depot(b)
			m := make(image, 40*ChunkSize+5000).fill(0, 900000, 1).fill(20*ChunkSize+100, 3*ChunkSize, 2).fill(40*ChunkSize, 5000, 3)
			ix, st := save(t, d, m.source(nil, nil), metaAt(1, 0))
			if st.Objects != 2 || st.Chunks != len(ix.table) || st.Reused != 0 || ix.Info().Parent != "" {
				t.Fatalf("%+v", st)
			}
			again, err := d.Load(t.Context(), testDisk, testKey, ix.Info().ID)
			if err != nil || again.Info() != ix.Info() {
				t.Fatalf("%+v, %v", again, err)
			}
			mustBe(t, d, again, m)
			if err := d.Erase(t.Context(), testDisk); err != nil {
				t.Fatal(err)
			}
			if o, err := b.List(nil).Next(t.Context()); err != io.EOF {
				t.Fatalf("%v is left, %v", o, err)
			}
		})
	}
}

func TestUnchangedChunksAreNotReadOrStoredAgain(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	m := make(image, 64*ChunkSize).fill(0, 64*ChunkSize, 1)
	base, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	now := bytes.Clone(m)
	image(now).fill(5*ChunkSize+9*page, page, 2)
	copy(now[7*ChunkSize:8*ChunkSize], m[40*ChunkSize:]) // moved content
	clear(now[9*ChunkSize : 10*ChunkSize])               // punched
	clear(now[11*ChunkSize : 12*ChunkSize])              // written with zeros
	src := image(now).source(m, base)
	src.Data = append(src.Data, extents.Range{})
	ix, st := save(t, d, src, metaAt(1, time.Minute))
	// Zeros of chunk 9 and 11 are not in Data here, so only 5 and 7 are read.
	if st.BytesRead != 2*ChunkSize || st.Objects != 2 || st.Reused != 61 || st.Chunks != 62 {
		t.Fatalf("%+v", st)
	}
	mustBe(t, d, ix, now)
	mustBe(t, d, base, m)
	if info := ix.Info(); info.Parent != base.Info().ID || info.Allocated != 62*ChunkSize || info.Added == 0 || info.Added > ChunkSize {
		t.Fatalf("%+v", info)
	}
}

func TestNothingChangedWritesNothing(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	m := make(image, 8*ChunkSize).fill(0, 3*ChunkSize, 1)
	base, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	n := len(s.objects)
	for _, changed := range [][]extents.Range{nil, {}, {{Off: 0, Len: 8 * ChunkSize}}} {
		src := m.source(m, base)
		src.Changed = changed
		src.Data = []extents.Range{{Off: 0, Len: 8 * ChunkSize}}
		ix, st := save(t, d, src, metaAt(1, time.Minute))
		if ix != base || st.Objects != 0 || st.BytesUploaded != 0 || len(s.objects) != n {
			t.Fatalf("%+v", st)
		}
	}
	meta := metaAt(1, time.Minute)
	meta.Image = "sha256:rebased"
	if ix, st := save(t, d, m.source(m, base), meta); ix == base || st.Objects != 1 {
		t.Fatal("a new image digest is a change")
	}
}

func TestGrownAndShrunkDisks(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, 4*ChunkSize+page).fill(0, 4*ChunkSize+page, 1)
	base, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	grown := append(bytes.Clone(m), make([]byte, 3*ChunkSize)...)
	src := image(grown).source(m, base)
	src.Changed = []extents.Range{} // the bytes that were there are the same
	ix, _ := save(t, d, src, metaAt(1, time.Minute))
	mustBe(t, d, ix, grown)
	src = m[:2*ChunkSize+page].source(m, ix)
	src.Changed = []extents.Range{}
	ix, _ = save(t, d, src, metaAt(1, 2*time.Minute))
	mustBe(t, d, ix, m[:2*ChunkSize+page])
}

func TestEqualChunksAreStoredOnce(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, 50*ChunkSize)
	for i := range m {
		m[i] = byte(i%ChunkSize) | 1
	}
	ix, st := save(t, d, m.source(nil, nil), metaAt(1, 0))
	if st.Chunks != 50 || ix.Info().Added > 4096 {
		t.Fatalf("%+v, added %d", st, ix.Info().Added)
	}
	mustBe(t, d, ix, m)
}

func TestGenerationsShareNothing(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	m := make(image, 4*ChunkSize).fill(0, 4*ChunkSize, 1)
	a, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	other := testDisk
	other.Generation.Index++
	b, _, err := d.Save(t.Context(), other, testKey, m.source(nil, nil), metaAt(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	sums := map[[32]byte]bool{}
	for _, c := range a.table {
		sums[c.sum] = true
	}
	for _, c := range b.table {
		if sums[c.sum] {
			t.Fatal("a chunk has the same hash in two generations")
		}
	}
	names := map[string]bool{}
	for _, k := range s.keys("") {
		base := k[bytes.LastIndexByte([]byte(k), '/'):]
		if names[base] {
			t.Fatal("two generations share a name")
		}
		names[base] = true
	}
	if _, err := d.Load(t.Context(), other, testKey, a.Info().ID); !errs.Is(err, errkind.DataLoss) {
		t.Fatalf("a manifest of another generation: %v", err)
	}
	if _, _, err := d.Save(t.Context(), other, testKey, m.source(m, a), metaAt(1, 0)); !errs.Is(err, errkind.Invalid) {
		t.Fatalf("a parent of another generation: %v", err)
	}
	// Even a store that puts the object of one disk in the place of another's opens nothing.
	s.objects[other.manifest(a.Info().ID)] = s.objects[testDisk.manifest(a.Info().ID)]
	if _, err := d.Load(t.Context(), other, testKey, a.Info().ID); !errs.Is(err, errkind.DataLoss) {
		t.Fatalf("a manifest of another generation: %v", err)
	}
	if _, err := d.Load(t.Context(), testDisk, Key{9}, a.Info().ID); !errs.Is(err, errkind.DataLoss) {
		t.Fatalf("another key: %v", err)
	}
	if err := d.Erase(t.Context(), testDisk); err != nil || len(s.keys(other.prefix())) != 3 {
		t.Fatalf("erase took of another generation: %v", err)
	}
}

func TestParentOfNewerEpochIsRefused(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, ChunkSize).fill(0, 100, 1)
	base, _ := save(t, d, m.source(nil, nil), metaAt(5, 0))
	if _, _, err := d.Save(t.Context(), testDisk, testKey, m.source(m, base), metaAt(4, time.Minute)); !errs.Is(err, errkind.StaleEpoch) {
		t.Fatal(err)
	}
}

func TestBadInputToSaveIsRefused(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, ChunkSize)
	bad := testDisk
	bad.Tenant = "../x"
	if _, _, err := d.Save(t.Context(), bad, testKey, m.source(nil, nil), metaAt(1, 0)); !errs.Is(err, errkind.Invalid) {
		t.Error(err)
	}
	for _, meta := range []Meta{{}, {Epoch: ids.Epoch{Index: 1}}, {TakenAt: day0}} {
		if _, _, err := d.Save(t.Context(), testDisk, testKey, m.source(nil, nil), meta); !errs.Is(err, errkind.Invalid) {
			t.Error(err)
		}
	}
	for _, size := range []uint64{0, MaxSize + 1} {
		if _, _, err := d.Save(t.Context(), testDisk, testKey, Source{Size: size}, metaAt(1, 0)); !errs.Is(err, errkind.Invalid) {
			t.Error(err)
		}
	}
	src := m.source(nil, nil) // an image shorter than its size is not taken for zeros
	src.Size, src.Data = 3*ChunkSize, []extents.Range{{Off: 0, Len: 1 << 63}, {Off: 1 << 63, Len: 1 << 63}}
	if _, _, err := d.Save(t.Context(), testDisk, testKey, src, metaAt(1, 0)); !errs.Is(err, errkind.Internal) {
		t.Error(err)
	}
	for _, id := range []string{"", "m", "../../etc", "m" + string(make([]byte, 32)), "n" + idOf([20]byte{})[1:]} {
		if _, err := d.Load(t.Context(), testDisk, testKey, id); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// TestChainOfChangesComesBack saves random changes after each other and reads every snapshot.
func TestChainOfChangesComesBack(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		s := newShelf()
		d := depot(s.bucket(t))
		d.packSize = rapid.IntRange(1000, 1<<20).Draw(r, "pack")
		size := rapid.IntRange(1, 8*ChunkSize).Draw(r, "size")
		m := make(image, size)
		var base image
		var ix *Index
		for n := range rapid.IntRange(1, 6).Draw(r, "snapshots") {
			for range rapid.IntRange(0, 4).Draw(r, "writes") {
				off := rapid.IntRange(0, size-1).Draw(r, "off")
				end := min(size, off+rapid.IntRange(1, 2*ChunkSize).Draw(r, "len"))
				if rapid.Bool().Draw(r, "zero") {
					clear(m[off:end])
				} else {
					m.fill(off, end-off, rapid.Uint64Range(0, 5).Draw(r, "seed"))
				}
			}
			src := m.source(base, ix)
			if rapid.Bool().Draw(r, "unknown") {
				src.Changed = nil
			}
			next, _, err := d.Save(context.Background(), testDisk, testKey, src, metaAt(1, time.Duration(n)*time.Minute))
			if err != nil {
				r.Fatal(err)
			}
			ix, base = next, bytes.Clone(m)
			local, err := DecodeIndex(ix.Encode())
			if err != nil {
				r.Fatal(err)
			}
			ix = local
			mustBe(t, d, ix, m)
		}
	})
}
