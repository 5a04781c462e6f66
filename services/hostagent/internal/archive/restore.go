package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	// span is the longest part of a pack that one request reads, and gap the longest stretch of
	// what is not needed that it reads along: for less, a request of its own costs more.
	span = 4 << 20
	gap  = 256 << 10
	// fetchers read at once; more than there are cores, for a store may be far away. Their memory is
	// fetchers times span.
	fetchers = 8
)

// part is a stretch of a pack and the chunks in it, in the order of their place in the pack.
type part struct {
	pack     uint32
	off, end uint32
	chunks   []chunk
}

// parts cuts what the table needs into requests.
func parts(table []chunk) []part {
	sorted := slices.Clone(table)
	slices.SortFunc(sorted, func(a, b chunk) int {
		return cmp.Or(cmp.Compare(a.pack, b.pack), cmp.Compare(a.off, b.off), cmp.Compare(a.pos, b.pos))
	})
	var out []part
	for i, c := range sorted {
		end := c.off + c.size
		if n := len(out) - 1; n >= 0 && out[n].pack == c.pack && c.off <= out[n].end+gap && end <= out[n].off+span {
			p := &out[n]
			p.end = max(p.end, end)
			p.chunks = sorted[i-len(p.chunks) : i+1]
			continue
		}
		out = append(out, part{pack: c.pack, off: c.off, end: end, chunks: sorted[i : i+1]})
	}
	return out
}

// Restore makes dst the disk that ix describes: of its size, holes kept, every chunk verified. It
// calls progress, which may be nil, with bytes written and bytes to write, ascending, one call at a
// time. The caller fsyncs. After an error dst is empty. Kinds: DataLoss (an object is missing or
// damaged; the error names it), Unavailable (try again), NoCapacity (no room for dst).
func (d *Depot) Restore(ctx context.Context, key Key, ix *Index, dst *os.File, progress func(done, total uint64)) error {
	const op = "restore disk"
	err := d.restore(ctx, key, ix, dst, progress)
	if err == nil {
		return nil
	}
	if terr := dst.Truncate(0); terr != nil {
		err = errors.Join(err, terr)
	}
	return errs.E(op, kindOf(err), ix.disk.String(), err)
}

func (d *Depot) restore(ctx context.Context, key Key, ix *Index, dst *os.File, progress func(done, total uint64)) error {
	if err := d.fault("restore.begin"); err != nil {
		return err
	}
	k, err := deriveKeys(ix.disk, key)
	if err != nil {
		return err
	}
	if err := dst.Truncate(0); err != nil {
		return errs.E("empty the disk image", localKind(err), dst.Name(), err)
	}
	if err := dst.Truncate(int64(ix.info.Size)); err != nil {
		return errs.E("size the disk image", localKind(err), dst.Name(), err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	r := &restorer{d: d, ctx: ctx, keys: k, ix: ix, dst: dst, progress: progress}
	todo := parts(ix.table)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(fetchers, len(todo)) {
		wg.Go(func() {
			bufs := &scratch{}
			for ctx.Err() == nil {
				n := int(next.Add(1)) - 1
				if n >= len(todo) {
					return
				}
				if err := r.bring(todo[n], bufs); err != nil {
					stop(err)
				}
			}
		})
	}
	wg.Wait()
	if err := ended(ctx); err != nil {
		return err
	}
	return d.fault("restore.done")
}

type restorer struct {
	d        *Depot
	ctx      context.Context
	keys     *keys
	ix       *Index
	dst      *os.File
	progress func(done, total uint64)

	mu   sync.Mutex
	done uint64
}

type scratch struct {
	in  []byte
	out [ChunkSize]byte
}

// bring fetches one part and writes its chunks.
func (r *restorer) bring(p part, s *scratch) error {
	if err := r.d.fault("restore.fetch"); err != nil {
		return err
	}
	key := r.ix.disk.pack(r.ix.packs[p.pack].name)
	if n := int(p.end - p.off); cap(s.in) < n {
		s.in = make([]byte, n, max(n, min(span, packSize)))
	}
	in := s.in[:p.end-p.off]
	if err := r.d.get(r.ctx, key, int64(p.off), in); err != nil {
		return notHandedOut("read chunks", r.ix.info.ID, "pack "+key, err)
	}
	if err := r.d.fault("restore.write"); err != nil {
		return err
	}
	var raw []byte
	written := uint64(0)
	for i, c := range p.chunks {
		if i == 0 || c.off != p.chunks[i-1].off || c.sum != p.chunks[i-1].sum {
			var err error
			sealed := in[c.off-p.off : c.off-p.off+c.size]
			if raw, err = r.d.openChunk(r.keys, sealed, s.out[:], r.ix.length(c.pos), &c.sum); err != nil {
				err = errs.E("", errkind.DataLoss, "", fmt.Errorf("the chunk at byte %d: %w", uint64(c.pos)*ChunkSize, err))
				return notHandedOut("read chunks", r.ix.info.ID, "pack "+key, err)
			}
		}
		if len(raw) != r.ix.length(c.pos) {
			return errs.E("read chunks", errkind.DataLoss, r.ix.info.ID, "a chunk stands where its length does not fit")
		}
		if _, err := r.dst.WriteAt(raw, int64(c.pos)*ChunkSize); err != nil {
			return errs.E("write the disk image", localKind(err), r.dst.Name(), err)
		}
		written += uint64(len(raw))
	}
	r.report(written)
	return nil
}

func (r *restorer) report(n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done += n
	if r.progress != nil {
		r.progress(r.done, r.ix.info.Allocated)
	}
}

// localKind is the kind of a failure of this host's own file system.
func localKind(err error) errkind.Kind {
	if full(err) {
		return errkind.NoCapacity
	}
	return errkind.Internal
}
