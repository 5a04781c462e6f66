package audit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A segment is a file of frames: length of the body, its checksum, the body. The number in its name grows.
const (
	suffix     = ".spool"
	frameHead  = 8
	maxBody    = 60 << 10 // what the stream takes, with room for headers
	minSegment = 64 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errTorn says that what follows in a segment was never written whole.
var errTorn = errors.New("the frame is not whole")

// segment is one file of the spool.
type segment struct {
	number uint64
	path   string
	file   *os.File
	size   int64 // of whole frames
	acked  int64 // offset up to which everything is on the bus
}

func segmentPath(dir string, number uint64) string {
	return filepath.Join(dir, fmt.Sprintf("%016x%s", number, suffix))
}

// frame appends a body with its head.
func frame(to, body []byte) []byte {
	to = binary.BigEndian.AppendUint32(to, uint32(len(body)))
	to = binary.BigEndian.AppendUint32(to, crc32.Checksum(body, castagnoli))
	return append(to, body...)
}

// readFrame reads the frame at an offset: its body, and where the next one begins. io.EOF is the clean end.
func readFrame(r io.ReaderAt, at, size int64) ([]byte, int64, error) {
	if at == size {
		return nil, at, io.EOF
	}
	var head [frameHead]byte
	if size-at < frameHead {
		return nil, at, errTorn
	}
	if _, err := r.ReadAt(head[:], at); err != nil {
		return nil, at, err
	}
	n := int64(binary.BigEndian.Uint32(head[:4]))
	if n == 0 || n > maxBody || size-at-frameHead < n {
		return nil, at, errTorn
	}
	body := make([]byte, n)
	if _, err := r.ReadAt(body, at+frameHead); err != nil {
		return nil, at, err
	}
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(head[4:]) {
		return nil, at, errTorn
	}
	return body, at + frameHead + n, nil
}

// openSegments opens what an earlier process left, oldest first, and cuts off what it did not write whole.
func openSegments(dir string, each func(body []byte)) ([]*segment, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []*segment
	for _, e := range entries {
		hex, ok := strings.CutSuffix(e.Name(), suffix)
		number, err := strconv.ParseUint(hex, 16, 64)
		if !ok || err != nil {
			continue
		}
		s := &segment{number: number, path: filepath.Join(dir, e.Name())}
		if err := s.recover(each); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *segment) int { return compare(a.number, b.number) })
	return out, nil
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// recover finds the end of the last whole frame.
func (s *segment) recover(each func([]byte)) error {
	f, err := os.OpenFile(s.path, os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	at := int64(0)
	for {
		body, next, err := readFrame(f, at, info.Size())
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.Is(err, errTorn) {
			if err := f.Truncate(at); err != nil {
				return errors.Join(err, f.Close())
			}
			break
		}
		if err != nil {
			return errors.Join(err, f.Close())
		}
		each(body)
		at = next
	}
	s.file, s.size = f, at
	return nil
}

// write appends frames; a write that failed leaves the segment as it was.
func (s *segment) write(frames []byte) error {
	if _, err := s.file.WriteAt(frames, s.size); err != nil {
		return errors.Join(err, s.file.Truncate(s.size))
	}
	s.size += int64(len(frames))
	return nil
}

// remove ends the segment.
func (s *segment) remove() error {
	return errors.Join(s.file.Close(), os.Remove(s.path))
}
