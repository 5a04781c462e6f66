package archive

import (
	"context"
	"os"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

type headerCache struct{}

type Index struct{ info Info }

var errStub = errs.E("archive", errkind.Unimplemented, "", "not written yet")

func (ix *Index) Info() Info               { return ix.info }
func (ix *Index) History() []Info          { return nil }
func (ix *Index) Encode() []byte           { return nil }
func DecodeIndex(b []byte) (*Index, error) { return nil, errStub }
func (d *Depot) Save(ctx context.Context, disk Disk, key Key, src Source, meta Meta) (*Index, Stats, error) {
	return nil, Stats{}, errStub
}
func (d *Depot) Load(ctx context.Context, disk Disk, key Key, id string) (*Index, error) {
	return nil, errStub
}
func (d *Depot) Snapshots(ctx context.Context, disk Disk, head string) ([]Info, error) {
	return nil, errStub
}
func (d *Depot) Restore(ctx context.Context, key Key, ix *Index, dst *os.File, progress func(done, total uint64)) error {
	return errStub
}
func (d *Depot) Rewind(ctx context.Context, disk Disk, key Key, head *Index, snapshot string, meta Meta) (*Index, error) {
	return nil, errStub
}

// Swept says what a sweep deleted.
type Swept struct {
	Manifests, Packs int
	Bytes            uint64
}

func (d *Depot) Sweep(ctx context.Context, disk Disk, epoch ids.Epoch, head string, alive func() error, inFlight ...string) (Swept, error) {
	return Swept{}, errStub
}

// Damage is an object that is missing or is not what its name says.
type Damage struct {
	Object, Reason string
	Snapshots      []string // that need it, newest first
}

// Verified is the outcome of one part of a verification.
type Verified struct {
	Objects int
	Bytes   uint64
	Damaged []Damage
	Next    string // pass as after to go on; empty when all was looked at
}

func (d *Depot) Verify(ctx context.Context, disk Disk, head, after string, budget uint64) (Verified, error) {
	return Verified{}, errStub
}
func (d *Depot) Erase(ctx context.Context, disk Disk) error { return errStub }
