package vault

import (
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
)

func TestRecordsAreBoundToTheirPlaceAndKey(t *testing.T) {
	e := bustest.Start(t)
	conn := bustest.Connect(t, e, subjects.Service("credentials"))
	path := filepath.Join(t.TempDir(), "k.json")
	keys, err := keyfile.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx := bustest.Context(t)
	v, err := Open(ctx, conn, "BERTH_CREDENTIALS", keys)
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Create(ctx, "a", []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if err := v.Create(ctx, "a", []byte("other")); !errs.Is(err, errkind.Exists) {
		t.Errorf("created twice: %v", err)
	}
	raw, _, err := v.bucket.Get(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.bucket.Put(ctx, "b", raw); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Get(ctx, "b"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a record that was moved: %v", err)
	}
	raw[len(raw)-1] ^= 1
	if _, err := v.bucket.Put(ctx, "a", raw); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Get(ctx, "a"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a record that was changed: %v", err)
	}
	if err := v.Put(ctx, "c", []byte("old")); err != nil {
		t.Fatal(err)
	}
	if keys, err = keyfile.Rotate(path, 2); err != nil {
		t.Fatal(err)
	}
	if v, err = Open(ctx, conn, "BERTH_CREDENTIALS", keys); err != nil {
		t.Fatal(err)
	}
	if got, err := v.Get(ctx, "c"); err != nil || string(got) != "old" {
		t.Errorf("after a rotation of the platform key: %q, %v", got, err)
	}
	if err := v.Destroy(ctx, "c"); err != nil {
		t.Fatal(err)
	}
	if err := v.Destroy(ctx, "c"); err != nil {
		t.Errorf("destroyed twice: %v", err)
	}
	if _, err := v.Get(ctx, "c"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a destroyed record: %v", err)
	}
	if err := v.Compact(ctx); err != nil {
		t.Error(err)
	}
}
