package web

import (
	"crypto/sha256"
	"strings"
	"sync"
	"time"
)

// scrubber finds spellings of secrets. It is safe for concurrent use and prints as nothing.
type scrubber struct {
	patterns []*pattern
	shortest int
	longest  int
	shown    int // bytes of a spelling that may leave before it is clear that it is none
	shift    []uint8
	first    [256][]*pattern // by the first byte
	last     map[uint16][]*pattern
}

func (*scrubber) String() string   { return "scrubber" }
func (*scrubber) GoString() string { return "scrubber" }

// newScrubber needs values of at least 8 bytes.
func newScrubber(values ...[]byte) *scrubber {
	s := &scrubber{shift: make([]uint8, 1<<16), last: map[uint16][]*pattern{}}
	for _, v := range values {
		s.patterns = append(s.patterns, spellings(v)...)
	}
	s.shortest = 1 << 30
	for _, p := range s.patterns {
		s.shortest, s.longest = min(s.shortest, len(p.text)), max(s.longest, len(p.text))
	}
	s.shown = min(4, s.shortest/4)
	// Of every pattern the first bytes, as many as the shortest has, are looked for from their end: by the
	// last two bytes of that window it is known how far the next possible end is.
	window := min(s.shortest, 256)
	s.shortest = window
	for i := range s.shift {
		s.shift[i] = uint8(min(window-1, 255))
	}
	for _, p := range s.patterns {
		for i := 1; i < window; i++ {
			for _, b := range p.blocks(i) {
				s.shift[b] = min(s.shift[b], uint8(window-1-i))
				if i == window-1 {
					s.last[b] = append(s.last[b], p)
				}
			}
		}
		c := p.text[0]
		s.first[c] = append(s.first[c], p)
		if p.fold[0] {
			s.first[c&^0x20] = append(s.first[c&^0x20], p)
		}
	}
	return s
}

// blocks are the values of the two bytes that end at i.
func (p *pattern) blocks(i int) []uint16 {
	var out []uint16
	for _, a := range p.letters(i - 1) {
		for _, b := range p.letters(i) {
			out = append(out, uint16(a)<<8|uint16(b))
		}
	}
	return out
}

func (p *pattern) letters(i int) []byte {
	if p.fold[i] {
		return []byte{p.text[i], p.text[i] &^ 0x20}
	}
	return []byte{p.text[i]}
}

// span of bytes that are to be masked.
type span struct{ from, to int }

// find reports every occurrence that is complete in b, also those that overlap.
func (s *scrubber) find(b []byte, found func(span)) {
	window := s.shortest
	for i := window - 1; i < len(b); {
		block := uint16(b[i-1])<<8 | uint16(b[i])
		if d := s.shift[block]; d > 0 {
			i += int(d)
			continue
		}
		from := i - window + 1
		for _, p := range s.last[block] {
			if n := len(p.text); from+n <= len(b) && p.prefixOf(b[from:from+n]) {
				found(span{from, from + n})
			}
		}
		i++
	}
}

// open is where the earliest tail of b begins that could be the beginning of a spelling, len(b) if none.
func (s *scrubber) open(b []byte) int {
	for i := max(0, len(b)-s.longest+1); i < len(b); i++ {
		for _, p := range s.first[b[i]] {
			if len(b)-i < len(p.text) && p.prefixOf(b[i:]) {
				return i
			}
		}
	}
	return len(b)
}

// text scrubs a text that is complete.
func (s *scrubber) text(t string) (string, bool) {
	b, hit := []byte(t), false
	s.find([]byte(t), func(f span) {
		hit = true
		mask(b[f.from:f.to])
	})
	return string(b), hit
}

// inName reports whether a spelling stands in the name of a field, which has no case.
func (s *scrubber) inName(name string) bool {
	name = strings.ToLower(name)
	for _, p := range s.patterns {
		if strings.Contains(name, strings.ToLower(string(p.text))) {
			return true
		}
	}
	return false
}

func mask(b []byte) {
	for i := range b {
		b[i] = '*'
	}
}

// scrubStream scrubs bytes that come in pieces. Its output has the length of its input.
type scrubStream struct {
	*scrubber
	seen   []byte // as it came, from where a spelling may have begun
	gone   int    // of seen, already handed on
	masked int    // of seen, to be masked up to here
	hits   int
}

// feed returns what may leave now; it is valid until the next call. Held back is only what has begun like
// a spelling for more than a few bytes.
func (s *scrubStream) feed(p, out []byte) []byte {
	s.seen = append(s.seen, p...)
	out = append(out, s.seen[s.gone:]...)
	if s.masked > s.gone {
		mask(out[:min(s.masked-s.gone, len(out))])
	}
	s.find(s.seen, func(f span) {
		s.hits++
		s.masked = max(s.masked, f.to)
		if f.to > s.gone {
			mask(out[max(0, f.from-s.gone) : f.to-s.gone])
		}
	})
	from := s.open(s.seen)
	leave := len(s.seen)
	if len(s.seen)-from > s.shown {
		leave = max(s.gone, from+min(s.shown, len(s.seen)-from))
		// What is masked already needs not wait.
		leave = min(len(s.seen), max(leave, s.masked))
	}
	out = out[:leave-s.gone]
	n := copy(s.seen, s.seen[from:])
	s.seen = s.seen[:n]
	s.gone = max(0, leave-from)
	s.masked = max(0, s.masked-from)
	return out
}

// rest returns what was held back: it turned out to be no spelling.
func (s *scrubStream) rest(out []byte) []byte {
	out = append(out, s.seen[s.gone:]...)
	if s.masked > s.gone {
		mask(out[:min(s.masked-s.gone, len(out))])
	}
	s.gone = len(s.seen)
	return out
}

// scrubbers keeps those of secrets that are in use, for less than a minute after the last use.
type scrubbers struct {
	mu   sync.Mutex
	byID map[[32]byte]*keptScrubber
}

type keptScrubber struct {
	*scrubber
	used time.Time
}

// keepScrubber is how long one is kept at first, and manyScrubbers how many are at most.
const (
	keepScrubber  = time.Minute
	manyScrubbers = 128
)

func (k *scrubbers) of(now func() time.Time, values [][]byte) *scrubber {
	h := sha256.New()
	for _, v := range values {
		sum := sha256.Sum256(v)
		h.Write(sum[:])
	}
	id := [32]byte(h.Sum(nil))
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.byID[id]
	if s == nil {
		s = &keptScrubber{scrubber: newScrubber(values...)}
		if len(k.byID) >= manyScrubbers {
			return s.scrubber
		}
		if k.byID == nil {
			k.byID = map[[32]byte]*keptScrubber{}
		}
		k.byID[id] = s
		time.AfterFunc(keepScrubber, func() { k.expire(now, id) })
	}
	s.used = now()
	return s.scrubber
}

// expire forgets one that is not in use any more.
func (k *scrubbers) expire(now func() time.Time, id [32]byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s := k.byID[id]; s != nil && now().Sub(s.used) < keepScrubber/2 {
		time.AfterFunc(keepScrubber/2, func() { k.expire(now, id) })
		return
	}
	delete(k.byID, id)
}
