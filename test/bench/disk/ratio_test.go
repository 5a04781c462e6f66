package main

import (
	"testing"

	"github.com/klauspost/compress/zstd"
)

// The figures say "about half": data that compresses away, or not at all, would measure something else.
func TestDataCompressesToAboutHalf(t *testing.T) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	for _, n := range []int{chunkSize, mib} {
		b := make([]byte, n)
		fill(b, 42)
		r := float64(len(enc.EncodeAll(b, nil))) / float64(n)
		t.Logf("%d bytes: %.2f", n, r)
		if r < 0.4 || r > 0.7 {
			t.Errorf("%d bytes compress to %.2f", n, r)
		}
	}
}
