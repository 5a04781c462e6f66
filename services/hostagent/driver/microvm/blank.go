//go:build linux

package microvm

import (
	"fmt"
	"io"
	"os"
)

// blankBytes is how large the disk of a machine that is nobody's is.
func (d *Driver) blankBytes() (uint64, error) {
	if d.blank == nil {
		return placeholderBytes, nil
	}
	st, err := d.blank.Stat()
	if err != nil {
		return 0, fmt.Errorf("blank disk: %w", err)
	}
	return uint64(st.Size()), nil
}

// copyOf makes a copy in memory, with holes where there is nothing.
func copyOf(f *os.File) (*os.File, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("blank disk: %w", err)
	}
	out, err := memfd("blank", 0)
	if err != nil {
		return nil, err
	}
	if err = out.Truncate(st.Size()); err == nil {
		_, err = io.Copy(out, io.NewSectionReader(f, 0, st.Size()))
	}
	if err != nil {
		_ = out.Close()
		return nil, fmt.Errorf("blank disk: %w", err)
	}
	return out, nil
}
