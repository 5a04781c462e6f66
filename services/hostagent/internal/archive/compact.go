package archive

import (
	"cmp"
	"slices"
)

// A pack is worth writing anew when little of it is still needed, or when there are many small ones.
// What is copied is paid for: a sparse pack has at least three dead bytes for each live one, so all
// copies together cost at most a third of what changes have cost before; small packs are copied
// once in manySmall snapshots.
const (
	sparse     = 4        // less than one part in sparse is live
	smallPack  = 1 << 20  // bytes
	manySmall  = 64       // packs
	compactOut = 16 << 20 // sealed bytes a save copies at most
	compactIn  = 64 << 20 // bytes of the image that it reads for that at most
)

// compact chooses chunks of the parent that move into this save's packs. They have not changed, so
// they are read from the image. It returns their places in the table.
func (s *saver) compact() []int {
	moving := s.movingPacks()
	if len(moving) == 0 {
		return nil
	}
	places := make(map[uint32][]int, len(moving))
	for _, p := range moving {
		places[p] = []int{}
	}
	for i, c := range s.table {
		if s.same[i] >= 0 || c.size == 0 || int(c.pack) >= s.packer.first {
			continue
		}
		if list, ok := places[c.pack]; ok {
			places[c.pack] = append(list, i)
		}
	}
	var out []int
	room, reads := compactOut, compactIn
	for _, p := range moving {
		cost, raw := 0, 0
		for _, i := range places[p] {
			cost, raw = cost+int(s.table[i].size), raw+ChunkSize
		}
		if cost > room || raw > reads {
			continue // a smaller one may fit
		}
		room, reads = room-cost, reads-raw
		out = append(out, places[p]...)
	}
	slices.Sort(out)
	return out
}

// movingPacks lists the parent's packs that are worth it, least live bytes first.
func (s *saver) movingPacks() []uint32 {
	live := make([]uint64, s.packer.first) // a chunk in several places counts several times: cheap, and on the safe side
	for i, c := range s.table {
		if s.same[i] < 0 && int(c.pack) < s.packer.first {
			live[c.pack] += uint64(c.size)
		}
	}
	var small, out []uint32
	for i, p := range s.basePacks() {
		switch {
		case live[i] == 0:
		case live[i]*sparse < uint64(p.size):
			out = append(out, uint32(i))
		case p.size < smallPack:
			small = append(small, uint32(i))
		}
	}
	if len(small) > manySmall {
		out = append(out, small...)
	}
	slices.SortFunc(out, func(a, b uint32) int { return cmp.Compare(live[a], live[b]) })
	return out
}

func (s *saver) basePacks() []pack {
	if s.src.Base == nil {
		return nil
	}
	return s.src.Base.packs
}
