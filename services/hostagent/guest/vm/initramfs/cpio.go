package initramfs

import (
	"fmt"
	"io"
)

// Modes of the entries, as a stat has them.
const (
	modeDir  = 0o040000
	modeChar = 0o020000
	modeFile = 0o100000
)

// align is the boundary at which the kernel looks for the next archive of several.
const align = 512

// Writer writes one archive in the format "newc", the only one that a kernel unpacks. Times are 0 and
// owners are root, so that the same entries give the same bytes.
type Writer struct {
	out     io.Writer
	written int64
	entries uint32
}

// NewWriter writes to out; the archive is whole after Close.
func NewWriter(out io.Writer) *Writer { return &Writer{out: out} }

// Dir adds a folder. Its parent comes before it.
func (w *Writer) Dir(name string, perm uint32) error {
	return w.entry(name, modeDir|perm, 2, 0, 0, nil)
}

// File adds a regular file.
func (w *Writer) File(name string, perm uint32, data []byte) error {
	return w.entry(name, modeFile|perm, 1, 0, 0, data)
}

// Char adds a character device.
func (w *Writer) Char(name string, perm, major, minor uint32) error {
	return w.entry(name, modeChar|perm, 1, major, minor, nil)
}

// Close ends the archive and fills up to where another may follow.
func (w *Writer) Close() error {
	w.entries = ^uint32(0) // the trailer has inode 0
	if err := w.entry("TRAILER!!!", 0, 1, 0, 0, nil); err != nil {
		return err
	}
	return w.pad(align)
}

func (w *Writer) entry(name string, mode, links, major, minor uint32, data []byte) error {
	if int64(len(data)) > int64(^uint32(0)) {
		return fmt.Errorf("initramfs: %s is too large", name)
	}
	w.entries++
	head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00", w.entries, mode, 0, 0, links, 0,
		len(data), 0, 0, major, minor, len(name)+1, 0, name)
	if err := w.write([]byte(head)); err != nil {
		return err
	}
	if err := w.pad(4); err != nil {
		return err
	}
	if err := w.write(data); err != nil {
		return err
	}
	return w.pad(4)
}

func (w *Writer) pad(to int64) error {
	return w.write(make([]byte, (to-w.written%to)%to))
}

func (w *Writer) write(b []byte) error {
	n, err := w.out.Write(b)
	w.written += int64(n)
	if err != nil {
		return fmt.Errorf("initramfs: write: %w", err)
	}
	return nil
}
