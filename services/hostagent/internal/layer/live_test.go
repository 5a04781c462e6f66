package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// changing does something to the directory once so many bytes were written.
type changing struct {
	bytes.Buffer
	at int
	do func()
}

func (c *changing) Write(p []byte) (int, error) {
	n, err := c.Buffer.Write(p)
	if c.do != nil && c.Len() >= c.at {
		c.do()
		c.do = nil
	}
	return n, err
}

// A session that goes on while its files are read takes some away and cuts others: the archive stays one.
func TestALiveDirectoryGivesAWholeArchive(t *testing.T) {
	for _, live := range []bool{true, false} {
		dir := t.TempDir()
		big := bytes.Repeat([]byte("x"), 1<<20)
		for _, name := range []string{"a/f0", "a/f1", "a/f2", "b/g", "c/h"} {
			path := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, big, 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		root, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		w := &changing{at: 300 << 10, do: func() {
			for _, name := range []string{"a/f0", "a/f1", "a/f2", "b/g", "c/h"} {
				if err := os.Truncate(filepath.Join(dir, name), 10); err != nil {
					t.Error(err)
				}
			}
			for _, name := range []string{"b", "c"} {
				if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
					t.Error(err)
				}
			}
		}}
		st, err := Write(context.Background(), w, root, Limits{Live: live})
		_ = root.Close()
		if !live {
			if !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("at rest: %v", err)
			}
			continue
		}
		if err != nil || st.Skipped == 0 {
			t.Fatalf("%+v, %v", st, err)
		}
		entries := uint64(0)
		for r := tar.NewReader(&w.Buffer); ; entries++ {
			_, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, r); err != nil {
				t.Fatal(err)
			}
		}
		if entries != st.Entries {
			t.Errorf("%d entries, %d were said", entries, st.Entries)
		}
	}
}
