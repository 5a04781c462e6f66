package main

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// unit is what one seed fills.
const unit = 64 << 10

// phrases are what half of the data is made of.
var phrases = func() (out [512][]byte) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range out {
		p := make([]byte, 12+rng.IntN(36))
		for j := range p {
			p[j] = "etaoin shrdlu cmfwyp\n"[rng.IntN(21)]
		}
		out[i] = p
	}
	return out
}()

// fill writes what compresses to about half, as a disk of sources, programs and media does: of every
// 64 KiB one half is phrases, a quarter hexadecimal numbers, a quarter noise. Equal seeds give equal
// bytes; no two seeds share any.
func fill(b []byte, seed uint64) {
	for i := 0; len(b) > 0; i++ {
		part := b[:min(unit, len(b))]
		b = b[len(part):]
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		text, number := len(part)/2, len(part)/4
		for off := 0; off < text; {
			off += copy(part[off:text], phrases[rng.Uint32()%uint32(len(phrases))])
		}
		noise := part[text+number:]
		for off := 0; off < len(noise); off += 8 {
			x := rng.Uint64()
			for j := range min(8, len(noise)-off) {
				noise[off+j] = byte(x >> (8 * j))
			}
		}
		var raw [32]byte
		for off := text; off < text+number; off += 64 {
			for j := range raw {
				raw[j] = byte(rng.Uint32())
			}
			copy(part[off:text+number], hex.AppendEncode(nil, raw[:]))
		}
	}
}

// tree is a folder of equal files, the same wherever it is made.
type tree struct {
	Dir   string
	Files int
	Size  int64 // of each file
}

func (t tree) bytes() int64 { return int64(t.Files) * t.Size }

func (t tree) file(i int) string {
	return filepath.Join(t.Dir, fmt.Sprintf("d%02d", i/64), fmt.Sprintf("f%04d", i))
}

// make writes the files and syncs them.
func (t tree) make(seed uint64) error {
	buf := make([]byte, mib)
	for i := range t.Files {
		if err := os.MkdirAll(filepath.Dir(t.file(i)), 0o755); err != nil {
			return err
		}
		f, err := os.Create(t.file(i))
		if err != nil {
			return err
		}
		for off := int64(0); off < t.Size && err == nil; off += int64(len(buf)) {
			b := buf[:min(int64(len(buf)), t.Size-off)]
			fill(b, seed+uint64(i)<<24+uint64(off/mib))
			_, err = f.Write(b)
		}
		if err == nil {
			err = f.Sync()
		}
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// change is pieces of equal size, spread evenly over a tree.
type change struct {
	Pieces int
	Size   int64
	Seed   uint64
}

func (c change) bytes() int64 { return int64(c.Pieces) * c.Size }

// each yields the content of every piece; the slice is used again.
func (c change) each(f func(i int, b []byte) error) error {
	b := make([]byte, c.Size)
	for i := range c.Pieces {
		fill(b, c.Seed+uint64(i)<<24)
		if err := f(i, b); err != nil {
			return err
		}
	}
	return nil
}

// apply overwrites the pieces in place. It does not sync: that is for who saves them.
func (t tree) apply(c change) error {
	apart := t.bytes() / int64(c.Pieces) / c.Size * c.Size
	var f *os.File
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	return c.each(func(i int, b []byte) error {
		at := int64(i) * apart
		path := t.file(int(at / t.Size))
		if f == nil || f.Name() != path {
			if f != nil {
				_ = f.Close()
			}
			var err error
			if f, err = os.OpenFile(path, os.O_WRONLY, 0); err != nil {
				return err
			}
		}
		_, err := f.WriteAt(b, at%t.Size)
		return err
	})
}
