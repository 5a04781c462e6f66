package core

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"pgregory.net/rapid"
)

// TestFaultRefillOvershootsTheCeiling: whatever is lost, late or done in another order, whoever restarts
// and however many take themselves for the leader, never more exist than the ceiling.
func TestFaultRefillOvershootsTheCeiling(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(drawSpec(t), rapid.IntRange(1, 4).Draw(t, "hosts"))
		w.fails = rapid.SampledFrom([]int{0, 30, 100}).Draw(t, "fails")
		for _, h := range w.hosts {
			h.skew = time.Duration(rapid.IntRange(-50, 50).Draw(t, "skew")) * time.Second
		}
		var late []func()
		act := chaos(w, &late)
		act[""] = func(t *rapid.T) {
			if w.total() <= w.spec.Ceiling && w.told() <= w.spec.Ceiling {
				w.most = w.spec.Ceiling
			}
			if w.total() > w.most || w.told() > w.most {
				t.Fatalf("%d exist, the caps are %v, the ceiling is %d", w.total(), w.caps, w.most)
			}
		}
		act["ceiling"] = func(t *rapid.T) {
			if rapid.IntRange(0, 2).Draw(t, "seldom") == 0 {
				s := drawSpec(t)
				w.spec.Ceiling, w.spec.Minimum = s.Ceiling, s.Minimum
				w.most = max(w.most, s.Ceiling)
				w.leaders[len(w.leaders)-1].Declare(w.spec, w.tpl)
			}
		}
		t.Repeat(act)
	})
}

// chaos is all that can happen.
func chaos(w *world, late *[]func()) map[string]func(*rapid.T) {
	host := func(t *rapid.T) *fakeHost { return rapid.SampledFrom(w.hosts).Draw(t, "host") }
	lead := func(t *rapid.T) *leader { return w.leaders[rapid.IntRange(0, len(w.leaders)-1).Draw(t, "leader")] }
	work := func(t *rapid.T) {
		l := lead(t)
		for _, h := range w.hosts {
			k, ok := w.list(l, h)
			switch luck := rapid.IntRange(0, 5).Draw(t, "luck"); {
			case !ok || luck < 2: // nobody hears it
			case luck == 2:
				*late = append(*late, func() { w.tell(l, k) })
			default:
				w.tell(l, k)
			}
		}
		w.now = w.now.Add(time.Millisecond)
		w.observe(l)
		if !w.plan(l, func(Step) bool { return rapid.IntRange(0, 7).Draw(t, "do") > 0 }) && len(w.leaders) == 0 {
			w.elect()
		}
	}
	run := func(t *rapid.T) {
		h := host(t)
		for range rapid.IntRange(1, 4).Draw(t, "commands") {
			if len(h.queue) == 0 {
				return
			}
			i := rapid.IntRange(0, len(h.queue)-1).Draw(t, "command")
			f := h.queue[i]
			h.queue = slices.Delete(h.queue, i, i+1)
			f()
		}
	}
	seldom := func(f func(*rapid.T)) func(*rapid.T) {
		return func(t *rapid.T) {
			if rapid.IntRange(0, 2).Draw(t, "seldom") > 0 {
				run(t)
			} else {
				f(t)
			}
		}
	}
	return map[string]func(*rapid.T){
		"wait": func(t *rapid.T) {
			w.now = w.now.Add(time.Duration(rapid.SampledFrom([]int{1, 100, 1000, 1000, 20000, 200000}).Draw(t, "ms")) * time.Millisecond)
		},
		"work": work, "work more": work, "work on": work, "run": run, "run more": run,
		"arrive": func(t *rapid.T) {
			if len(*late) == 0 {
				t.Skip()
			}
			(*late)[0]()
			*late = (*late)[1:]
		},
		"lose": func(t *rapid.T) {
			l := lead(t)
			if len(l.pending) == 0 {
				t.Skip()
			}
			w.lose(l, rapid.SampledFrom(slices.Sorted(maps.Keys(l.pending))).Draw(t, "answer"))
		},
		"claim": func(t *rapid.T) {
			h := host(t)
			for _, id := range slices.Sorted(maps.Keys(h.there)) {
				if h.there[id].State == Ready {
					delete(h.there, id)
					h.claimed++
					if rapid.Bool().Draw(t, "settle") {
						lead(t).Settle(Settled{Tenant: "a", Host: h.id, Warm: id}, w.now)
					}
					return
				}
			}
			t.Skip()
		},
		"restart": seldom(func(t *rapid.T) { restart(host(t)) }),
		"lost": seldom(func(t *rapid.T) {
			h := host(t)
			if h.lost = !h.lost; h.lost {
				restart(h)
			}
			for _, l := range w.leaders {
				w.observe(l) // scheduler says so
			}
		}),
		"drain":  seldom(func(t *rapid.T) { h := host(t); h.drain = !h.drain }),
		"elect":  seldom(func(t *rapid.T) { w.elect() }),
		"change": seldom(func(t *rapid.T) { w.tpl.Digest += "x"; w.leaders[len(w.leaders)-1].Declare(w.spec, w.tpl) }),
	}
}

