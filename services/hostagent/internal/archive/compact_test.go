package archive

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// TestYearOfSmallChanges: neither the store nor the number of objects that a restore needs grows
// without bound.
func TestYearOfSmallChanges(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	d.packSize = 256 << 10
	m := make(image, 64*ChunkSize).fill(0, 64*ChunkSize, 1)
	rng := rand.New(rand.NewPCG(1, 2))
	ix, st := save(t, d, m.source(nil, nil), metaAt(1, 0))
	once, uploaded, objects := s.size(), uint64(0), 0
	for n := range 600 {
		base := image(bytes.Clone(m))
		m.fill(rng.IntN(64*ChunkSize/page)*page, page, uint64(n+10))
		meta := metaAt(1, time.Duration(n)*time.Hour)
		meta.Keep = Keep{}
		ix, st = save(t, d, m.source(base, ix), meta)
		uploaded, objects = uploaded+st.BytesUploaded, max(objects, len(ix.packs))
		if n%20 == 0 {
			if _, err := d.Sweep(t.Context(), testDisk, ids.Epoch{Incarnation: 1, Index: 1}, ix.info.ID, func() error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
	}
	mustBe(t, d, ix, m)
	t.Logf("one snapshot %d bytes; 600 small changes uploaded %d bytes; store %d bytes; at most %d packs", once, uploaded, s.size(), objects)
	if objects > 2*manySmall+64 {
		t.Errorf("%d packs are needed for one restore", objects)
	}
	if s.size() > 3*once {
		t.Errorf("the store holds %d bytes for a disk of %d", s.size(), once)
	}
}

// TestTenSnapshotsCostLittle: ten of a little-changing disk cost at most 1.2 times one.
func TestTenSnapshotsCostLittle(t *testing.T) {
	s := newShelf()
	d := depot(s.bucket(t))
	m := make(image, 256*ChunkSize).fill(0, 200*ChunkSize, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	once := s.size()
	for n := range 9 {
		base := image(bytes.Clone(m))
		m.fill((3+n*17)*ChunkSize, page, uint64(n+10))
		m.fill(90*ChunkSize, page, uint64(n+30))
		ix, _ = save(t, d, m.source(base, ix), metaAt(1, time.Duration(n+1)*time.Minute))
	}
	if len(ix.history) != 9 || float64(s.size()) > 1.2*float64(once) {
		t.Fatalf("ten cost %d bytes, one %d", s.size(), once)
	}
	t.Logf("ten cost %.3f times one", float64(s.size())/float64(once))
}
