package archive

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/extents"
)

// Save writes a snapshot. It reads only the chunks that may have changed, stores only those that
// the parent does not have, and writes the manifest last. A disk that is as its parent says gives
// src.Base itself and writes nothing. What an earlier try left in the store is of no harm: a sweep
// takes it. Kinds: Invalid, StaleEpoch (the parent is of a newer epoch), Unavailable (the store
// cannot be reached, is slow or read-only), NoCapacity (it is full), Internal (reading the image).
func (d *Depot) Save(ctx context.Context, disk Disk, key Key, src Source, meta Meta) (*Index, Stats, error) {
	const op = "save disk"
	s, err := d.newSaver(ctx, disk, key, src, meta)
	if err != nil {
		return nil, Stats{}, err
	}
	defer s.stop(nil)
	ix, err := s.run()
	// A failed save's uploads end before it returns: the caller may close the image or sweep.
	s.packer.wg.Wait()
	if err != nil {
		return nil, Stats{}, errs.Wrap(op, disk.String(), err)
	}
	stats := Stats{BytesRead: s.read.Load(), BytesUploaded: s.packer.uploaded, Objects: s.packer.objects,
		Chunks: len(ix.table), Reused: s.reused()}
	return ix, stats, nil
}

// saver is one save under way.
type saver struct {
	d      *Depot
	ctx    context.Context
	stop   context.CancelCauseFunc
	keys   *keys
	src    Source
	meta   Meta
	disk   Disk
	packer *packer
	read   atomic.Uint64
	base   []chunk // the parent's table

	table []chunk // of every chunk that may be there; size 0: it is a hole after all
	todo  []int   // places in table that are to be read
	same  []int   // place in table of the chunk with the same content, or -1

	once   sync.Once
	parent map[uint64]uint32 // start of a hash to a place in base
	mu     sync.Mutex
	fresh  map[[32]byte]int // new content to its first place in table
}

