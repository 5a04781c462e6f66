package core

import (
	"fmt"
	"math"
	"time"
)

// Goal is how many the pool wants, and why.
type Goal struct {
	N      int
	Reason string
}

// Want is the largest of what the minimum, the schedule, the ratio, the rate of claims and the hour of
// the week ask for, and never above the ceiling.
func Want(s Spec, d Demand, active int, now time.Time) Goal {
	g := Goal{s.Minimum, fmt.Sprintf("the minimum is %d", s.Minimum)}
	more := func(n float64, format string, args ...any) {
		if n > float64(g.N) {
			g = Goal{int(min(n, math.MaxInt32)), fmt.Sprintf(format, args...)}
		}
	}
	for _, slot := range s.Schedule {
		if slot.applies(now) {
			more(float64(slot.Minimum), "the schedule says %d (%s)", slot.Minimum, slot)
		}
	}
	more(math.Ceil(s.Ratio*float64(active)-1e-9), "%v for each of %d awake sessions", s.Ratio, active)
	short, long := d.rates(now)
	rate := max(short, long)
	more(math.Round(2*rate*d.PrepareTime.Seconds()), "%.1f claims a second, and one takes %s to prepare", rate, d.PrepareTime.Round(time.Millisecond))
	if claims, ok := d.usual(now); ok {
		more(math.Round(claims/60), "this hour of the week usually has %.0f claims; enough for a minute", claims)
	}
	if g.N > s.Ceiling {
		g = Goal{s.Ceiling, fmt.Sprintf("the ceiling is %d; wanted were %d: %s", s.Ceiling, g.N, g.Reason)}
	}
	return g
}

// recent remembers the highest goals of the last Grace: what is above them all is too many.
type recent struct {
	began time.Time
	goals []past
}

type past struct {
	at time.Time
	n  int
}

func (r *recent) note(n int, now time.Time) {
	for len(r.goals) > 0 && r.goals[len(r.goals)-1].n <= n {
		r.goals = r.goals[:len(r.goals)-1]
	}
	r.goals = append(r.goals, past{now, n})
	for len(r.goals) > 1 && now.Sub(r.goals[0].at) > Grace {
		r.goals = r.goals[1:]
	}
}

// highest goal of the last Grace; false while nobody has watched for so long.
func (r *recent) highest(goal int, now time.Time) (int, bool) {
	for _, g := range r.goals {
		if now.Sub(g.at) <= Grace {
			goal = max(goal, g.n)
		}
	}
	return goal, now.Sub(r.began) >= Grace
}
