package archive

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

const (
	// What a virtual machine has to do with is of formatVM, which a version that knows nothing of that
	// refuses; all else is written as before.
	formatPlain = 1
	formatVM    = 2

	maxPacks  = 1 << 20
	maxHeader = 32 << 20
)

type pack struct {
	name packName
	size uint32
}

// Flags of a snapshot. formatPlain has the first alone.
const (
	flagCrash = 1 << iota
	flagVM
)

// header is the plain part of a manifest: enough to list, sweep and verify without a key.
type header struct {
	disk    Disk
	info    Info      // ID is not part of it
	clock   time.Time // see thin
	chunks  int
	packs   []pack
	history []Info // newest first
}

// version is the format that the header needs.
func (h *header) version() byte {
	if h.info.VMWritten || slices.ContainsFunc(h.history, func(i Info) bool { return i.VMWritten }) {
		return formatVM
	}
	return formatPlain
}

func (h *header) encode() []byte {
	w := &writer{b: make([]byte, 0, 256+28*len(h.packs)+96*len(h.history))}
	w.str(string(h.disk.Tenant))
	w.str(string(h.disk.Session))
	w.pair(ids.Epoch(h.disk.Generation))
	w.info(h.info, "")
	w.time(h.clock)
	w.uint(ChunkSize)
	w.uint(uint64(h.chunks))
	w.uint(uint64(len(h.packs)))
	for _, p := range h.packs {
		w.pair(p.name.epoch)
		w.b = append(w.b, p.name.sum[:]...)
		w.uint(uint64(p.size))
	}
	w.uint(uint64(len(h.history)))
	image := h.info.Image
	for _, past := range h.history {
		w.id(past.ID)
		w.info(past, image)
		image = past.Image
	}
	return w.b
}

// info writes all of a snapshot but its id; an image digest only where it is not the one before.
func (w *writer) info(i Info, image string) {
	w.id(i.Parent)
	w.pair(i.Epoch)
	w.time(i.TakenAt)
	w.uint(i.Size)
	w.uint(i.Allocated)
	w.uint(i.Added)
	flags := uint64(0)
	if i.CrashConsistent {
		flags |= flagCrash
	}
	if i.VMWritten {
		flags |= flagVM
	}
	w.uint(flags)
	w.id(i.RestoredFrom)
	w.flag(i.Image != image)
	if i.Image != image {
		w.str(i.Image)
	}
}

func (r *reader) info(image string, version byte) Info {
	i := Info{Parent: r.id(), Epoch: r.pair(), TakenAt: r.time(), Size: r.uint(MaxSize), Allocated: r.uint(MaxSize),
		Added: r.uint(math.MaxUint64)}
	most := uint64(flagCrash)
	if version >= formatVM {
		most |= flagVM
	}
	flags := r.uint(most)
	i.CrashConsistent, i.VMWritten = flags&flagCrash != 0, flags&flagVM != 0
	i.RestoredFrom, i.Image = r.id(), image
	if r.flag() {
		i.Image = r.str(maxImage)
		if i.Image == image {
			r.fail()
		}
	}
	return i
}

// decodeHeader reads a header of a format. It never returns one that breaks a bound.
func decodeHeader(b []byte, version byte) (*header, error) {
	if len(b) > maxHeader {
		return nil, errors.New("its header is too long")
	}
	r := &reader{b: b}
	h := &header{}
	h.disk = Disk{Tenant: ids.Tenant(r.str(ids.MaxToken)), Session: ids.SessionKey(r.str(ids.MaxToken)), Generation: ids.Generation(r.pair())}
	h.info = r.info("", version)
	h.clock = r.time()
	if size := r.uint(ChunkSize); r.err == nil && size != ChunkSize {
		return nil, fmt.Errorf("its chunks are of %d bytes, this version knows %d", size, ChunkSize)
	}
	h.chunks = int(r.uint(chunksOf(h.info.Size)))
	h.packs = r.packs()
	n := r.uint(maxHistory)
	image := h.info.Image
	for range n {
		if r.err != nil {
			break
		}
		id := r.id()
		past := r.info(image, version)
		past.ID, image = id, past.Image
		if id == "" {
			r.fail()
		}
		h.history = append(h.history, past)
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	if h.version() != version {
		return nil, errors.New("it is of another format than it says")
	}
	return h, h.disk.check()
}

func (r *reader) packs() []pack {
	n := int(r.uint(maxPacks))
	if n > len(r.b)/23 { // the least that one takes
		r.fail()
		return nil
	}
	out := make([]pack, 0, n)
	for range n {
		out = append(out, pack{packName{r.pair(), r.sum()}, uint32(r.uint(maxPack))})
	}
	return out
}

func chunksOf(size uint64) uint64 { return (size + ChunkSize - 1) / ChunkSize }

// check refuses a disk whose names could not stand in an object's name.
func (d Disk) check() error {
	if _, err := ids.ParseTenant(string(d.Tenant)); err != nil {
		return err
	}
	if _, err := ids.ParseSessionKey(string(d.Session)); err != nil {
		return err
	}
	if d.Generation.IsZero() {
		return fmt.Errorf("%w: a disk needs a generation", ids.ErrInvalid)
	}
	return nil
}
