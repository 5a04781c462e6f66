package wire

import (
	"testing"
	"time"
)

// A fault that cannot be had again cannot be mended: the same seed must do the same to the same packets.
func TestTheSameSeedDoesTheSame(t *testing.T) {
	r := Rule{Delay: 10 * time.Millisecond, Jitter: 5 * time.Millisecond, Loss: 10, Duplicate: 10, Reorder: 10}
	fates := func(seed uint64, from, to string, r Rule) (out []fate) {
		l := newLink(seed, from, to)
		l.rule = r
		for range 1000 {
			out = append(out, l.next())
		}
		return out
	}
	differ := func(a, b []fate) (n int) {
		for i := range a {
			if a[i] != b[i] {
				n++
			}
		}
		return n
	}
	base := fates(1, "a", "b", r)
	if n := differ(base, fates(1, "a", "b", r)); n != 0 {
		t.Errorf("%d of 1000 packets met another fate with the same seed", n)
	}
	for what, other := range map[string][]fate{"seed": fates(2, "a", "b", r), "direction": fates(1, "b", "a", r)} {
		if differ(base, other) == 0 {
			t.Errorf("another %s makes no difference", what)
		}
	}
	// Which packets are lost does not depend on what else happens to them.
	for i, f := range fates(1, "a", "b", Rule{Loss: 10}) {
		if f.drop != base[i].drop {
			t.Fatalf("packet %d: a rule without delay loses others", i)
		}
	}
	count := map[string]int{}
	for _, f := range base {
		for what, is := range map[string]bool{"lost": f.drop, "twice": f.twice, "late": f.late} {
			if is {
				count[what]++
			}
		}
		if f.delay < r.Delay || f.delay > r.Delay+r.Jitter {
			t.Fatalf("a delay of %s", f.delay)
		}
	}
	for what, n := range count {
		if n < 60 || n > 150 {
			t.Errorf("%d of 1000 were %s, 100 are asked for", n, what)
		}
	}
}

// Jitter alone must not reorder: that is a fault of its own.
func TestJitterKeepsTheOrder(t *testing.T) {
	l := newLink(7, "a", "b")
	l.rule = Rule{Jitter: 50 * time.Millisecond}
	now := time.Now()
	var last time.Time
	for i := range 200 {
		at := l.due(l.next(), now.Add(time.Duration(i)*time.Millisecond))
		if at.Before(last) {
			t.Fatalf("packet %d goes before the one before it", i)
		}
		last = at
	}
}

func TestRuleRefusesWhatIsNoPercentage(t *testing.T) {
	for _, r := range []Rule{{Loss: -1}, {Duplicate: 101}, {Delay: 2 * MaxDelay}, {Jitter: -time.Second}, {Reorder: 1e9}} {
		if r.Check() == nil {
			t.Errorf("%+v was taken", r)
		}
	}
}

func TestDelayedKeepsTheOrderOfTheSameTime(t *testing.T) {
	var d delayed
	d.more = make(chan struct{}, 1)
	now := time.Now()
	var got []int
	for i := range 10 {
		d.push(now, func() { got = append(got, i) })
	}
	d.push(now.Add(-time.Second), func() { got = append(got, -1) })
	for {
		f, _ := d.take(now)
		if f == nil {
			break
		}
		f()
	}
	for i, v := range got {
		if v != i-1 {
			t.Fatalf("the order is %v", got)
		}
	}
}
