package core

import (
	"math"
	"time"
)

const (
	shortTime = time.Minute
	longTime  = 15 * time.Minute
	weekHours = 7 * 24
	// enoughWeeks of an hour of the week make its history count.
	enoughWeeks = 2
	// wholeHour is how much of an hour must have been seen for it to count.
	wholeHour = 50 * time.Minute
	// ahead is how long before an hour begins it is prepared for.
	ahead = 5 * time.Minute
)

// Demand is how much the pool is used: by wakes that took, or would have taken, a warm sandbox. It is
// kept from leader to leader.
type Demand struct {
	// Short and Long are claims a second as of At, exponentially weighted over a minute and a quarter of
	// an hour.
	Short, Long float64
	At          time.Time
	// PrepareTime is how long one preparation takes, exponentially weighted; zero: none was seen.
	PrepareTime time.Duration
	// Hours of the week in UTC, from Sunday's first.
	Hours map[int]Hour
	// Running is the hour that is not over.
	Running Running
}

// Hour is one hour of the week, over the weeks in which all of it was seen.
type Hour struct {
	Claims float64
	Weeks  int
}

// Running is the hour since 1970 that claims are counted for.
type Running struct {
	Hour   int64
	Seen   time.Duration
	Claims uint64
}

// note takes in claims since the last note.
func (d *Demand) note(claims uint64, now time.Time) {
	var dt time.Duration
	if !d.At.IsZero() && now.After(d.At) {
		dt = now.Sub(d.At)
	}
	if hour := now.Unix() / 3600; hour != d.Running.Hour {
		d.closeHour()
		d.Running = Running{Hour: hour}
	}
	d.Running.Seen += min(dt, time.Minute)
	d.Running.Claims += claims
	d.Short, d.Long = d.rates(now)
	d.Short += float64(claims) / shortTime.Seconds()
	d.Long += float64(claims) / longTime.Seconds()
	if now.After(d.At) {
		d.At = now
	}
}

func (d *Demand) closeHour() {
	if d.Running.Seen < wholeHour {
		return
	}
	if d.Hours == nil {
		d.Hours = map[int]Hour{}
	}
	at := hourOfWeek(time.Unix(d.Running.Hour*3600, 0))
	h := d.Hours[at]
	if h.Weeks == 0 {
		h.Claims = float64(d.Running.Claims)
	} else {
		h.Claims += (float64(d.Running.Claims) - h.Claims) * 0.4
	}
	h.Weeks++
	d.Hours[at] = h
}

// rates are claims a second, now.
func (d *Demand) rates(now time.Time) (short, long float64) {
	dt := max(0, now.Sub(d.At).Seconds())
	if d.At.IsZero() {
		return 0, 0
	}
	return d.Short * math.Exp(-dt/shortTime.Seconds()), d.Long * math.Exp(-dt/longTime.Seconds())
}

// usual is how many claims the hour usually has that begins now or shortly; false: nobody knows yet.
func (d *Demand) usual(now time.Time) (float64, bool) {
	a, b := d.Hours[hourOfWeek(now)], d.Hours[hourOfWeek(now.Add(ahead))]
	if a.Weeks < enoughWeeks {
		a = Hour{}
	}
	if b.Weeks >= enoughWeeks && b.Claims > a.Claims {
		a = b
	}
	return a.Claims, a.Weeks >= enoughWeeks
}

// prepared takes in how long one preparation took.
func (d *Demand) prepared(took time.Duration) {
	if took < 0 {
		return
	}
	if d.PrepareTime == 0 {
		d.PrepareTime = took
	}
	d.PrepareTime += (took - d.PrepareTime) / 5
}

func (d Demand) clone() Demand {
	hours := make(map[int]Hour, len(d.Hours))
	for k, v := range d.Hours {
		hours[k] = v
	}
	d.Hours = hours
	return d
}

// sane drops what no leader would have kept.
func (d Demand) sane() Demand {
	d = d.clone()
	for k, v := range d.Hours {
		if k < 0 || k >= weekHours || !(v.Claims >= 0) || v.Weeks < 0 {
			delete(d.Hours, k)
		}
	}
	if !(d.Short >= 0) || !(d.Long >= 0) || d.PrepareTime < 0 {
		d.Short, d.Long, d.PrepareTime = 0, 0, 0
	}
	return d
}

func hourOfWeek(t time.Time) int {
	t = t.UTC()
	return int(t.Weekday())*24 + t.Hour()
}
