//go:build linux

package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
)

const (
	// blankSize is the least that holds a journal of the usual kind.
	blankSize = 16 << 20
	blankPage = 4 << 10
)

// blankDisk is an empty file system in memory, made when the first machine is prepared. Each has a copy of
// it to rehearse with; a host without mkfs.ext4 rehearses without a disk.
type blankDisk struct {
	mu   sync.Mutex
	file *os.File
	gone bool // it cannot be made
}

// get returns the file system, or nothing where there is none.
func (b *blankDisk) get(ctx context.Context, d *Driver) *os.File {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.file != nil || b.gone || ctx.Err() != nil {
		return b.file
	}
	f, err := makeBlank(ctx)
	if err != nil {
		b.gone = ctx.Err() == nil
		d.log.Warn("machines are prepared without a disk to rehearse with", "err", err)
	}
	b.file = f
	return f
}

func (b *blankDisk) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.file != nil {
		_ = b.file.Close()
		b.file = nil
	}
	b.gone = true
}

func makeBlank(ctx context.Context) (*os.File, error) {
	f, err := memfd("blank", 0)
	if err != nil {
		return nil, err
	}
	err = f.Truncate(blankSize)
	if err == nil {
		cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0",
			"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "/proc/self/fd/3")
		cmd.ExtraFiles = []*os.File{f}
		var out []byte
		if out, err = cmd.CombinedOutput(); err != nil {
			err = fmt.Errorf("mkfs.ext4: %w: %s", err, bytes.TrimSpace(out))
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// copyOf makes a copy in memory, with holes where there is nothing.
func copyOf(f *os.File) (*os.File, error) {
	out, err := memfd("blank", 0)
	if err != nil {
		return nil, err
	}
	if err = out.Truncate(blankSize); err == nil {
		err = copyPages(out, f)
	}
	if err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("copy a blank disk: %w", err)
	}
	return out, nil
}

func copyPages(out, in *os.File) error {
	page, empty := make([]byte, blankPage), make([]byte, blankPage)
	for at := int64(0); ; at += blankPage {
		_, err := in.ReadAt(page, at)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && !bytes.Equal(page, empty) {
			_, err = out.WriteAt(page, at)
		}
		if err != nil {
			return err
		}
	}
}
