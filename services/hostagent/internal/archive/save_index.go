package archive

import (
	"context"
	"encoding/binary"
	"slices"

	"github.com/berth-dev/berth/internal/errs"
)

func start(sum *[32]byte) uint64 { return binary.LittleEndian.Uint64(sum[:]) }

// resolve gives chunks with the content of another one that one's place, and drops holes.
func (s *saver) resolve() []chunk {
	out := make([]chunk, 0, len(s.table))
	for i, c := range s.table {
		if at := s.same[i]; at >= 0 {
			first := s.table[at]
			c.pack, c.off, c.size = first.pack, first.off, first.size
		}
		if c.size > 0 {
			out = append(out, c)
		}
	}
	return out
}

// unchanged reports whether the disk is what the parent says, chunk by chunk.
func (s *saver) unchanged() bool {
	b := s.src.Base
	if b == nil || s.meta.VMWritten && !b.info.VMWritten || b.info.Size != s.src.Size || b.info.Image != s.meta.Image || len(s.fresh) > 0 {
		return false
	}
	return slices.Equal(s.resolve(), b.table)
}

// index puts the new manifest together.
func (s *saver) index() *Index {
	ix := &Index{table: s.resolve()}
	ix.disk = s.disk
	ix.info.VMWritten = s.meta.VMWritten
	ix.after(s.src.Base, s.meta)
	ix.info.Size, ix.info.Image, ix.info.CrashConsistent = s.src.Size, s.meta.Image, s.meta.CrashConsistent
	ix.info.Added = s.packer.uploaded
	ix.chunks = len(ix.table)
	var all []pack
	if s.src.Base != nil {
		all = s.src.Base.packs
	}
	all = slices.Concat(all, s.packer.packs)
	moved := make([]int, len(all)) // number in the new header, plus one
	for i := range ix.table {
		c := &ix.table[i]
		if moved[c.pack] == 0 {
			ix.packs = append(ix.packs, all[c.pack])
			moved[c.pack] = len(ix.packs)
		}
		c.pack = uint32(moved[c.pack] - 1)
		ix.info.Allocated += uint64(ix.length(c.pos))
	}
	return ix
}

// reused counts the chunks that the parent had already.
func (s *saver) reused() (n int) {
	for _, c := range s.resolve() {
		if int(c.pack) < s.packer.first {
			n++
		}
	}
	return n
}

// putManifest seals an index, gives it its id and writes its object.
func (d *Depot) putManifest(ctx context.Context, k *keys, ix *Index, step string) error {
	b := sealManifest(k, ix)
	ix.stored = uint64(len(b))
	if err := d.fault(step + ".manifest"); err != nil {
		return err
	}
	if err := d.put(ctx, ix.disk.manifest(ix.info.ID), b); err != nil {
		return err
	}
	d.headers.add(&ix.header)
	return errs.Wrap(step, ix.info.ID, d.fault(step+".done"))
}