func (d *Depot) newSaver(ctx context.Context, disk Disk, key Key, src Source, meta Meta) (*saver, error) {
	const op = "save disk"
	if err := checkSave(disk, src.Base, meta); err != nil {
		return nil, errs.Wrap(op, disk.String(), err)
	}
	if src.Size == 0 || src.Size > MaxSize {
		return nil, errs.E(op, errkind.Invalid, disk.String(), fmt.Sprintf("a disk of %d bytes cannot be saved; at most %d", src.Size, uint64(MaxSize)))
	}
	k, err := deriveKeys(disk, key)
	if err != nil {
		return nil, errs.E(op, errkind.Internal, disk.String(), err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	s := &saver{d: d, ctx: ctx, stop: stop, keys: k, src: src, meta: meta, disk: disk, fresh: map[[32]byte]int{}}
	first := 0
	if src.Base != nil {
		s.base, first = src.Base.table, len(src.Base.packs)
	}
	s.packer = d.newPacker(ctx, stop, disk, meta.Epoch, first)
	return s, nil
}

// checkSave refuses what would make a manifest that breaks a rule of the history.
func checkSave(disk Disk, parent *Index, meta Meta) error {
	if err := disk.check(); err != nil {
		return err
	}
	switch {
	case meta.Epoch.IsZero() || meta.TakenAt.IsZero() || len(meta.Image) > maxImage:
		return errs.E("", errkind.Invalid, "", "a snapshot needs an epoch, a time and an image digest of at most 512 characters")
	case parent == nil:
		return nil
	case parent.disk != disk:
		return errs.E("", errkind.Invalid, "", "the parent is a snapshot of disk "+parent.disk.String())
	case parent.info.Epoch.Compare(meta.Epoch) > 0:
		return errs.E("", errkind.StaleEpoch, "", fmt.Sprintf("the parent is of epoch %s, newer than %s", parent.info.Epoch, meta.Epoch))
	}
	return nil
}

func (s *saver) run() (*Index, error) {
	s.plan()
	if err := s.each(s.todo); err != nil {
		return nil, err
	}
	if s.unchanged() {
		return s.src.Base, nil
	}
	if err := s.each(s.compact()); err != nil {
		return nil, err
	}
	if err := s.packer.finish(); err != nil {
		return nil, err
	}
	ix := s.index()
	if err := s.d.putManifest(s.ctx, s.keys, ix, "save"); err != nil {
		return nil, err
	}
	s.packer.objects++
	s.packer.uploaded += ix.stored
	return ix, nil
}

// plan lists the chunks of Data, takes those that cannot have changed from the parent, and leaves
// the others to be read.
func (s *saver) plan() {
	known := s.src.Base != nil && s.src.Changed != nil && !s.src.Anew
	changed := cursor{ranges: s.src.Changed}
	old := 0
	for pos := range chunksIn(s.src.Data, s.src.Size) {
		for old < len(s.base) && s.base[old].pos < pos {
			old++
		}
		here := old < len(s.base) && s.base[old].pos == pos
		off, length := uint64(pos)*ChunkSize, lengthAt(s.src.Size, pos)
		if known && !changed.touches(off, off+ChunkSize) && length == lengthAt(s.src.Base.info.Size, pos) {
			if here {
				s.table = append(s.table, s.base[old])
			}
			continue
		}
		s.todo = append(s.todo, len(s.table))
		s.table = append(s.table, chunk{pos: pos})
	}
	s.same = slices.Repeat([]int{-1}, len(s.table))
}

// chunksIn yields the numbers of the chunks that ranges touch, ascending, each once.
func chunksIn(ranges []extents.Range, size uint64) func(func(uint32) bool) {
	return func(yield func(uint32) bool) {
		next := uint64(0)
		for _, r := range ranges {
			end := min(r.Off+r.Len, size)
			if r.Off+r.Len < r.Off {
				end = size
			}
			if r.Len == 0 || r.Off >= end {
				continue
			}
			for pos := max(next, r.Off/ChunkSize); pos <= (end-1)/ChunkSize; pos++ {
				if !yield(uint32(pos)) {
					return
				}
				next = pos + 1
			}
		}
	}
}

// cursor walks sorted ranges beside ascending questions.
type cursor struct {
	ranges []extents.Range
	at     int
}

func (c *cursor) touches(from, to uint64) bool {
	for c.at < len(c.ranges) && c.ranges[c.at].Off+c.ranges[c.at].Len <= from {
		c.at++
	}
	return c.at < len(c.ranges) && c.ranges[c.at].Off < to && c.ranges[c.at].Len > 0
}

// each reads and stores the chunks at places of the table, side by side.
func (s *saver) each(places []int) error {
	if err := s.d.fault("save.read"); err != nil {
		return err
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(s.d.opt.Workers, len(places)) {
		wg.Go(func() {
			raw, sealed := make([]byte, ChunkSize), make([]byte, 0, maxChunk+ChunkSize/8)
			for s.ctx.Err() == nil {
				n := int(next.Add(1)) - 1
				if n >= len(places) {
					return
				}
				var err error
				if sealed, err = s.store(places[n], raw, sealed); err != nil {
					s.stop(err)
				}
			}
		})
	}
	wg.Wait()
	return ended(s.ctx)
}

// store reads one chunk, and seals and packs it unless its content is known.
func (s *saver) store(at int, raw, sealed []byte) ([]byte, error) {
	c := &s.table[at]
	raw = raw[:lengthAt(s.src.Size, c.pos)]
	if n, err := s.src.Image.ReadAt(raw, int64(c.pos)*ChunkSize); n < len(raw) {
		return sealed, errs.E("read the disk image", errkind.Internal, "", fmt.Errorf("at byte %d: %w", uint64(c.pos)*ChunkSize, err))
	}
	s.read.Add(uint64(len(raw)))
	if isZero(raw) {
		c.size = 0
		return sealed, nil
	}
	again := c.size > 0 // the parent has it, and it moves to a new pack
	c.sum = s.keys.sum(raw)
	if !again {
		if old, ok := s.known(c.pos, &c.sum); ok {
			c.pack, c.off, c.size = old.pack, old.off, old.size
			return sealed, nil
		}
	}
	s.mu.Lock()
	first, dup := s.fresh[c.sum]
	if dup {
		s.same[at] = first
	} else {
		s.fresh[c.sum] = at
	}
	s.mu.Unlock()
	if dup {
		return sealed, nil
	}
	sealed = s.d.sealChunk(s.keys, sealed, raw, &c.sum)
	pack, off, err := s.packer.add(sealed)
	c.pack, c.off, c.size = pack, off, uint32(len(sealed))
	return sealed, err
}

// known looks for content in the parent: at the same position, then anywhere.
func (s *saver) known(pos uint32, sum *[32]byte) (chunk, bool) {
	if s.src.Anew {
		return chunk{}, false
	}
	i, here := slices.BinarySearchFunc(s.base, pos, func(c chunk, pos uint32) int { return int(int64(c.pos) - int64(pos)) })
	if here && s.base[i].sum == *sum {
		return s.base[i], true
	}
	s.once.Do(func() {
		s.parent = make(map[uint64]uint32, len(s.base))
		for i := range s.base {
			s.parent[start(&s.base[i].sum)] = uint32(i)
		}
	})
	if i, ok := s.parent[start(sum)]; ok && s.base[i].sum == *sum {
		return s.base[i], true
	}
	return chunk{}, false
}
