package archive

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"
	"time"

	"lukechampine.com/blake3"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

func drawID(t *rapid.T, empty bool) string {
	if empty && rapid.Bool().Draw(t, "none") {
		return ""
	}
	return idOf([20]byte(rapid.SliceOfN(rapid.Byte(), 20, 20).Draw(t, "id")))
}

func drawInfo(t *rapid.T) Info {
	return Info{
		ID: drawID(t, false), Parent: drawID(t, true), RestoredFrom: drawID(t, true),
		Epoch:   ids.Epoch{Incarnation: rapid.Uint32().Draw(t, "inc"), Index: rapid.Uint64().Draw(t, "index")},
		TakenAt: time.UnixMilli(rapid.Int64().Draw(t, "at")).UTC(),
		Size:    rapid.Uint64Range(1, 30*ChunkSize).Draw(t, "size"), Allocated: rapid.Uint64Range(0, MaxSize).Draw(t, "allocated"),
		Added: rapid.Uint64().Draw(t, "added"), CrashConsistent: rapid.Bool().Draw(t, "crash"),
		Image: rapid.SampledFrom([]string{"", "sha256:a", "sha256:b"}).Draw(t, "image"), VMWritten: rapid.Bool().Draw(t, "vm"),
	}
}

func drawIndex(t *rapid.T) *Index {
	ix := &Index{}
	ix.disk, ix.info = testDisk, drawInfo(t)
	ix.clock = time.UnixMilli(rapid.Int64().Draw(t, "clock")).UTC()
	for range rapid.IntRange(1, 3).Draw(t, "packs") {
		ix.packs = append(ix.packs, pack{packName{drawInfo(t).Epoch, [20]byte{1}}, uint32(rapid.IntRange(maxChunk, maxPack).Draw(t, "bytes"))})
	}
	for pos := range chunksOf(ix.info.Size) {
		if rapid.Bool().Draw(t, "hole") {
			continue
		}
		p := rapid.IntRange(0, len(ix.packs)-1).Draw(t, "pack")
		size := rapid.IntRange(overhead, maxChunk).Draw(t, "sealed")
		off := rapid.IntRange(0, int(ix.packs[p].size)-size).Draw(t, "off")
		ix.table = append(ix.table, chunk{uint32(pos), uint32(p), uint32(off), uint32(size), [32]byte{byte(pos)}})
	}
	ix.chunks = len(ix.table)
	for range rapid.IntRange(0, 4).Draw(t, "history") {
		ix.history = append(ix.history, drawInfo(t))
	}
	return ix
}

func TestIndexRoundTrip(t *testing.T) {
	k, err := deriveKeys(testDisk, testKey)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		ix := drawIndex(t)
		back, err := DecodeIndex(ix.Encode())
		if err != nil {
			t.Fatal(err)
		}
		if len(ix.table) == 0 {
			ix.table = []chunk{}
		}
		if !reflect.DeepEqual(back, ix) {
			t.Fatalf("%+v became %+v", ix, back)
		}
		object := sealManifest(k, ix)
		back, err = openManifest(k, ix.info.ID, object)
		if err != nil || !reflect.DeepEqual(back, ix) {
			t.Fatalf("%+v became %+v, %v", ix, back, err)
		}
		// Cut or flipped anywhere, it is refused.
		at := rapid.IntRange(0, len(object)-1).Draw(t, "at")
		if _, err := openManifest(k, ix.info.ID, object[:at]); err == nil {
			t.Fatalf("cut at %d of %d it was read", at, len(object))
		}
		object[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if _, err := openManifest(k, ix.info.ID, object); err == nil {
			t.Fatalf("flipped at %d of %d it was read", at, len(object))
		}
		local := ix.Encode()
		at = rapid.IntRange(0, len(local)-1).Draw(t, "at")
		local[at] ^= 0x10
		if _, err := DecodeIndex(local); !errs.Is(err, errkind.DataLoss) {
			t.Fatalf("flipped at %d the local form was read: %v", at, err)
		}
		if _, err := DecodeIndex(local[:at]); !errs.Is(err, errkind.DataLoss) {
			t.Fatalf("cut at %d the local form was read: %v", at, err)
		}
	})
}

