package core

import (
	"fmt"
	"strings"
	"time"
)

// settling is how long after the term began hosts may still be about to answer.
const settling = HeardFor

// unhealthy says why the pool cannot be filled now: no host could, or all that could fail.
func (d *draft) unhealthy(placed int) {
	if d.plan.Lacking == 0 || placed > 0 && !d.allFail() || d.working() {
		return
	}
	full := d.full > 0
	var reasons []string
	for _, h := range d.hosts {
		if h.cannot != "" {
			reasons = append(reasons, h.ID+": "+h.reason(d.now))
		}
	}
	switch young := d.now.Sub(d.p.began) < settling; {
	case d.allFail():
		d.plan.Unhealthy = "preparing fails on every host that could: " + d.failures()
	case young || full && len(reasons) == 0:
	case full && d.elsewhere() > 0:
		d.plan.Unhealthy = fmt.Sprintf("%d may exist on hosts that do not answer, and the ceiling leaves no room beside them", d.elsewhere())
	case full:
	case len(d.hosts) == 0:
		d.plan.Unhealthy = "there is no host"
	default:
		d.plan.Unhealthy = "no host can: " + few(reasons)
	}
}

// reason is why the host cannot, without when it is tried again: that is another every second.
func (h *place) reason(now time.Time) string {
	if h.back.failures > 0 && h.cannot == h.back.why(h.under, now) {
		return h.back.reason
	}
	return h.cannot
}

// working reports whether a host that has not failed prepares now.
func (d *draft) working() bool {
	for _, h := range d.hosts {
		if h.counts && h.back.failures == 0 && h.coming() > 0 {
			return true
		}
	}
	return false
}

// allFail reports whether every host that could has failed and has not prepared one since.
func (d *draft) allFail() bool {
	n := 0
	for _, h := range d.hosts {
		if !h.counts {
			continue
		}
		if h.back.failures == 0 {
			return false
		}
		n++
	}
	return n > 0
}

func (d *draft) failures() string {
	var out []string
	for _, h := range d.hosts {
		if h.counts {
			out = append(out, h.ID+": "+h.back.reason)
		}
	}
	return few(out)
}

// elsewhere is how many may exist on hosts that do not answer.
func (d *draft) elsewhere() (n int) {
	for _, h := range d.hosts {
		if !h.fresh {
			n += h.cap
		}
	}
	return n
}

// few reasons are enough.
func few(all []string) string {
	if len(all) > 4 {
		all = append(all[:3:3], fmt.Sprintf("and %d more", len(all)-3))
	}
	return strings.Join(all, "; ")
}

// String is the step in words.
func (s Step) String() string {
	if s.Kind == RetireOne {
		return fmt.Sprintf("retire %s on %s: %s", s.Sandbox, s.Host, s.Why)
	}
	return fmt.Sprintf("prepare one on %s (at most %d there): %s", s.Host, s.Cap, s.Why)
}

// Words are the steps in words, those that are alike in one line.
func Words(steps []Step) (out []string) {
	for i := 0; i < len(steps); {
		n := 1
		for i+n < len(steps) && steps[i].Kind == PrepareOne && steps[i+n] == steps[i] {
			n++
		}
		if n > 1 {
			out = append(out, fmt.Sprintf("prepare %d on %s (at most %d there): %s", n, steps[i].Host, steps[i].Cap, steps[i].Why))
		} else {
			out = append(out, steps[i].String())
		}
		i += n
	}
	return out
}
