package hostagent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// TestAnotherStoreIsRefusedAtStart: what is saved to a folder that is not mounted is found by nobody.
func TestAnotherStoreIsRefusedAtStart(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "store")
	open := func() error {
		t.Helper()
		h := &host{cfg: NewConfig(), log: testLog()}
		h.cfg.Dir, h.cfg.Disk.Store = dir, "file://"+folder
		var err error
		if h.bucket, err = blobstore.Open(t.Context(), h.cfg.Disk.Store, nil); err != nil {
			t.Fatal(err)
		}
		defer h.bucket.Close()
		return h.sameStore(t.Context())
	}
	for range 2 {
		must(t, open())
	}
	must(t, os.Rename(folder, folder+".away"))
	if err := open(); !errs.Is(err, errkind.Conflict) { // an empty folder is made there
		t.Errorf("an empty store: %v", err)
	}
	must(t, os.RemoveAll(folder))
	must(t, os.Remove(filepath.Join(dir, "store.id")))
	must(t, open()) // another store, on purpose
	must(t, os.RemoveAll(folder))
	must(t, os.Rename(folder+".away", folder))
	if err := open(); !errs.Is(err, errkind.Conflict) {
		t.Errorf("another store: %v", err)
	}
}
