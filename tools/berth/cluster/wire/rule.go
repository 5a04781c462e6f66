package wire

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"time"
)

// Rule is what happens to packets that go from one namespace to another. The zero value lets all
// pass at once.
type Rule struct {
	Cut       bool          `json:"cut,omitempty"`
	Delay     time.Duration `json:"delay,omitempty"`
	Jitter    time.Duration `json:"jitter,omitempty"`    // up to so much more
	Loss      float64       `json:"loss,omitempty"`      // percent
	Duplicate float64       `json:"duplicate,omitempty"` // percent
	Reorder   float64       `json:"reorder,omitempty"`   // percent that those behind overtake
}

// Bounds of a rule.
const (
	MaxDelay = time.Minute
	// overtake is how long a packet that is reordered is held back.
	overtake = 5 * time.Millisecond
	// maxQueued is how many bytes wait on one link.
	maxQueued = 32 << 20
)

// Check says in one sentence what is wrong with a rule.
func (r Rule) Check() error {
	if r.Delay < 0 || r.Jitter < 0 || r.Delay+r.Jitter > MaxDelay {
		return fmt.Errorf("a delay with its jitter lies between 0 and %s", MaxDelay)
	}
	for name, p := range map[string]float64{"loss": r.Loss, "duplicate": r.Duplicate, "reorder": r.Reorder} {
		if !(p >= 0 && p <= 100) {
			return fmt.Errorf("%s is a percentage between 0 and 100", name)
		}
	}
	return nil
}

// link is the state of one ordered pair that has a rule.
type link struct {
	mu     sync.Mutex
	rule   Rule
	rng    *rand.Rand
	last   time.Time // when the newest packet that keeps its order goes
	queued int       // bytes
}

func newLink(seed uint64, from, to string) *link {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%s\x00%s", from, to)
	return &link{rng: rand.New(rand.NewPCG(seed, h.Sum64()))}
}

// fate is what happens to one packet.
type fate struct {
	drop, twice, late bool
	delay             time.Duration
}

// next decides the fate of the next packet. It draws as often whatever the rule says, so that the
// n-th packet's luck depends on nothing but n.
func (l *link) next() fate {
	loss, dup, late, jitter := l.rng.Float64(), l.rng.Float64(), l.rng.Float64(), l.rng.Float64()
	r := l.rule
	return fate{
		drop:  r.Cut || loss*100 < r.Loss,
		twice: dup*100 < r.Duplicate,
		late:  late*100 < r.Reorder,
		delay: r.Delay + time.Duration(jitter*float64(r.Jitter)),
	}
}

// due is when a packet goes that comes now. Those in order never overtake one another.
func (l *link) due(f fate, now time.Time) time.Time {
	at := now.Add(f.delay)
	if f.late {
		return at.Add(overtake)
	}
	if at.Before(l.last) {
		at = l.last
	}
	l.last = at
	return at
}
