package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"time"
)

// epoch0 is the wall-clock time at which every simulation begins.
var epoch0 = time.Unix(1_900_000_000, 0).UTC()

// event is something that happens at a time; of two at one time the one that was asked for first.
type event struct {
	at  time.Duration
	seq uint64
	run func()
}

// kernel is time, chance and the record of what happened.
type kernel struct {
	now   time.Duration
	rng   *rand.Rand
	queue []event // a heap
	seq   uint64
	steps int

	hash  uint64
	last  [traceKept]string
	lines int
	out   io.Writer // of the whole trace; nil: nobody reads it
	buf   []byte
}

// traceKept is how many of the newest lines of a trace are kept for the report of a failure.
const traceKept = 60

func newKernel(seed uint64, out io.Writer) kernel {
	return kernel{rng: rand.New(rand.NewPCG(seed, 0x62657274682d7369)), hash: 14695981039346656037, out: out}
}

func (k *kernel) less(a, b int) bool {
	x, y := &k.queue[a], &k.queue[b]
	return x.at < y.at || x.at == y.at && x.seq < y.seq
}

// after has f happen in d.
func (k *kernel) after(d time.Duration, f func()) {
	k.seq++
	k.queue = append(k.queue, event{k.now + max(d, 0), k.seq, f})
	for i := len(k.queue) - 1; i > 0; {
		up := (i - 1) / 2
		if !k.less(i, up) {
			break
		}
		k.queue[i], k.queue[up] = k.queue[up], k.queue[i]
		i = up
	}
}

// pop takes the next event out.
func (k *kernel) pop() (event, bool) {
	n := len(k.queue)
	if n == 0 {
		return event{}, false
	}
	e := k.queue[0]
	k.queue[0] = k.queue[n-1]
	k.queue[n-1] = event{}
	k.queue = k.queue[:n-1]
	for i := 0; ; {
		c := 2*i + 1
		if c >= n-1 {
			break
		}
		if c+1 < n-1 && k.less(c+1, c) {
			c++
		}
		if !k.less(c, i) {
			break
		}
		k.queue[i], k.queue[c] = k.queue[c], k.queue[i]
		i = c
	}
	return e, true
}

// say writes one line of the trace.
func (k *kernel) say(format string, args ...any) {
	k.buf = strconv.AppendInt(k.buf[:0], int64(k.now/time.Microsecond), 10)
	k.buf = append(k.buf, ' ')
	k.buf = fmt.Appendf(k.buf, format, args...)
	k.buf = append(k.buf, '\n')
	for _, b := range k.buf { // FNV-1a
		k.hash = (k.hash ^ uint64(b)) * 1099511628211
	}
	k.last[k.lines%traceKept] = string(k.buf)
	k.lines++
	if k.out != nil {
		_, _ = k.out.Write(k.buf)
	}
}

// tail returns the newest lines of the trace, oldest first.
func (k *kernel) tail() []string {
	var out []string
	for i := max(0, k.lines-traceKept); i < k.lines; i++ {
		out = append(out, k.last[i%traceKept])
	}
	return out
}

// chance is true with probability p.
func (k *kernel) chance(p float64) bool { return p > 0 && k.rng.Float64() < p }

// between draws a duration in [a, b).
func (k *kernel) between(a, b time.Duration) time.Duration {
	if b <= a {
		return a
	}
	return a + time.Duration(k.rng.Int64N(int64(b-a)))
}

// pick draws one of a list.
func pick[T any](k *kernel, of []T) T { return of[k.rng.IntN(len(of))] }
