package archive

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

var errShort = errors.New("it ends too early or a number in it is out of bounds")

// writer appends the primitives of a header and a table.
type writer struct{ b []byte }

func (w *writer) uint(v uint64) { w.b = binary.AppendUvarint(w.b, v) }
func (w *writer) int(v int64)   { w.b = binary.AppendVarint(w.b, v) }

func (w *writer) str(s string) {
	w.uint(uint64(len(s)))
	w.b = append(w.b, s...)
}

func (w *writer) flag(v bool) {
	if v {
		w.b = append(w.b, 1)
	} else {
		w.b = append(w.b, 0)
	}
}

func (w *writer) pair(e ids.Epoch) { w.uint(uint64(e.Incarnation)); w.uint(e.Index) }

func (w *writer) time(t time.Time) { w.int(t.UnixMilli()) }

// id writes a manifest's id, which may be empty.
func (w *writer) id(s string) {
	sum, err := idSum(s)
	w.flag(err == nil)
	if err == nil {
		w.b = append(w.b, sum[:]...)
	}
}

// reader takes them apart again. The first thing that is wrong stays in err; what follows reads as
// zero, so that a caller checks once.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail() {
	if r.err == nil {
		r.err = errShort
	}
	r.b = nil
}

// uint reads a number that is at most limit, in its one shortest form.
func (r *reader) uint(limit uint64) uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > limit || n > 1 && r.b[n-1] == 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) int() int64 {
	u := r.uint(1<<64 - 1)
	v := int64(u >> 1)
	if u&1 != 0 {
		v = ^v
	}
	return v
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.fail()
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) str(limit int) string { return string(r.take(int(r.uint(uint64(limit))))) }

func (r *reader) flag() bool { return r.uint(1) == 1 }

func (r *reader) pair() ids.Epoch {
	return ids.Epoch{Incarnation: uint32(r.uint(1<<32 - 1)), Index: r.uint(1<<64 - 1)}
}

func (r *reader) time() time.Time { return time.UnixMilli(r.int()).UTC() }

func (r *reader) sum() (s [20]byte) {
	copy(s[:], r.take(len(s)))
	return s
}

func (r *reader) id() string {
	if !r.flag() {
		return ""
	}
	return idOf(r.sum())
}

// end reports what went wrong, also that something is left over.
func (r *reader) end() error {
	if r.err == nil && len(r.b) > 0 {
		return errors.New("it is longer than it says")
	}
	return r.err
}