// restart leaves nothing of what was there; messages that are under way still arrive.
func restart(h *fakeHost) {
	h.boot++
	clear(h.there)
	h.claimed = 0
}

// TestPlanConverges: when everything answers, the goal is met and nothing is left to do.
func TestPlanConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSpec(t)
		s.MaxAge = 24 * time.Hour
		w := newWorld(s, rapid.IntRange(1, 4).Draw(t, "hosts"))
		var late []func()
		t.Repeat(chaos(w, &late))
		w.fails = 0
		for _, h := range w.hosts {
			h.lost, h.drain = false, false
		}
		w.elect()
		w.quiet(900)
		l := w.leaders[len(w.leaders)-1]
		pl := l.Plan(w.now)
		if w.ready() != pl.Goal.N || len(pl.Steps) > 0 || pl.CapsChanged || !pl.Filled || pl.Unhealthy != "" {
			t.Fatalf("%d wait after a quarter of an hour: %+v", w.ready(), pl)
		}
	})
}

// TestFaultRefillLoopsForEverWhenCreationFails: in an hour of failures a host is asked no more often than
// the back-off allows, by one leader.
func TestFaultRefillLoopsForEverWhenCreationFails(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 8, Ceiling: 10, InFlight: 2, MaxAge: time.Hour, Share: 1}, 2)
	w.fails = 100
	w.quiet(3600)
	if w.names < 10 || w.names > 50 {
		t.Errorf("%d preparations in an hour on two hosts", w.names)
	}
	l := w.leaders[0]
	if pl := l.Plan(w.now); pl.Unhealthy != "preparing fails on every host that could: h1: no space left; h2: no space left" {
		t.Errorf("unhealthy: %q", pl.Unhealthy)
	}
	w.fails = 0
	w.quiet(600)
	if pl := l.Plan(w.now); w.ready() != 8 || pl.Unhealthy != "" {
		t.Errorf("%d wait when it works again: %+v", w.ready(), pl)
	}
}

// TestFaultReplacementEmptiesThePool: when the template changes, fewer than the goal can be claimed only
// where the ceiling leaves no room, and then by one.
func TestFaultReplacementEmptiesThePool(t *testing.T) {
	for _, ceiling := range []int{6, 7, 20} {
		w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 6, Ceiling: ceiling, InFlight: 2, MaxAge: time.Hour, Share: 1}, 3)
		w.quiet(60)
		w.tpl.Digest = "d2"
		w.leaders[0].Declare(w.spec, w.tpl)
		least := 6
		for range 120 {
			w.quiet(1)
			least = min(least, w.ready())
		}
		allowed := 6
		if ceiling == 6 {
			allowed = 5
		}
		if least < allowed {
			t.Errorf("ceiling %d: only %d could be claimed", ceiling, least)
		}
		for _, h := range w.hosts {
			for _, s := range h.there {
				if s.Digest != "d2" {
					t.Errorf("ceiling %d: %s was not replaced", ceiling, s.ID)
				}
			}
		}
	}
}

// TestReservationsEnd: whatever is asked, settled or forgotten, in the end nothing is reserved or kept,
// and each ask has exactly one answer.
func TestReservationsEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 6, Ceiling: 8, InFlight: 2, MaxAge: time.Hour, Share: 0.5,
			Wait: time.Duration(rapid.IntRange(0, 3).Draw(t, "wait")) * time.Second}, 2)
		w.quiet(20)
		l := w.leaders[0]
		answers, waiting, asked := map[string]int{}, map[string]bool{}, []Answer{}
		take := func(a Answer) {
			answers[a.Reservation]++
			delete(waiting, a.Reservation)
			asked = append(asked, a)
		}
		n := 0
		t.Repeat(map[string]func(*rapid.T){
			"ask": func(t *rapid.T) {
				n++
				a := Ask{Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"), Session: "s", Attempt: string(rune('A' + n)),
					Hosts: rapid.SampledFrom([][]string{{"h1"}, {"h2"}, {"h1", "h2"}, {"h9"}}).Draw(t, "hosts")}
				out := l.Reserve(a, w.now)
				if again := l.Reserve(a, w.now); again != out {
					t.Fatalf("asked again: %+v, then %+v", out, again)
				}
				if out.Verdict == Waiting {
					waiting[out.Reservation] = true
				} else {
					take(out)
				}
			},
			"settle": func(t *rapid.T) {
				if len(asked) == 0 {
					t.Skip()
				}
				a := asked[len(asked)-1]
				asked = asked[:len(asked)-1]
				s := Settled{Reservation: a.Reservation, Host: a.Host}
				if a.Host != "" && rapid.Bool().Draw(t, "claimed") {
					s.Warm = w.claim(a.Host)
				}
				l.Settle(s, w.now)
				l.Settle(s, w.now)
			},
			"wait": func(t *rapid.T) { w.quiet(rapid.IntRange(1, 3).Draw(t, "seconds")) },
			"": func(t *rapid.T) {
				got, _ := l.Granted(w.now)
				for _, a := range got {
					take(a)
				}
				for name, times := range answers {
					if times > 1 {
						t.Fatalf("%s was answered %d times", name, times)
					}
				}
			},
		})
		w.quiet(20)
		got, _ := l.Granted(w.now)
		for _, a := range got {
			take(a)
		}
		w.quiet(20)
		if _, next := l.Granted(w.now); !next.IsZero() || len(waiting) > 0 || l.Status(w.now).Reserved != 0 || len(l.desk.held) > 0 {
			t.Fatalf("left: %v, next %s, %d reserved, %d held", waiting, next, l.Status(w.now).Reserved, len(l.desk.held))
		}
	})
}

