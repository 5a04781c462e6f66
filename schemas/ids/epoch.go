package ids

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Epoch names one placement of a session: the incarnation of the control
// plane's cell and the raft index of the entry that placed it. Two epochs are
// the same only if both numbers are; compare with ==.
type Epoch struct {
	Incarnation uint32
	Index       uint64
}

// Generation names one life of a session: the entry that created it.
type Generation struct {
	Incarnation uint32
	Index       uint64
}

// ParseEpoch reads "<incarnation>-<index>".
func ParseEpoch(s string) (Epoch, error) {
	inc, idx, err := parsePair("epoch", s)
	return Epoch{inc, idx}, err
}

// ParseGeneration reads "<incarnation>-<index>".
func ParseGeneration(s string) (Generation, error) {
	inc, idx, err := parsePair("generation", s)
	return Generation{inc, idx}, err
}

// String returns "<incarnation>-<index>", which is one subject token.
func (e Epoch) String() string { return pair(e.Incarnation, e.Index) }

// String returns "<incarnation>-<index>", which is one subject token.
func (g Generation) String() string { return pair(g.Incarnation, g.Index) }

// IsZero reports whether e names no placement.
func (e Epoch) IsZero() bool { return e == Epoch{} }

// IsZero reports whether g names no generation.
func (g Generation) IsZero() bool { return g == Generation{} }

// Compare orders epochs by incarnation, then index. It serves monotonicity
// checks of the scheduler; whoever acts on a session needs an exact match.
func (e Epoch) Compare(o Epoch) int {
	return cmp.Or(cmp.Compare(e.Incarnation, o.Incarnation), cmp.Compare(e.Index, o.Index))
}

// Compare orders generations by incarnation, then index.
func (g Generation) Compare(o Generation) int { return Epoch(g).Compare(Epoch(o)) }

// MarshalText writes the form of String.
func (e Epoch) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText reads the form of String.
func (e *Epoch) UnmarshalText(b []byte) (err error) { *e, err = ParseEpoch(string(b)); return err }

// MarshalText writes the form of String.
func (g Generation) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText reads the form of String.
func (g *Generation) UnmarshalText(b []byte) (err error) {
	*g, err = ParseGeneration(string(b))
	return err
}

func pair(inc uint32, idx uint64) string {
	b := make([]byte, 0, 32)
	b = strconv.AppendUint(b, uint64(inc), 10)
	b = append(b, '-')
	return string(strconv.AppendUint(b, idx, 10))
}

func parsePair(what, s string) (uint32, uint64, error) {
	bad := fmt.Errorf("%w: %s %.64q must be <incarnation>-<index>, two decimal numbers", ErrInvalid, what, s)
	left, right, ok := strings.Cut(s, "-")
	if !ok {
		return 0, 0, bad
	}
	inc, err := strconv.ParseUint(left, 10, 32)
	if err != nil {
		return 0, 0, bad
	}
	idx, err := strconv.ParseUint(right, 10, 64)
	if err != nil || pair(uint32(inc), idx) != s {
		return 0, 0, bad
	}
	return uint32(inc), idx, nil
}
