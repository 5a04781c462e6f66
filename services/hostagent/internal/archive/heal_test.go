package archive

import (
	"errors"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// TestADamagedStoreIsMadeWholeFromTheImage: the image has what a damaged pack held, so a snapshot that
// stores everything again is whole, though nothing of the disk has changed.
func TestADamagedStoreIsMadeWholeFromTheImage(t *testing.T) {
	shelf := newShelf()
	d := depot(shelf.bucket(t))
	m := make(image, 4<<20).fill(0, 1<<20, 1)
	first, _ := save(t, d, m.source(nil, nil), metaAt(5, 0))
	m2 := append(image{}, m...).fill(2<<20, 1<<20, 2)
	second, _ := save(t, d, m2.source(m, first), metaAt(5, time.Minute))
	key := testDisk.pack(first.packs[0].name)
	shelf.objects[key][100] ^= 1
	v, err := d.Verify(t.Context(), testDisk, second.Info().ID, "", 0)
	if err != nil || len(v.Damaged) != 1 {
		t.Fatalf("the verification: %+v, %v", v, err)
	}
	src := m2.source(m2, second)
	src.Anew = true
	healed, stats := save(t, d, src, metaAt(5, 2*time.Minute))
	if healed.Info().ID == second.Info().ID || healed.Info().Parent != second.Info().ID || stats.Reused != 0 {
		t.Errorf("%d chunks of manifest %s are the damaged parent's %s", stats.Reused, healed.Info().ID, second.Info().ID)
	}
	mustBe(t, depot(shelf.bucket(t)), healed, m2)
}

// TestAManifestThatTheStoreMadeLongIsNotRead: a host reads no more than the header allows, which the
// head vouches for.
func TestAManifestThatTheStoreMadeLongIsNotRead(t *testing.T) {
	shelf := newShelf()
	d := depot(shelf.bucket(t))
	m := make(image, 1<<20).fill(0, 1<<20, 1)
	ix, _ := save(t, d, m.source(nil, nil), metaAt(5, 0))
	key := testDisk.manifest(ix.Info().ID)
	shelf.objects[key] = append(shelf.objects[key], make([]byte, maxHeader+64<<20)...)
	_, err := depot(shelf.bucket(t)).Load(t.Context(), testDisk, testKey, ix.Info().ID)
	if !errors.Is(err, errLong) || !errs.Is(err, errkind.DataLoss) {
		t.Errorf("load: %v", err)
	}
}