func (w *world) claim(host string) ids.SandboxID {
	h := w.host(host)
	for _, id := range slices.Sorted(maps.Keys(h.there)) {
		if h.there[id].State == Ready {
			delete(h.there, id)
			h.claimed++
			return id
		}
	}
	return ""
}

// TestFaultOneTenantDrainsThePoolForAll: while a tenant asks without end, another that asks now and then
// always gets a warm one; and what the others leave is the first one's as fast as it is filled again.
func TestFaultOneTenantDrainsThePoolForAll(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 10, Ceiling: 10, InFlight: 2, MaxAge: time.Hour, Share: 0.5, Wait: 200 * time.Millisecond}, 2)
	w.quiet(60)
	l := w.leaders[0]
	hosts := []string{"h1", "h2"}
	greedy, served := 0, 0
	for i := range 600 {
		if i%20 == 0 {
			a := l.Reserve(Ask{Tenant: "modest", Session: "m", Attempt: w.now.String(), Hosts: hosts}, w.now)
			if a.Verdict == Reserved {
				served++
				l.Settle(Settled{Reservation: a.Reservation, Host: a.Host, Warm: w.claim(a.Host)}, w.now)
			}
		}
		for j := range 10 {
			a := l.Reserve(Ask{Tenant: "greedy", Session: string(rune('A' + j)), Attempt: w.now.String(), Hosts: hosts}, w.now)
			if a.Verdict == Reserved {
				greedy++
				l.Settle(Settled{Reservation: a.Reservation, Host: a.Host, Warm: w.claim(a.Host)}, w.now)
			}
		}
		l.Granted(w.now)
		w.quiet(1)
	}
	if served != 30 {
		t.Errorf("the modest tenant was served %d times of 30", served)
	}
	if greedy < 100 || greedy > 5900 {
		t.Errorf("the greedy tenant got %d of 6000 in ten minutes", greedy)
	}
}

// TestNobodyWaitsBehindAnotherTenantsQueue: tenants that wait are served in turn, each in order of arrival.
func TestNobodyWaitsBehindAnotherTenantsQueue(t *testing.T) {
	w := newWorld(Spec{Template: "py", Tier: gvisor, Minimum: 0, Ceiling: 10, InFlight: 1, MaxAge: time.Hour, Share: 1, Wait: time.Minute}, 1)
	w.quiet(2)
	l := w.leaders[0]
	for _, who := range []string{"a1", "a2", "a3", "a4", "b1", "b2", "c1"} {
		if a := l.Reserve(Ask{Tenant: who[:1], Session: who, Attempt: "1", Hosts: []string{"h1"}}, w.now); a.Verdict != Waiting {
			t.Fatalf("%s: %+v", who, a)
		}
	}
	var got []string
	w.spec.Minimum = 7
	l.Declare(w.spec, w.tpl)
	for range 20 {
		w.quiet(1)
		answers, _ := l.Granted(w.now)
		for _, a := range answers {
			got = append(got, a.Reservation[:2])
		}
	}
	if want := []string{"a1", "b1", "c1", "a2", "b2", "a3", "a4"}; !slices.Equal(got, want) {
		t.Errorf("served %v, not %v", got, want)
	}
}

// TestFaultATenantIsStarved: of tenants that all wait, none is served more than once while another is not,
// however many asks it has.
func TestFaultATenantIsStarved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(Spec{Template: "py", Tier: gvisor, Ceiling: 40, InFlight: 8, MaxAge: time.Hour, Share: 1, Wait: time.Hour}, 2)
		w.quiet(2)
		l := w.leaders[0]
		names := []string{"a", "b", "c", "d"}
		waits, got, n := map[string]int{}, map[string]int{}, 0
		ask := func(who string) {
			n++
			waits[who]++
			l.Reserve(Ask{Tenant: who, Session: who, Attempt: fmt.Sprint(n), Hosts: []string{"h1", "h2"}}, w.now)
		}
		for _, who := range names {
			for range rapid.IntRange(3, 12).Draw(t, "asks of "+who) {
				ask(who)
			}
		}
		w.spec.Minimum = rapid.IntRange(1, 12).Draw(t, "supply")
		l.Declare(w.spec, w.tpl)
		for range 4 {
			w.quiet(1)
			answers, _ := l.Granted(w.now)
			for _, a := range answers {
				got[a.Reservation[:1]]++
				waits[a.Reservation[:1]]--
				ask(a.Reservation[:1])
			}
		}
		for _, a := range names {
			for _, b := range names {
				if got[a] > got[b]+1 {
					t.Fatalf("served %v", got)
				}
			}
		}
	})
}
