// Package extents knows which parts of a sparse file hold something and which parts of two clones
// of one file differ, without reading them. It guarantees that a part that it leaves out is a hole,
// or the same in both files; it may name more than it must, never less.
package extents

// Range is a part of a file in bytes.
type Range struct{ Off, Len uint64 }

// End is the first byte after the range.
func (r Range) End() uint64 { return r.Off + r.Len }
