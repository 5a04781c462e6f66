package core

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkReserve is one ask and what becomes of it, in a pool of 300 on three hosts with 20 tenants.
func BenchmarkReserve(b *testing.B) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 300, Ceiling: 300, InFlight: 64, MaxAge: time.Hour, Share: 1}, 3)
	w.quiet(10)
	l := w.leaders[0]
	for i := 0; b.Loop(); i++ {
		w.now = w.now.Add(time.Millisecond)
		for _, h := range l.members {
			h.Heard = w.now
		}
		a := l.Reserve(Ask{Tenant: fmt.Sprint("t", i%20), Session: "s", Attempt: fmt.Sprint(i), Hosts: []string{"h1", "h2", "h3"}}, w.now)
		if a.Verdict != Reserved {
			b.Fatal(a)
		}
		l.Settle(Settled{Reservation: a.Reservation}, w.now)
	}
}

// BenchmarkPlan is a plan for a pool of 10,000 on 50 hosts, half of which has to be prepared.
func BenchmarkPlan(b *testing.B) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 5000, Ceiling: 10000, InFlight: 64, MaxAge: time.Hour, Share: 1}, 50)
	w.quiet(10)
	l := w.leaders[0]
	w.spec.Minimum = 10000
	l.Declare(w.spec, w.tpl)
	for b.Loop() {
		if p := l.Plan(w.now); p.Lacking != 5000 {
			b.Fatal(p.Lacking)
		}
	}
}
