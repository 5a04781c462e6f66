package kernel

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os/exec"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

const (
	maxKernel   = 512 << 20 // bytes of an unpacked kernel
	legacyBlock = 8 << 20   // what a block of lz4's old format unpacks to, at most
)

// Extract returns the kernel that a bzImage unpacks at its start: an ELF file with an entry for PVH,
// which a machine without firmware boots.
func Extract(image []byte) ([]byte, error) {
	if len(image) < 0x250 || string(image[0x202:0x206]) != "HdrS" {
		return nil, errors.New("not a bzImage")
	}
	sectors := int(image[0x1f1])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int(binary.LittleEndian.Uint32(image[0x248:]))
	end := start + int(binary.LittleEndian.Uint32(image[0x24c:]))
	if start >= end || end > len(image) {
		return nil, fmt.Errorf("its payload at %d to %d is not in the file of %d bytes", start, end, len(image))
	}
	// A size of four bytes follows what is packed.
	payload, want := image[start:end-4], binary.LittleEndian.Uint32(image[end-4:])
	out, err := unpack(payload)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(out, []byte("\x7fELF")) {
		return nil, errors.New("what it packs is no ELF file")
	}
	if got := uint32(len(out)); want != got {
		return nil, fmt.Errorf("it unpacks to %d bytes, not %d", got, want)
	}
	return out, nil
}

// unpack finds out by the first bytes how it is packed.
func unpack(b []byte) ([]byte, error) {
	switch {
	case bytes.HasPrefix(b, []byte("\x02\x21\x4c\x18")):
		return unpackLZ4(b[4:])
	case bytes.HasPrefix(b, []byte("\x28\xb5\x2f\xfd")):
		r, err := zstd.NewReader(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return readAll(r)
	case bytes.HasPrefix(b, []byte("\x1f\x8b")):
		r, err := gzip.NewReader(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		r.Multistream(false)
		return readAll(r)
	case bytes.HasPrefix(b, []byte("\xfd7zXZ\x00")):
		cmd := exec.Command("xz", "-dc", "--single-stream")
		cmd.Stdin = bytes.NewReader(b)
		out, err := cmd.Output()
		if err != nil && len(out) == 0 {
			return nil, fmt.Errorf("unpack with xz (Debian: xz-utils): %w", err)
		}
		return out, nil
	}
	return nil, fmt.Errorf("packed in a way that starts with % x", b[:min(8, len(b))])
}

func readAll(r io.Reader) ([]byte, error) {
	out, err := io.ReadAll(io.LimitReader(r, maxKernel+1))
	if len(out) > maxKernel {
		return nil, errors.New("it unpacks to too much")
	}
	return out, err
}

// unpackLZ4 reads the blocks of lz4's old format: a size, then the block.
func unpackLZ4(b []byte) ([]byte, error) {
	var out []byte
	block := make([]byte, legacyBlock)
	for len(b) > 4 {
		size := int(binary.LittleEndian.Uint32(b))
		if b = b[4:]; size > len(b) || len(out) > maxKernel {
			return nil, fmt.Errorf("a block of %d bytes with %d left", size, len(b))
		}
		n, err := lz4.UncompressBlock(b[:size], block)
		if err != nil {
			return nil, fmt.Errorf("unpack with lz4: %w", err)
		}
		out, b = append(out, block[:n]...), b[size:]
	}
	return out, nil
}
