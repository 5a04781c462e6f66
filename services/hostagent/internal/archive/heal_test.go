package archive

import (
	"testing"
	"time"
)

// TestWhatAVerificationFoundDamagedIsStoredAgain: the image has what a damaged pack held, so the next
// snapshot is whole again though nothing of the disk has changed; only what was damaged is read.
func TestWhatAVerificationFoundDamagedIsStoredAgain(t *testing.T) {
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
	healed, stats := save(t, d, m2.source(m2, second), metaAt(5, 2*time.Minute))
	if healed.Info().ID == second.Info().ID || stats.BytesRead != 1<<20 {
		t.Errorf("read %d bytes for manifest %s after %s", stats.BytesRead, healed.Info().ID, second.Info().ID)
	}
	mustBe(t, depot(shelf.bucket(t)), healed, m2)
}
