package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/test/bench/figures"
)

const (
	restoreRounds = 3
	// chunk and pack are those of the archive (ADR of the disk format).
	chunkSize = 128 << 10
	packSize  = 16 * mib
)

// restores measures the wake of a session whose image is not on the host any more.
func (w *work) restores(ctx context.Context) error {
	note("restore of 1 GiB, %d rounds", restoreRounds)
	if !w.b.wants("sleep") { // after which it sleeps
		if err := w.s.Close(ctx); err != nil {
			return err
		}
	}
	image, err := w.image()
	if err != nil {
		return err
	}
	packs := filepath.Join(w.dir, "packs")
	raw, err := compress(image, packs)
	if err != nil {
		return err
	}
	var attached, floors []time.Duration
	for range restoreRounds {
		floor, err := unpack(ctx, packs, filepath.Join(w.pool(), "bench-unpacked"))
		if err != nil {
			return err
		}
		if err := os.RemoveAll(filepath.Dir(image)); err != nil {
			return err
		}
		if w.s, err = w.open(ctx, "work", "default"); err != nil {
			return err
		}
		attached, floors = append(attached, attach(w.s)), append(floors, floor)
		if err := w.s.Close(ctx); err != nil {
			return err
		}
	}
	const floorOf = "cat of the same chunks through zstd -d into a file of the pool, and sync"
	a, f := figures.Quantile(attached, 0.5), figures.Quantile(floors, 0.5)
	w.b.add(figures.Result{Name: "restore of a disk with 1 GiB of files, disk attached, p50", Value: a, Unit: "ms", Floor: f, FloorOf: floorOf}, figures.None)
	w.b.add(figures.Result{Name: "restore of a disk with 1 GiB of files, speed", Value: float64(raw) / 1e3 / a, Unit: "MB/s",
		Floor: float64(raw) / 1e3 / f, FloorOf: floorOf}, figures.Aim{Text: "at least 0.6 x its floor", Met: func(r figures.Result) bool { return r.Ratio >= 0.6 }})
	return nil
}

// compress writes the chunks of an image that are not holes into files of the size of packs, each chunk
// compressed by itself at the level of the archive, and returns how many bytes they were.
func compress(image, dir string) (raw int64, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, err
	}
	f, err := os.Open(image)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(chunkSize), zstd.WithEncoderCRC(false))
	if err != nil {
		return 0, err
	}
	defer enc.Close()
	var pack []byte
	packs := 0
	flush := func() error {
		packs++
		err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%04d.zst", packs)), pack, 0o600)
		pack = pack[:0]
		return err
	}
	b := make([]byte, chunkSize)
	for at := int64(0); ; at += chunkSize {
		next, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return raw, flush()
		}
		if err != nil {
			return raw, err
		}
		at = next / chunkSize * chunkSize
		n, err := f.ReadAt(b, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return raw, err
		}
		if zero(b[:n]) {
			continue
		}
		raw += int64(n)
		if pack = enc.EncodeAll(b[:n], pack); len(pack) >= packSize {
			if err := flush(); err != nil {
				return raw, err
			}
		}
	}
}

func zero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// unpack is the floor of a restore.
func unpack(ctx context.Context, packs, to string) (time.Duration, error) {
	defer os.Remove(to)
	began := time.Now()
	out, err := exec.CommandContext(ctx, "sh", "-c", `cat "$0"/*.zst | zstd -d -q -c >"$1" && sync "$1"`, packs, to).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("zstd -d: %w: %s", err, out)
	}
	return time.Since(began), nil
}
