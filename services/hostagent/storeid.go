package hostagent

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/berth-dev/berth/internal/blobstore"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// storeMark is an object of every store of disks; its content tells one store from another.
const storeMark = "v1/.store"

// sameStore refuses another store than the one that this host saved to before: a folder that is not
// mounted, an emptied bucket or a mistyped name would take disks whose manifests nobody finds again.
// A store that cannot be reached now is looked at when this host starts next.
func (h *host) sameStore(ctx context.Context) error {
	const op = "open the store of disks"
	path, name := filepath.Join(h.cfg.Dir, "store.id"), blobstore.Describe(h.cfg.Disk.Store)
	known, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.E(op, errkind.Internal, "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, storeProbe)
	defer cancel()
	got, err := h.bucket.ReadAll(ctx, storeMark)
	if gcerrors.Code(err) == gcerrors.NotFound && len(known) == 0 {
		err = h.bucket.WriteAll(ctx, storeMark, []byte(rand.Text()+"\n"), &blob.WriterOptions{IfNotExist: true})
		if err == nil || gcerrors.Code(err) == gcerrors.FailedPrecondition || errs.Is(err, errkind.Exists) { // another host was first
			got, err = h.bucket.ReadAll(ctx, storeMark)
		}
	}
	switch {
	case gcerrors.Code(err) == gcerrors.NotFound, err == nil && len(known) > 0 && string(known) != string(got):
		return errs.Errorf(op, errkind.Conflict, "%s is not the store that this host saved disks to before: is it mounted, and is its name right? "+
			"If another store is meant, remove %s", name, path)
	case err != nil:
		h.log.Warn("the store of disks cannot be reached now", "store", name, "error", err)
		return nil
	case strings.TrimSpace(string(got)) == "":
		return errs.Errorf(op, errkind.DataLoss, "the object %s of the store %s is empty", storeMark, name)
	case len(known) > 0:
		return nil
	}
	if err := os.WriteFile(path, got, 0o600); err != nil {
		return errs.E(op, errkind.Internal, "", err)
	}
	return nil
}
