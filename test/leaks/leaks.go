// Package leaks looks for secrets in what a run left behind: logs, spans,
// up.json, the stores of the bus (streams, KV, audit, dead messages), crash
// dumps. It finds tokens and grants (a JSON Web Signature whose header is JSON
// with an algorithm), seeds of NATS keys, private keys as PEM and as JWK, and
// values that were registered with it, as they are and in hex or base64; each
// also inside a text in base64. It guarantees that a finding never repeats the
// secret, and that what is not looked at is counted. It reads only.
package leaks

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Finding is a secret where none may be.
type Finding struct {
	File   string
	Offset int64
	What   string
}

// String says what was found and where, without it.
func (f Finding) String() string {
	return fmt.Sprintf("%s at byte %d of %s", f.What, f.Offset, f.File)
}

// Scanner looks for patterns and for what was registered. The zero value looks
// for patterns. Register before the first scan.
type Scanner struct {
	known []known
	// Skip leaves out a file or a folder by its path below the folder that is
	// scanned; nil leaves out nothing.
	Skip func(path string, dir bool) bool
	// MaxFile leaves out larger files; 0 is 256 MiB.
	MaxFile int64
	// Skipped are the files that were too large, by path.
	Skipped []string
}

type known struct {
	what string
	form []byte
}

// leastKnown is the shortest value that can be registered: a shorter one would
// be met by chance.
const leastKnown = 12

// Register has the scanner look for a value too, under a name that says what it is.
func (s *Scanner) Register(what string, value []byte) error {
	if len(value) < leastKnown {
		return fmt.Errorf("%s has %d bytes; less than %d would be met by chance", what, len(value), leastKnown)
	}
	s.add(what, bytes.Clone(value))
	s.add(what+" in hex", []byte(hex.EncodeToString(value)))
	s.add(what+" in hex", []byte(strings.ToUpper(hex.EncodeToString(value))))
	s.add(what+" in base64", []byte(base64.RawStdEncoding.EncodeToString(value)))
	s.add(what+" in base64", []byte(base64.RawURLEncoding.EncodeToString(value)))
	return nil
}

func (s *Scanner) add(what string, form []byte) {
	if !slices.ContainsFunc(s.known, func(k known) bool { return bytes.Equal(k.form, form) }) {
		s.known = append(s.known, known{what, form})
	}
}

// Dir scans every plain file below a folder. A file that is gone when it is
// opened is no error: others may still write and remove there.
func (s *Scanner) Dir(root string) (out []Finding, err error) {
	most := cmp.Or(s.MaxFile, 256<<20)
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, werr error) error {
		rel, _ := filepath.Rel(root, path)
		switch {
		case errors.Is(werr, fs.ErrNotExist):
			return nil
		case werr != nil:
			return werr
		case s.Skip != nil && rel != "." && s.Skip(rel, e.IsDir()):
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		case !e.Type().IsRegular():
			return nil
		}
		info, ierr := e.Info()
		if ierr == nil && info.Size() > most {
			s.Skipped = append(s.Skipped, rel)
			return nil
		}
		f, ferr := os.Open(path)
		if errors.Is(ferr, fs.ErrNotExist) {
			return nil
		}
		if ferr != nil {
			return ferr
		}
		defer f.Close()
		found, rerr := s.Reader(rel, f)
		out = append(out, found...)
		return rerr
	})
	return out, err
}

const (
	window  = 8 << 20
	overlap = 1 << 20 // longer than any token that is accepted, and its like
)

// Reader scans what can be read; name stands in the findings.
func (s *Scanner) Reader(name string, r io.Reader) (out []Finding, err error) {
	buf := make([]byte, 0, 64<<10)
	var base int64
	for {
		if len(buf) == cap(buf) && cap(buf) < window+overlap {
			buf = append(make([]byte, 0, min(cap(buf)*8, window+overlap)), buf...)
		}
		n, rerr := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		end := errors.Is(rerr, io.EOF) || errors.Is(rerr, io.ErrUnexpectedEOF)
		if rerr != nil && !end {
			return out, fmt.Errorf("read %s: %w", name, rerr)
		}
		if !end && cap(buf) < window+overlap {
			continue
		}
		for _, f := range s.scan(buf) {
			f.File, f.Offset = name, f.Offset+base
			if !slices.Contains(out, f) {
				out = append(out, f)
			}
		}
		if end {
			return out, nil
		}
		keep := buf[len(buf)-overlap:]
		base += int64(len(buf) - overlap)
		buf = buf[:copy(buf, keep)]
	}
}

// scan looks at one stretch of bytes and at what stands in it in base64.
func (s *Scanner) scan(b []byte) (out []Finding) {
	out = s.plain(b)
	for start, text := range runs(b) {
		for shift := range 4 {
			raw := decode(text, shift)
			for _, f := range s.plain(raw) {
				f.Offset, f.What = int64(start), f.What+" inside base64"
				if !slices.Contains(out, f) {
					out = append(out, f)
				}
			}
		}
	}
	return out
}

func (s *Scanner) plain(b []byte) (out []Finding) {
	for _, k := range s.known {
		for i := range all(b, k.form) {
			out = append(out, Finding{Offset: int64(i), What: k.what})
		}
	}
	for _, look := range []func([]byte) []Finding{tokens, seeds, pemKeys, jwks} {
		out = append(out, look(b)...)
	}
	return out
}