func sample() *Index {
	ix := &Index{}
	ix.disk = testDisk
	ix.info = Info{ID: idOf([20]byte{1}), Size: 10 * ChunkSize, TakenAt: day0, Epoch: ids.Epoch{Incarnation: 1, Index: 2}, Image: "sha256:x"}
	ix.clock = day0
	ix.packs = []pack{{packName{ids.Epoch{Index: 9}, [20]byte{3}}, 2000}}
	ix.table = []chunk{{1, 0, 0, 500, [32]byte{1}}, {4, 0, 500, 700, [32]byte{2}}}
	ix.chunks = 2
	ix.history = []Info{{ID: idOf([20]byte{4}), TakenAt: day0, Image: "sha256:y"}}
	return ix
}

func FuzzHeader(f *testing.F) {
	f.Add(byte(1), sample().header.encode())
	vm := sample()
	vm.info.VMWritten = true
	f.Add(byte(2), vm.header.encode())
	f.Add(byte(1), []byte{})
	f.Fuzz(func(t *testing.T, version byte, b []byte) {
		h, err := decodeHeader(b, version)
		if err != nil {
			return
		}
		if again := h.encode(); !bytes.Equal(again, b) {
			t.Fatalf("%x was read as %x", b, again)
		}
		if h.info.Size > MaxSize || len(h.history) > maxHistory || len(h.packs) > maxPacks || h.disk.check() != nil {
			t.Fatalf("out of bounds: %+v", h)
		}
	})
}

func FuzzTable(f *testing.F) {
	ix := sample()
	f.Add(uint32(10), uint32(2), encodeTable(1, ix.table))
	f.Add(uint32(0), uint32(0), []byte{})
	f.Fuzz(func(t *testing.T, total, chunks uint32, b []byte) {
		h := &header{packs: ix.packs, chunks: int(chunks), info: Info{Size: min(uint64(total)*ChunkSize, MaxSize)}}
		table, err := decodeTable(h, b)
		if err != nil {
			return
		}
		next := uint32(0)
		for _, c := range table {
			if c.pos < next || lengthAt(h.info.Size, c.pos) == 0 || int(c.pack) >= len(h.packs) ||
				uint64(c.off)+uint64(c.size) > uint64(h.packs[c.pack].size) || c.size < overhead || c.size > maxChunk {
				t.Fatalf("out of bounds: %+v", c)
			}
			next = c.pos + 1
		}
		if again := encodeTable(len(h.packs), table); !bytes.Equal(again, b) {
			t.Fatalf("%x was read as %x", b, again)
		}
	})
}

// FuzzIndex corrects the checksum, so that what is behind it is reached.
func FuzzIndex(f *testing.F) {
	f.Add(sample().Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 64 {
			sum := blake3.Sum256(b[:len(b)-32])
			copy(b[len(b)-32:], sum[:])
		}
		ix, err := DecodeIndex(b)
		if err != nil {
			if !errs.Is(err, errkind.DataLoss) {
				t.Fatal(err)
			}
			return
		}
		if back, err := DecodeIndex(ix.Encode()); err != nil || back.info != ix.info || len(back.table) != len(ix.table) {
			t.Fatalf("%+v, %v", back, err)
		}
	})
}

// FuzzManifest gives each object the id that it would have.
func FuzzManifest(f *testing.F) {
	k, err := deriveKeys(testDisk, testKey)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sealManifest(k, sample()))
	f.Add([]byte("berthmf\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < frontSize {
			return
		}
		need := frontSize + int(binary.BigEndian.Uint32(b[8:])) + bodyDigest
		if need > len(b) || need < frontSize {
			if ix, err := openManifest(k, "m", b); err == nil {
				t.Fatalf("%+v", ix)
			}
			return
		}
		if ix, err := openManifest(k, idOf(short(blake3.Sum256(b[:need]))), b); err == nil && ix.chunks != len(ix.table) {
			t.Fatalf("%+v", ix)
		}
	})
}

func FuzzPackName(f *testing.F) {
	f.Add("1-2-" + idOf([20]byte{7})[1:])
	f.Add("1-2")
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := parsePackName(s); err == nil && p.String() != s {
			t.Fatalf("%q was read as %q", s, p)
		}
	})
}
