package core

import (
	"math"
	"time"
)

// tenant is how much one tenant uses the pool.
type tenant struct {
	reserved int
	// claims by the second in which they came, of the last ShareTime.
	claims []tick
	// asked is when it last asked.
	asked time.Time
	queue []*waiter
}

type tick struct {
	second int64
	n      int
}

func (t *tenant) claimed(now time.Time) {
	if n := len(t.claims); n > 0 && t.claims[n-1].second >= now.Unix() {
		t.claims[n-1].n++
		return
	}
	t.claims = append(t.claims, tick{now.Unix(), 1})
}

// recent claims, of the last ShareTime.
func (t *tenant) recent(now time.Time) (n int) {
	for len(t.claims) > 0 && now.Unix()-t.claims[0].second > int64(ShareTime/time.Second) {
		t.claims = t.claims[1:]
	}
	for _, c := range t.claims {
		n += c.n
	}
	return n
}

// mayTake reports whether a tenant may have one more of those that are free in all, or wait for one. Shares
// are in force while another tenant waits, holds a reservation or has claimed within ShareTime. Then one has
// its share of the ceiling within ShareTime, reserved or claimed; and beyond that what is free above the
// part of the goal that is the others', as fast as it is filled again. Otherwise, while another has asked
// within SeenTime, the last tenth of the ceiling (rounded down) is left for it. A share of 1 is no limit.
func (d *desk) mayTake(name string, s Spec, free, goal int, now time.Time) bool {
	if s.Share >= 1 {
		return true
	}
	contended, others := false, false
	for other, t := range d.tenants {
		if other == name {
			continue
		}
		contended = contended || t.reserved > 0 || len(t.queue) > 0 || t.recent(now) > 0
		others = others || now.Sub(t.asked) <= SeenTime
		if contended {
			break
		}
	}
	t := d.tenant(name)
	switch {
	case contended:
		theirs := int(math.Ceil((1-s.Share)*float64(goal) - 1e-9))
		return t.reserved+t.recent(now) < max(1, int(math.Ceil(s.Share*float64(s.Ceiling)-1e-9))) || free > max(1, theirs)
	case others:
		return free > s.Ceiling/10 || free == 0
	}
	return true
}

// forget drops tenants of whom nothing matters any more.
func (d *desk) forget(now time.Time) {
	if now.Sub(d.forgotten) < ShareTime {
		return
	}
	d.forgotten = now
	for name, t := range d.tenants {
		if t.reserved == 0 && len(t.queue) == 0 && t.recent(now) == 0 && now.Sub(t.asked) > SeenTime {
			delete(d.tenants, name)
		}
	}
}
