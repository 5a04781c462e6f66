package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"lukechampine.com/blake3"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// chunk is where the content of one aligned part of the disk is. A part without one is a hole.
type chunk struct {
	pos  uint32 // in chunks
	pack uint32 // in the header's packs
	off  uint32 // in the pack
	size uint32 // sealed
	sum  [32]byte
}

// Index is what a manifest says: immutable, and safe to share.
type Index struct {
	header
	table  []chunk // by position
	stored uint64  // bytes of its object, known to who wrote it
}

// Info describes the snapshot.
func (ix *Index) Info() Info { return ix.info }

// Disk is the disk that it is a snapshot of.
func (ix *Index) Disk() Disk { return ix.disk }

// History lists the earlier snapshots that are kept, newest first.
func (ix *Index) History() []Info { return slices.Clone(ix.history) }

// Length is how many bytes of the disk a chunk holds.
func (ix *Index) length(pos uint32) int { return lengthAt(ix.info.Size, pos) }

func lengthAt(size uint64, pos uint32) int {
	off := uint64(pos) * ChunkSize
	if off >= size {
		return 0
	}
	return int(min(ChunkSize, size-off))
}

// encodeTable writes the chunk table in columns.
func encodeTable(packs int, table []chunk) []byte {
	w := &writer{b: make([]byte, 0, 40*len(table)+16)}
	next := int64(-1)
	for _, c := range table {
		w.uint(uint64(int64(c.pos) - next - 1))
		next = int64(c.pos)
	}
	last := int64(0)
	for _, c := range table {
		w.int(int64(c.pack) - last)
		last = int64(c.pack)
	}
	ends := make([]int64, packs)
	for _, c := range table {
		w.int(int64(c.off) - ends[c.pack])
		ends[c.pack] = int64(c.off) + int64(c.size)
	}
	for _, c := range table {
		w.uint(uint64(c.size))
	}
	for i := range table {
		w.b = append(w.b, table[i].sum[:]...)
	}
	return w.b
}

// decodeTable never returns a chunk outside the disk or outside its pack.
func decodeTable(h *header, b []byte) ([]chunk, error) {
	if len(b) < 36*h.chunks {
		return nil, errShort
	}
	r := &reader{b: b}
	table := make([]chunk, h.chunks)
	total := chunksOf(h.info.Size)
	next := uint64(0)
	for i := range table {
		pos := next + r.uint(total)
		if pos >= total {
			return nil, errShort
		}
		table[i].pos, next = uint32(pos), pos+1
	}
	last := int64(0)
	for i := range table {
		if last += r.int(); last < 0 || last >= int64(len(h.packs)) {
			return nil, errShort
		}
		table[i].pack = uint32(last)
	}
	if err := r.extents(h, table); err != nil {
		return nil, err
	}
	for i := range table {
		copy(table[i].sum[:], r.take(32))
	}
	return table, r.end()
}

// extents reads the columns of offsets and sizes.
func (r *reader) extents(h *header, table []chunk) error {
	moves := make([]int64, len(table))
	for i := range moves {
		moves[i] = r.int()
	}
	ends := make([]int64, len(h.packs))
	for i := range table {
		c := &table[i]
		size := int64(r.uint(maxChunk))
		off := ends[c.pack] + moves[i]
		if off < 0 || size < overhead || off > int64(h.packs[c.pack].size)-size {
			return errShort
		}
		c.off, c.size, ends[c.pack] = uint32(off), uint32(size), off+size
	}
	return r.err
}

var localMagic = []byte("berthix")

// Encode writes the index in the form in which a host keeps it: with a checksum, and not sealed.
func (ix *Index) Encode() []byte {
	sum, _ := idSum(ix.info.ID) // an index has an id
	head := ix.header.encode()
	table := tableEnc.EncodeAll(encodeTable(len(ix.packs), ix.table), nil)
	b := slices.Concat(localMagic, []byte{ix.version()}, sum[:], binary.BigEndian.AppendUint32(nil, uint32(len(head))), head, table)
	check := blake3.Sum256(b)
	return append(b, check[:]...)
}

// DecodeIndex reads what Encode wrote. Kind: DataLoss when a byte of it is not as it was written.
func DecodeIndex(b []byte) (*Index, error) {
	ix, err := decodeLocal(b)
	if err != nil {
		return nil, errs.E("read a disk's index", errkind.DataLoss, "", err)
	}
	return ix, nil
}

func decodeLocal(b []byte) (*Index, error) {
	const front = 8 + 20 + 4
	version, ok := formatOf(b, localMagic)
	if len(b) < front+32 || !ok {
		return nil, errors.New("it is no index of this version")
	}
	body := b[:len(b)-32]
	if blake3.Sum256(body) != [32]byte(b[len(body):]) {
		return nil, errors.New("its checksum is wrong")
	}
	n := uint64(binary.BigEndian.Uint32(body[28:]))
	if n > uint64(len(body)-front) {
		return nil, errShort
	}
	h, err := decodeHeader(body[front:front+n], version)
	if err != nil {
		return nil, err
	}
	h.info.ID = idOf([20]byte(body[8:28]))
	return withTable(h, body[front+n:])
}

// withTable unpacks a compressed chunk table and checks it against the header.
func withTable(h *header, packed []byte) (*Index, error) {
	raw, err := tableDec.DecodeAll(packed, nil)
	if err != nil {
		return nil, fmt.Errorf("unpack its table: %w", err)
	}
	table, err := decodeTable(h, raw)
	if err != nil {
		return nil, err
	}
	return &Index{header: *h, table: table}, nil
}
