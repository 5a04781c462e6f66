package agent

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// TestRingAgainstAModel holds the ring to a plain slice per stream: what it keeps
// is a suffix of what was written, byte by byte, and never more than its limit.
func TestRingAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := ring{limit: rapid.SampledFrom([]int{1, 1000, 3 * blockSize, 5*blockSize + 7}).Draw(t, "limit")}
		var model [2][]byte
		check := func() {
			size := 0
			for i, sub := range outputs {
				l := r.lane(sub)
				size += int(l.end - l.base)
				if l.end != uint64(len(model[i])) || l.base > l.end {
					t.Fatalf("lane %d: %d..%d, want end %d", i, l.base, l.end, len(model[i]))
				}
				got := make([]byte, l.end-l.base)
				if n := r.copyAt(sub, l.base, got); n != len(got) || !bytes.Equal(got, model[i][l.base:]) {
					t.Fatalf("lane %d: %d bytes of %d, or wrong ones", i, n, len(got))
				}
			}
			if size != r.size || size > r.limit {
				t.Fatalf("size %d, counted %d, limit %d", r.size, size, r.limit)
			}
		}
		next := byte(0)
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				i := rapid.IntRange(0, 1).Draw(t, "lane")
				p := make([]byte, rapid.IntRange(0, min(r.room(), 2*blockSize)).Draw(t, "bytes"))
				for j := range p {
					next += 7
					p[j] = next
				}
				r.append(outputs[i], p)
				model[i] = append(model[i], p...)
			},
			"drop": func(t *rapid.T) {
				var before [2]uint64
				can := 0
				for i := range before {
					l := &r.lanes[i]
					before[i] = rapid.Uint64Range(0, l.end+5).Draw(t, "before")
					if upTo := min(before[i], l.end); upTo > l.base {
						can += int(upTo - l.base)
					}
				}
				n := rapid.IntRange(0, r.limit).Draw(t, "n")
				if got := r.dropOldest(before, n); got != min(n, can) {
					t.Fatalf("dropped %d, want %d", got, min(n, can))
				}
			},
			"": func(*rapid.T) { check() },
		})
	})
}

func TestRingDropsTheOldestOfBothStreams(t *testing.T) {
	r := ring{limit: 4 * blockSize}
	block := make([]byte, blockSize)
	for _, sub := range []wire.Sub{wire.Stderr, wire.Stdout, wire.Stdout, wire.Stderr} {
		r.append(sub, block)
	}
	all := [2]uint64{^uint64(0), ^uint64(0)}
	r.dropOldest(all, 2*blockSize)
	if r.lane(wire.Stderr).base != blockSize || r.lane(wire.Stdout).base != blockSize {
		t.Errorf("stdout from %d, stderr from %d", r.lane(wire.Stdout).base, r.lane(wire.Stderr).base)
	}
}
