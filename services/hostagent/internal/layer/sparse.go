package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// worthwhile is how much a file must have in holes to be written as sparse.
	worthwhile = 64 << 10
	// maxHoles keeps the map of a sparse file below the 1 MiB that Go's reader takes.
	maxHoles = 8192
	block    = 512
	maxOctal = 1 << 33 // what a header's own field of the size holds
)

// part is a range of a file.
type part struct{ off, len int64 }

// data returns the ranges of a file that hold something, in order. When there are more than the
// limit, ranges with the smallest holes between them become one.
func (a *archive) data(f *os.File, size int64) ([]part, error) {
	var parts []part
	gap := int64(4 << 10)
	for at := int64(0); at < size; {
		if err := a.ctx.Err(); err != nil {
			return nil, err
		}
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		if to = min(to, size); from >= to {
			break
		}
		parts = append(parts, part{from, to - from})
		if len(parts) > a.limits.Holes {
			parts, gap = fewer(parts, gap, a.limits.Holes)
		}
		at = to
	}
	return parts, nil
}

// fewer joins ranges until half of the limit is free again, and returns the gap that did.
func fewer(parts []part, gap int64, limit int) ([]part, int64) {
	parts = merged(parts, gap)
	for len(parts) > max(1, limit/2) {
		gap *= 2
		parts = merged(parts, gap)
	}
	return parts, gap
}

// merged joins ranges that are at most gap apart.
func merged(parts []part, gap int64) []part {
	out := parts[:1]
	for _, p := range parts[1:] {
		last := &out[len(out)-1]
		if p.off-(last.off+last.len) <= gap {
			last.len = p.off + p.len - last.off
			continue
		}
		out = append(out, p)
	}
	return out
}

// sparse writes a file in the PAX sparse format 1.0: a map of its ranges, then their bytes. The
// writer of archive/tar cannot do that, so the two headers are made here.
func (a *archive) sparse(f *os.File, h *tar.Header, parts []part) error {
	if err := a.count(); err != nil {
		return err
	}
	if err := a.tar.Flush(); err != nil { // the last entry is padded; what follows is on a border
		return err
	}
	parts = append(parts, part{h.Size, 0}) // without it GNU tar takes the end of the last range for that of the file
	table := sparseMap(parts)
	size := int64(len(table))
	for _, p := range parts {
		size += p.len
	}
	records := map[string]string{
		"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
		"GNU.sparse.name": h.Name, "GNU.sparse.realsize": strconv.FormatInt(h.Size, 10),
		"uid": strconv.Itoa(h.Uid), "gid": strconv.Itoa(h.Gid),
		"mtime": fmt.Sprintf("%d.%09d", h.ModTime.Unix(), h.ModTime.Nanosecond()),
	}
	if h.ModTime.Unix() < 0 { // a fraction of a negative number counts the other way
		records["mtime"] = strconv.FormatInt(h.ModTime.Unix(), 10)
	}
	if size >= maxOctal { // else left out: Python takes it for the real size
		records["size"] = strconv.FormatInt(size, 10)
	}
	maps.Copy(records, h.PAXRecords)
	body := paxRecords(records)
	stand := "GNUSparseFile.0/" + ascii(path.Base(h.Name))
	for _, piece := range [][]byte{
		ustar("PaxHeaders.0/"+ascii(path.Base(h.Name)), tar.TypeXHeader, 0o644, int64(len(body))), padded(body),
		ustar(stand, tar.TypeReg, h.Mode, size), table,
	} {
		if _, err := a.out.Write(piece); err != nil {
			return err
		}
	}
	for _, p := range parts {
		if err := a.copy(a.out, f, h.Name, p); err != nil {
			return err
		}
	}
	_, err := a.out.Write(make([]byte, (block-size%block)%block))
	return err
}

// sparseMap is the table at the head of a sparse file: numbers, a line each, padded to a block.
func sparseMap(parts []part) []byte {
	b := strconv.AppendInt(nil, int64(len(parts)), 10)
	b = append(b, '\n')
	for _, p := range parts {
		b = append(strconv.AppendInt(b, p.off, 10), '\n')
		b = append(strconv.AppendInt(b, p.len, 10), '\n')
	}
	return padded(b)
}

func padded(b []byte) []byte { return append(b, make([]byte, (block-len(b)%block)%block)...) }

// paxRecords writes "<length> <key>=<value>\n" for each, where length counts itself.
func paxRecords(records map[string]string) []byte {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(records)) {
		rest := " " + k + "=" + records[k] + "\n"
		n := len(rest) + 1
		for n != len(rest)+len(strconv.Itoa(n)) {
			n = len(rest) + len(strconv.Itoa(n))
		}
		b.WriteString(strconv.Itoa(n) + rest)
	}
	return []byte(b.String())
}

// ustar makes a header block. What does not fit is in the PAX records before it.
func ustar(name string, kind byte, mode, size int64) []byte {
	b := make([]byte, block)
	octal := func(at, n int, v int64) { copy(b[at:at+n-1], fmt.Sprintf("%0*o", n-1, v)) }
	copy(b[0:100], name)
	octal(100, 8, mode&0o7777)
	octal(108, 8, 0)
	octal(116, 8, 0)
	if size < maxOctal {
		octal(124, 12, size)
	} else {
		octal(124, 12, 0)
	}
	octal(136, 12, 0)
	b[156] = kind
	copy(b[257:], "ustar\x0000")
	copy(b[148:156], "        ")
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// ascii is a name that stands for the real one, which is in the PAX records.
func ascii(name string) string {
	name = strings.Map(func(r rune) rune {
		if r < 0x21 || r > 0x7e {
			return '_'
		}
		return r
	}, name)
	return name[:min(len(name), 80)]
}
