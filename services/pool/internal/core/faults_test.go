package core

import (
	"fmt"
	"testing"
	"time"
)

// TestFaultAHostWithASlowClockIsRefilledForEver: what a host whose clock is behind has just made is not
// older than max_age; it is replaced as often as on any other host.
func TestFaultAHostWithASlowClockIsRefilledForEver(t *testing.T) {
	for _, skew := range []time.Duration{-25 * time.Minute, 0, 90 * time.Second} {
		w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 4, Ceiling: 8, InFlight: 2, MaxAge: 10 * time.Minute, Share: 1}, 2)
		for _, h := range w.hosts {
			h.skew = skew
		}
		w.quiet(3600)
		if w.ready() < 4 || w.names < 20 || w.names > 32 {
			t.Errorf("clocks that differ by %s: %d were prepared in an hour for 4, %d wait", skew, w.names, w.ready())
		}
	}
}

// TestFaultAShareIsRoundedToNothing: a share is above 0, so it is at least one.
func TestFaultAShareIsRoundedToNothing(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 4, Ceiling: 4, InFlight: 4, MaxAge: time.Hour, Share: 1e-12}, 1)
	w.quiet(20)
	l := w.leaders[0]
	for _, tenant := range []string{"a", "b", "c"} {
		if a := l.Reserve(Ask{Tenant: tenant, Session: tenant, Attempt: "1", Hosts: []string{"h1"}}, w.now); a.Verdict != Reserved {
			t.Errorf("%s: %+v", tenant, a)
		}
	}
	if a := l.Reserve(Ask{Tenant: "a", Session: "a", Attempt: "2", Hosts: []string{"h1"}}, w.now); a.Verdict != OverShare {
		t.Errorf("the second of one tenant: %+v", a)
	}
}

// TestFaultOneTenantTakesEveryPlaceInTheQueue: beyond a number of asks that wait, those of one tenant
// start cold at once, and another's wait for the next.
func TestFaultOneTenantTakesEveryPlaceInTheQueue(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 1, Ceiling: 1, InFlight: 1, MaxAge: time.Hour, Share: 1, Wait: 10 * time.Second}, 1)
	l := w.leaders[0]
	waiting := 0
	for i := range 3 * MaxWaiting {
		if l.Reserve(Ask{Tenant: "greedy", Session: "g", Attempt: fmt.Sprint(i), Hosts: []string{"h1"}}, w.now).Verdict == Waiting {
			waiting++
		}
	}
	if waiting != MaxWaitingOfOne {
		t.Errorf("%d of one tenant wait", waiting)
	}
	if a := l.Reserve(Ask{Tenant: "modest", Session: "m", Attempt: "1", Hosts: []string{"h1"}}, w.now); a.Verdict != Waiting {
		t.Errorf("another tenant: %+v", a)
	}
}

// TestFaultAnUnhealthyPoolIsNewsEverySecond: why a pool cannot be filled is the same sentence while it is
// the same reason, whenever it is tried again.
func TestFaultAnUnhealthyPoolIsNewsEverySecond(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 4, Ceiling: 8, InFlight: 2, MaxAge: time.Hour, Share: 1}, 2)
	w.tpl.Memory = 2
	w.leaders[0].Declare(w.spec, w.tpl)
	w.hosts[0].fail, w.hosts[1].free = "no space left", 1
	w.quiet(60)
	told := map[string]bool{}
	for range 300 {
		w.quiet(1)
		told[w.leaders[0].Plan(w.now).Unhealthy] = true
	}
	delete(told, "") // while it is tried again
	if len(told) != 1 || !told["no host can: h1: no space left; h2: 1 bytes of memory are free there, 2 are needed"] {
		t.Errorf("%v", told)
	}
}

// TestFaultALoweredCeilingIsFilledUpToTheOldOne: nothing is prepared by what an earlier ceiling allowed,
// neither by a plan that is made after it was lowered nor by one that was made before.
func TestFaultALoweredCeilingIsFilledUpToTheOldOne(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 10, Ceiling: 10, InFlight: 4, MaxAge: time.Hour, Share: 1}, 2)
	w.quiet(30)
	l, h2 := w.leaders[0], w.host("h2")
	w.hosts[0].silent = true
	for range 5 {
		w.claim("h2")
	}
	w.ask(l)
	before := l.Plan(w.now)
	w.spec.Minimum, w.spec.Ceiling = 4, 4
	l.Declare(w.spec, w.tpl)
	for _, s := range before.Steps {
		if s.Kind == PrepareOne && l.Begin(s, "wlate", w.now) {
			t.Fatalf("%s, with five on another host and a ceiling of 4", s)
		}
	}
	for range 60 {
		w.quiet(1)
		if len(h2.there) > 0 {
			t.Fatalf("%d were prepared beside the five of a host that is silent, with a ceiling of 4", len(h2.there))
		}
	}
	if why := l.Plan(w.now).Unhealthy; why != "5 may exist on hosts that do not answer, and the ceiling leaves no room beside them" {
		t.Errorf("unhealthy: %q", why)
	}
	w.hosts[0].silent = false
	w.quiet(600)
	if w.ready() != 4 || w.told() > 4 {
		t.Errorf("%d wait, and hosts may have %d", w.ready(), w.told())
	}
}
